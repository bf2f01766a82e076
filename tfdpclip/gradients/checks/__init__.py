"""The comparison of the first step of a trace with ordinary gradients.

Comes in: the forms of all variables and the losses `[B]`. Goes out: a boolean tensor
that is false where sums or norms differ from TensorFlow's own gradients
(`rule_check`), under weights that `chance` draws; `status` says which step compares.

Invariant: the comparison finds a wrong rule, never rounding: isolation is the proof's
(`proof`), and nothing here decides about it.

To add: another compared quantity is a method of `RuleCheck`, and a planted bug in
`tests/testing/mutations.py` that it alone finds.
"""
