"""The proof that examples stay apart, and the slow ways where it ends.

Comes in: losses `[B]` and their flows. Goes out: PROVEN, MIXED or UNKNOWN
(`isolation_proof.py`), with the op at which the proof ends.

`single_examples` makes gradients one example at a time for losses that are UNKNOWN;
`fallback` makes them by a Jacobian for proven losses that no rule covers.

Invariant: PROVEN holds for every batch, not for the batches that came. Nothing that is
not proven reaches the sum of a batch.

To add: an op becomes known in `flows`, not here. docs/guarantees.md states the theorem.
"""
