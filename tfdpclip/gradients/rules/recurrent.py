"""Per-example gradients of Keras's fused LSTM and GRU layers.

Keras 2 runs these layers inside a function call, and the call's loop over time steps
hides the matrix products from the engine. The rule here has the call run the same
recurrence in a loop that keeps its gates, and goes back over the gates from the
gradients at the call's outputs. This gives the gradient at every gate and step, and the
weights' gradients are then ordinary sequences of outer products. Where the call must
stay unchanged (with a mask, as the call does not tell its output at masked steps; types
below float32; XLA), the recurrence runs a second time for the gates.
"""

from __future__ import annotations

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._devices import has_form_of_xla
from tfdpclip._keras_marks import FUSED_WEIGHTS
from tfdpclip.gradients.forms import recurrences
from tfdpclip.gradients.forms.base_form import Explicit, Form, first_rows, sum_squares
from tfdpclip.gradients.forms.outer import Outer
from tfdpclip.gradients.graph.calls import find_replacement
from tfdpclip.gradients.graph.fused import FusedCall, ReplacedCall, read_call
from tfdpclip.gradients.rules.context import Context, in_float, in_steps
from tfdpclip.gradients.rules.uses import Use


def applies(use: Use) -> bool:
    """Whether a use in a call is of a weight of a fused layer."""
    call = read_call(use.op)
    if call is None:
        return False
    # A loss made of gradients through the layer depends on further outputs, which the
    # call keeps for its gradient.
    if any(number > 3 + (call.kind == "lstm") for number in use.reaching):
        return False
    shape = call.inputs["inputs"].shape
    if shape.rank != 3 or None in (shape[2], use.op.outputs[0].shape[-1]):
        return False
    return list(call.inputs)[use.index] in FUSED_WEIGHTS


def outputs(use: Use) -> list[int]:
    """The numbers of the call's outputs at which the rule needs gradients."""
    # The last output, all outputs, and the state: (h, c) of an LSTM, h of a GRU.
    return [0, 1, 2, 3] if read_call(use.op).kind == "lstm" else [0, 1, 2]


def _unroll(op: tf.Operation, dz, context: Context) -> _Unrolled:
    if op not in context.shared:
        context.shared[op] = _Unrolled(op, read_call(op), dz, context)
    return context.shared[op]


def pull_back(op: tf.Operation, dz, context: Context) -> list[tf.Tensor | None]:
    """The gradients at the call's inputs, None at its weights."""
    return _unroll(op, dz, context).at_inputs()


def build(use: Use, dz, shape, context: Context) -> Form | None:
    """The form of a weight's gradient, from the gradients at the outputs, or None."""
    call = read_call(use.op)
    axes = context.flows[call.inputs["inputs"]].axes
    if axes not in (None, (0,)):
        return None
    unrolled = _unroll(use.op, dz, context)
    # By the number of the input: a tensor may be two of the weights.
    name = list(call.inputs)[use.index]
    return unrolled.form(name, shape)


def prepare(op: tf.Operation) -> None:
    """Makes a call keep the tensors for the backward pass, where possible."""
    call = read_call(op)
    floats = {t.dtype for t in (*op.inputs, *op.outputs) if t.dtype.is_floating}
    if (
        find_replacement(op) is not None
        or has_form_of_xla()
        or "mask" in call.inputs
        or floats not in ({tf.float32}, {tf.float64})
        # TensorFlow has differentiated the call, and added outputs for that.
        or len(op.outputs) != call.results
    ):
        return
    with op.graph.as_default():
        function = _tf_private.new_function_graph(f"{call.kind}_with_gates")
    with function.as_default():
        inputs = {
            name: tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name)
            for name, tensor in call.inputs.items()
        }
        by_time = tf.transpose(_in_order(call, inputs["inputs"]), [1, 0, 2])
        saved, _, last = recurrences.forwards(
            _cell(call, inputs), by_time, None, _initial(call, inputs)
        )
        sequence = last[0][tf.newaxis]
        # Without return_sequences the layer has only the last output.
        if op.outputs[1].shape[1] != 1:
            sequence = tf.concat([saved[0].stack()[1:], sequence], axis=0)
        sequence = tf.transpose(sequence, [1, 0, 2])
        number = tf.zeros_like(op.outputs[-1])
        results = [last[0], sequence, *last, number]
        function.inputs.extend(inputs.values())
        function.outputs.extend([*results, *(array.flow for array in saved)])
    ReplacedCall(op, call, function)


