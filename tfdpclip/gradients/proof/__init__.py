"""The proof that examples stay apart, and slow gradients where no proof or rule exists.

Comes in: losses `[B]` and their flows. Goes out: PROVEN, MIXED or UNKNOWN
(`isolation_proof.py`), with the op at which the proof ends.

`single_examples` makes gradients one example at a time for losses that are UNKNOWN;
`fallback` makes gradients by a Jacobian for proven losses that no rule covers.

Invariant: PROVEN holds for every possible batch, not only for the batches seen so far.
Gradients of an unproven loss enter the sum of a batch only if they were made one
example at a time.

To add: an op becomes known in `flows`, not here. docs/guarantees.md states the theorem.
"""
