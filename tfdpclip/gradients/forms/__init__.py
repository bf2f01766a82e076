"""Gradients of all examples by a use of a variable, without building them.

Comes in: the input of an op that uses the variable, and the gradient at its output.
Goes out: a `Form` (`base_form.py`) with two results: the squared norm of every
example's gradient, `[B]`, and the sum of the gradients under weights `[B]`.

Each file has a form: `outer` (contractions), `convolution` with `geometry`, `lookup`
(tables), `perturbation` and `whole` (around further forms); `records` clips and sums
the forms of all variables; `floors` bounds from below the norms that rounding could
make too small.

Invariant: squared norms are never below the truth by more than the floor allows, and
sums equal the sum of explicit gradients.

To add: a class under `Form` in a file of its own, which a rule (`rules`) returns, and a
case in `tests/gradients/op_rules_test.py`.
"""
