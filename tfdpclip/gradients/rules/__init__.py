"""From the ops that read a variable to the forms of its gradient.

Comes in: variables, losses `[B]` and flows. Goes out: a `Form` for each use of a
variable, joined to a single gradient of the variable.

`uses` finds the ops where a variable first meets the batch (`row_lookup`: sparse
tables; `while_loops` with `step_lists`: inside loops). `rule_table` maps an op type to
its rule; the rules are in `op_rules` and `contraction_rules`, and take their rows by
`context`. `combine` joins the uses of a variable (`tied`: a table that is looked up and
multiplied by).

Invariant: a rule returns None where it does not fit, and the Jacobian of
`proof/fallback.py` takes the variable; no rule guesses.

To add: a function in the file of its kind, with an entry in `RULES` there (or
`dpc.gradients.op_rule`), and an entry in `CASES` of `tests/gradients/op_rules_test.py`.
"""
