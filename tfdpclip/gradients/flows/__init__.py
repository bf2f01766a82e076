"""Follows the batch through a graph: which axes of each tensor count examples.

Comes in: the graph of a loss and the tensors that bring data in. Goes out: a `Flow`
(`flow.py`) of every tensor: public, a size, data with the axes that count examples, or
unknown. The rest of the library reads flows from a `Dataflow` (`dataflow.py`).

The flows of single ops are in files by kind: `op_flows` (the table), `contractions`,
`mixing`, `layouts`, `lists`, `sparse`, `repeats`, `sizes`.
`graph_flows` follows one graph, `dataflow` its branches, calls and loops as well, and
`gradient_flows` functions of `tf.custom_gradient`; `inlining` opens calls.

Invariant: a flow with axes claims that a row of an example reads only data of that
example. If the analysis cannot show this claim, the flow is unknown.

To add: put the type of the op on the list of its kind in `graph/ops.py` (elementwise,
row by row, a reduction, a scan, along the last axis), or into `RULES` of `mixing.py`
(an op that combines all entries along some axes). An op of another kind needs a
function in the file of its kind and an entry in `_TABLE` of `op_flows.py`.
docs/architecture.md, "Add a flow", has all steps.
"""
