"""Questions about a TensorFlow graph, before anything is known of examples.

Comes in: ops and tensors of a `tf.Graph`. Goes out: the list that an op type is on
(`ops`), the function that a call runs (`calls`), where a value comes from (`origins`),
values that are known before the step runs (`known`), the number of trips of a loop
(`trips`), copies of ops (`op_copies`), one backward pass (`backward`), and the fused
recurrent layers of Keras (`fused`).

Invariant: nothing here changes the graph of the loss, but `backward` and `op_copies`
add ops to it, and `fused` gives a fused call the function that keeps its gates. An op
type on no list is unknown to every reader of the lists.

To add: a new op type goes on its list in `ops.py`; `tests/gradients/lemmas_test.py`
then asks for a case of it.
"""
