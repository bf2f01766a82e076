"""Facts about a TensorFlow graph that do not depend on which axis counts examples.

Comes in: ops and tensors of a `tf.Graph`. Goes out: the list that an op type is on
(`ops`), the function that a call runs (`calls`), where a value comes from (`origins`),
values that are known before the step runs (`known`), the axes of a slice (`slices`),
the number of trips of a loop (`trips`), the ops before a tensor (`walks`), copies of
ops (`op_copies`), and own gradient functions of ops (`backward`).

Invariant: this package changes no op of the loss. `op_copies` adds ops to the graph. An
op type on no list is unknown to every reader of the lists.

To add: a new op type goes on its list in `ops.py`; `tests/gradients/lemmas_test.py`
then asks for a case of it.
"""
