"""From the loss of a batch to a loss for each example, `[B]`.

Comes in: the loss as the optimizer got it (a number, or a loss for each example) and
the flows of its graph. Goes out: `LossParts` (`loss_parts.py`): losses `[B]`, their
public factor (`scale`), terms without examples (`public_terms`), and which rows are
records (`drawn_rows`, and `padding` where no draw is known).

Refusals are in files by cause: `loss_checks`, `misplaced_weights`, `label_checks`,
`state` (variables that a loss reads and a step writes), `size_uses` (numbers that
depend on how many examples there are). `advice` has the line to write in the place of
an op that combines examples.

Invariant: each entry of the losses belongs to an example, and the sum of the entries
times the public factor is the loss, public terms aside.

To add: a refusal is a function in the file of its cause, called in `loss_parts.py` or
`engine.py`, with the advice of the op.
"""
