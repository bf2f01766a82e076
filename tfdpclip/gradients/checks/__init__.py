"""The comparison of the first step of a trace with ordinary gradients.

Comes in: the forms of all variables and the losses `[B]`. Goes out: a boolean tensor
that is false where sums or norms differ from TensorFlow's own gradients
(`rule_check`), under weights that `chance` draws; `status` says which step compares.

Invariant: the comparison finds wrong rules, and rounding never fails it. It does not
decide whether examples stay apart: the proof does (`proof`).

To add: a new compared quantity is a method of `RuleCheck`, with a planted bug in
`tests/testing/mutations.py` that no earlier quantity finds.
"""
