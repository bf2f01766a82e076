"""The way of the batch through a graph: which axis of which tensor counts examples.

Comes in: the graph of a loss and the tensors that bring data in. Goes out: a `Flow`
(`flow.py`) of every tensor: public, a size, data with the axes that count examples, or
unknown. `Dataflow` (`dataflow.py`) is the object that the other packages ask.

The flows of single ops are in files by kind: `op_flows` (the table), `contractions`,
`mixing`, `layouts`, `slices`, `places`, `lists`, `sparse`, `repeats`, `sizes`.
`inner_flows` follows branches, calls and loops, `gradient_flows` functions of
`tf.custom_gradient`; `inlining` opens calls.

Invariant: a flow claims that an entry of a row reads that example alone, or it claims
nothing. Whatever cannot be told is unknown, never data in order.

To add: an op of a known kind (elementwise, row by row, ...) goes on a list of
`graph/ops.py`. Another op is a function in the file of its kind and an entry in
`_TRANSFERS` of `op_flows.py`. Both need a case in `tests/gradients/lemma_cases.py`.
"""