def _cell(
    call: FusedCall, inputs: dict[str, tf.Tensor]
) -> recurrences.LSTM | recurrences.GRU:
    weights = [in_float(inputs[name]) for name in FUSED_WEIGHTS]
    return (recurrences.LSTM if call.kind == "lstm" else recurrences.GRU)(*weights)


def _initial(call: FusedCall, inputs: dict[str, tf.Tensor]) -> list[tf.Tensor]:
    """The states before the first step."""
    names = ("init_h", "init_c") if call.kind == "lstm" else ("init_h",)
    return [in_float(inputs[name]) for name in names]


def _in_order(call: FusedCall, steps: tf.Tensor) -> tf.Tensor:
    """The steps `[B, T, ...]` in the order of the layer."""
    return tf.reverse(steps, [1]) if call.backwards else steps


class _Unrolled:
    """The recurrence, with the gradient at every gate and step."""

    def __init__(self, op, call: FusedCall, dz, context: Context):
        self._call, self._context = call, context
        self._x = _in_order(call, in_float(call.inputs["inputs"]))
        self._cell = cell = _cell(call, call.inputs)
        self._mask = None
        repeats = tf.constant(1.0, self._x.dtype)
        if find_replacement(op) is None:
            saved, last, repeats = self._once_more(op)
        else:
            saved, last = self._kept(op)
        seeds = self._seeds(dz, tf.shape(self._x)[1], last)
        gates, self._at_start = recurrences.backwards(
            cell, saved, self._mask, repeats, *seeds
        )
        # [T, B, ...] -> [B, T, ...]
        self._gates = cell.gates([tf.transpose(gate, [1, 0, 2]) for gate in gates])
        self._previous = tf.transpose(saved[0].stack(), [1, 0, 2])

    def _once_more(self, op):
        """The saved tensors and last states of the recurrence, from a second run."""
        call = self._call
        if "mask" in call.inputs:
            mask = _in_order(call, tf.cast(call.inputs["mask"], tf.bool))
            self._mask = tf.transpose(mask)[:, :, tf.newaxis]
        by_time = tf.transpose(self._x, [1, 0, 2])
        saved, outputs, last = recurrences.forwards(
            self._cell, by_time, self._mask, _initial(call, call.inputs)
        )
        repeats = tf.constant(1.0, self._x.dtype)
        final = last[0]
        if self._mask is not None:
            outputs = outputs.stack()
            repeats = self._repeats(op, outputs)
            zeroed = tf.where(self._mask[-1], outputs[-1], tf.zeros_like(final))
            final = tf.where(repeats > 0, outputs[-1], zeroed)
        self._claim(op, lambda: [(op.outputs[0], final), (op.outputs[2], last[0])])
        return saved, last, repeats

    def _kept(self, op):
        """The saved tensors and last states, from the call."""
        call = find_replacement(op)
        saved = [tf.TensorArray(self._x.dtype, flow=flow) for flow in call.kept]
        self._claim(
            op,
            lambda: list(zip(call.original_results(), call.results, strict=True))[:-1],
        )
        return saved, call.results[2:-1]

    def _repeats(self, op, outputs):
        """1 if the layer repeats its output at masked steps, 0 if it returns zeros.

        The call does not tell which (zero_output_for_mask); its output does.
        """
        own = tf.transpose(in_float(op.outputs[1]), [1, 0, 2])
        count = tf.shape(own)[0]
        masked = tf.logical_not(self._mask[-count:])
        blank = masked & (own == 0) & (outputs[-count:] != 0)
        return tf.cast(tf.logical_not(tf.reduce_any(blank)), outputs.dtype)

    def _claim(self, op, pairs):
        """Adds the claim that the recurrence returned the same as the layer.

        Args:
          op: the call.
          pairs: a function that returns pairs of an output of the layer and the same
            output of the recurrence, `[B, ...]` each.
        """

        def claim():
            errors, finite = [], []
            for own, made in pairs():
                own, axes = in_float(own), list(range(1, own.shape.rank))
                # The error is relative, because states of an LSTM may be large.
                error = tf.abs(own - made) / tf.maximum(tf.abs(own), 1.0)
                errors.append(tf.reduce_max(error, axis=axes))
                finite.append(tf.reduce_all(tf.math.is_finite(own), axis=axes))
            tolerance = 1e-4 if op.outputs[0].dtype.size >= 4 else 0.1
            # An example with an output that is not finite is dropped in any case.
            lost = ~tf.reduce_all(tf.stack(finite), axis=0)
            return tf.reduce_all((tf.add_n(errors) <= tolerance) | lost)

        message = (
            f"The fused recurrent layer {op.name!r} did not return the output that "
            "its per-example gradient rule computes. Build the layer with "
            "unroll=True."
        )
        self._context.claims.append((claim, message))

    def _seeds(self, dz, steps, last):
        """The gradient at each step's output, `[T, B, U]`, and at the last state."""
        at_outputs = tf.zeros([steps, *tf.unstack(tf.shape(last[0]))], last[0].dtype)
        if dz[1] is not None:
            given = tf.transpose(in_float(dz[1]), [1, 0, 2])
            # Without return_sequences the layer has only the last output.
            missing = steps - tf.shape(given)[0]
            at_outputs += tf.pad(given, [[missing, 0], [0, 0], [0, 0]])
        if dz[0] is not None:
            given = in_float(dz[0])[tf.newaxis]
            at_outputs += tf.pad(given, [[steps - 1, 0], [0, 0], [0, 0]])
        at_states = [
            tf.zeros_like(state) if given is None else in_float(given)
            for state, given in zip(last, dz[2:], strict=True)
        ]
        return at_outputs, at_states

    def at_inputs(self) -> list[tf.Tensor | None]:
        """The gradients at the call's inputs, except its weights."""
        at_x = tf.tensordot(self._gates[0], tf.transpose(self._cell.kernel), 1)
        if self._call.backwards:
            at_x = tf.reverse(at_x, [1])
        names = ("inputs", "init_h", "init_c")[: 1 + len(self._at_start)]
        found = dict(zip(names, [at_x, *self._at_start], strict=True))
        return [
            tf.cast(found[name], tensor.dtype) if name in found else None
            for name, tensor in self._call.inputs.items()
        ]

    def form(self, name: str, shape) -> Form:
        """The per-example gradient of a weight of the layer."""
        into, inner = self._gates[0], self._gates[-1]
        if name == "kernel":
            return self._outer(self._x, into, shape)
        if name == "recurrent_kernel":
            return self._outer(self._previous, inner, shape)
        width = shape[-1]
        used = self._gates[:1] if len(shape) == 1 else self._gates
        steps = [self._by_example(gates, width) for gates in used]
        sums = [tf.reduce_sum(gates, axis=1) for gates in steps]
        values = sums[0] if len(shape) == 1 else tf.stack(sums, axis=1)

        def parts(count):
            return tf.add_n([sum_squares(first_rows(gates, count)) for gates in steps])

        return Explicit(values, shape, parts)

    def _outer(self, x, z, shape):
        x, z = self._by_example(x, shape[0]), self._by_example(z, shape[1])
        layout = ("recurrent", id(self))
        return Outer(x, z, lambda sums, lead: sums, shape, x.shape[1], layout)

    def _by_example(self, tensor, width):
        """`[N, T, width]` as `[B, rows * T, width]`.

        The layer's own batch may hold several rows of each example: every sentence of
        a document, say.
        """
        like = self._call.inputs["inputs"]
        steps = like.shape[1]
        tensor = in_steps(tensor, self._context, like, width, 1)
        flow = self._context.flows[like]
        known = flow.leads and flow.rows and steps
        return tf.ensure_shape(
            tensor, [None, flow.rows * steps if known else None, width]
        )
