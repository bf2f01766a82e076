"""Per-example gradients of Keras's fused LSTM and GRU layers.

Keras 2 runs these layers inside one function call, whose loop over time steps hides the
matrix products from the engine. The rule here runs the layer's recurrence once more,
forwards and backwards, from the call's inputs and the gradients at its outputs; that
gives the gradient at every gate and step, and the weights' gradients are then ordinary
sequences of outer products.
"""

from __future__ import annotations

import tensorflow as tf

from tfdpclip._keras_marks import FUSED_WEIGHTS
from tfdpclip.gradients.forms import Explicit, Form
from tfdpclip.gradients.fused import FusedCall, read_call
from tfdpclip.gradients.outer import Outer
from tfdpclip.gradients.rule_table import (
    CallRule,
    Context,
    in_float,
    in_steps,
    register_call_rule,
)
from tfdpclip.gradients.uses import Use


def _applies(use: Use) -> bool:
    call = read_call(use.op)
    if call is None:
        return False
    # A loss made of gradients through the layer depends on what the call keeps for
    # them, in further outputs.
    if any(number > 3 + (call.kind == "lstm") for number in use.reaching):
        return False
    shape = call.inputs["inputs"].shape
    if shape.rank != 3 or None in (shape[2], use.op.outputs[0].shape[-1]):
        return False
    return any(use.op.inputs[use.index] is call.inputs[name] for name in FUSED_WEIGHTS)


def _outputs(use: Use) -> list[int]:
    # The last output, all outputs, and the state: (h, c) of an LSTM, h of a GRU.
    return [0, 1, 2, 3] if read_call(use.op).kind == "lstm" else [0, 1, 2]


def _unroll(op: tf.Operation, dz, context: Context) -> _Unrolled:
    if op not in context.shared:
        context.shared[op] = _Unrolled(op, read_call(op), dz, context)
    return context.shared[op]


def _pull_back(op: tf.Operation, dz, context: Context) -> list[tf.Tensor | None]:
    return _unroll(op, dz, context).at_inputs()


def _build(use: Use, dz, shape, context: Context) -> Form | None:
    call = read_call(use.op)
    axes = context.flows[call.inputs["inputs"]].axes
    if axes not in (None, (0,)):
        return None
    unrolled = _unroll(use.op, dz, context)
    name = next(n for n in FUSED_WEIGHTS if use.op.inputs[use.index] is call.inputs[n])
    return unrolled.form(name, shape)


class _Unrolled:
    """The recurrence, run again, with the gradient at every gate and step."""

    def __init__(self, op, call: FusedCall, dz, context: Context):
        self._call, self._context = call, context
        self._x = in_float(call.inputs["inputs"])
        if call.backwards:
            self._x = tf.reverse(self._x, [1])
        self._mask = self._by_step_mask(call)
        weights = [in_float(call.inputs[name]) for name in FUSED_WEIGHTS]
        self._cell = cell = (_LSTM if call.kind == "lstm" else _GRU)(*weights)
        states = [in_float(call.inputs["init_h"])]
        if call.kind == "lstm":
            states.append(in_float(call.inputs["init_c"]))
        by_time = tf.transpose(self._x, [1, 0, 2])
        saved, outputs, last = _forwards(cell, by_time, self._mask, states)
        repeats = tf.constant(1.0, self._x.dtype)
        final = last[0]
        if self._mask is not None:
            outputs = outputs.stack()
            repeats = self._repeats(op, outputs)
            zeroed = tf.where(self._mask[-1], outputs[-1], tf.zeros_like(final))
            final = tf.where(repeats > 0, outputs[-1], zeroed)
        context.claims.append(self._claim(op, final, last))
        seeds = self._seeds(dz, tf.shape(by_time)[0], last)
        gates, self._at_start = _backwards(cell, saved, self._mask, repeats, *seeds)
        # [T, B, ...] -> [B, T, ...]
        self._gates = [tf.transpose(gate, [1, 0, 2]) for gate in gates]
        self._previous = tf.transpose(saved[0].stack(), [1, 0, 2])

    def _by_step_mask(self, call):
        mask = call.inputs.get("mask")
        if mask is None:
            return None
        mask = tf.cast(mask, tf.bool)
        if call.backwards:
            mask = tf.reverse(mask, [1])
        return tf.transpose(mask)[:, :, tf.newaxis]

    def _repeats(self, op, outputs):
        """1 if the layer repeats its output at masked steps, 0 if it puts zeros there.

        The call does not say which (zero_output_for_mask), but what it put out does.
        """
        own = tf.transpose(in_float(op.outputs[1]), [1, 0, 2])
        count = tf.shape(own)[0]
        masked = tf.logical_not(self._mask[-count:])
        blank = masked & (own == 0) & (outputs[-count:] != 0)
        return tf.cast(tf.logical_not(tf.reduce_any(blank)), outputs.dtype)

    def _claim(self, op, final, last):
        """That the recurrence came out as the layer's own did."""

        def claim():
            own = in_float(op.outputs[0])
            error = tf.reduce_max(tf.abs(own - final), axis=-1)
            error += tf.reduce_max(tf.abs(in_float(op.outputs[2]) - last[0]), axis=-1)
            tolerance = 1e-4 if op.outputs[0].dtype.size >= 4 else 0.1
            # An example that is not finite is dropped anyway.
            return tf.reduce_all((error <= tolerance) | ~tf.math.is_finite(error))

        return claim, (
            f"The fused recurrent layer {op.name!r} did not put out what "
            "its per-example gradient rule computes for it. Build the layer with "
            "unroll=True."
        )

    def _seeds(self, dz, steps, last):
        """The gradient at each step's output, `[T, B, U]`, and at the last state."""
        at_outputs = tf.zeros([steps, *tf.unstack(tf.shape(last[0]))], last[0].dtype)
        if dz[1] is not None:
            given = tf.transpose(in_float(dz[1]), [1, 0, 2])
            # Without return_sequences the layer has the last output only.
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
        """The gradients at the call's inputs, without those of its weights."""
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
        """The per-example gradient of one of the layer's weights."""
        into, inner = self._gates[0], self._gates[-1]
        if name == "kernel":
            return self._outer(self._x, into, shape)
        if name == "recurrent_kernel":
            return self._outer(self._previous, inner, shape)
        width = shape[-1]
        sums = [tf.reduce_sum(self._by_example(g, width), axis=1) for g in self._gates]
        values = sums[0] if len(shape) == 1 else tf.stack(sums, axis=1)
        return Explicit(values, shape)

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


class _LSTM:
    """One step of an LSTM, forwards and backwards. States: h, c."""

    def __init__(self, kernel, recurrent, bias):
        self.kernel, self.recurrent, self.bias = kernel, recurrent, bias

    def project(self, x):
        return tf.tensordot(x, self.kernel, 1) + self.bias

    def forward(self, projected, states):
        h, c = states
        z = projected + tf.matmul(h, self.recurrent)
        i, f, g, o = tf.split(z, 4, axis=-1)
        i, f, o = tf.sigmoid(i), tf.sigmoid(f), tf.sigmoid(o)
        g = tf.tanh(g)
        new_c = f * c + i * g
        squashed = tf.tanh(new_c)
        return [o * squashed, new_c], tf.concat([i, f, g, o, squashed], axis=-1)

    def backward(self, dh, dstates, states, kept):
        (dc,) = dstates
        _, c = states
        i, f, g, o, squashed = tf.split(kept, 5, axis=-1)
        dc += dh * o * (1 - tf.square(squashed))
        gates = tf.concat(
            [
                dc * g * i * (1 - i),
                dc * c * f * (1 - f),
                dc * i * (1 - tf.square(g)),
                dh * squashed * o * (1 - o),
            ],
            axis=-1,
        )
        return [gates], tf.matmul(gates, self.recurrent, transpose_b=True), [dc * f]


class _GRU:
    """One step of a GRU whose reset gate acts after the matrix product. State: h."""

    def __init__(self, kernel, recurrent, bias):
        self.kernel, self.recurrent = kernel, recurrent
        self.bias, self.recurrent_bias = tf.unstack(bias)

    def project(self, x):
        return tf.tensordot(x, self.kernel, 1) + self.bias

    def forward(self, projected, states):
        (h,) = states
        inner = tf.matmul(h, self.recurrent) + self.recurrent_bias
        xz, xr, xh = tf.split(projected, 3, axis=-1)
        rz, rr, rh = tf.split(inner, 3, axis=-1)
        z, r = tf.sigmoid(xz + rz), tf.sigmoid(xr + rr)
        candidate = tf.tanh(xh + r * rh)
        new_h = z * h + (1 - z) * candidate
        return [new_h], tf.concat([z, r, candidate, rh], axis=-1)

    def backward(self, dh, dstates, states, kept):
        (h,) = states
        z, r, candidate, rh = tf.split(kept, 4, axis=-1)
        dz = dh * (h - candidate) * z * (1 - z)
        dcandidate = dh * (1 - z) * (1 - tf.square(candidate))
        dr = dcandidate * rh * r * (1 - r)
        into = tf.concat([dz, dr, dcandidate], axis=-1)
        inner = tf.concat([dz, dr, dcandidate * r], axis=-1)
        previous = dh * z + tf.matmul(inner, self.recurrent, transpose_b=True)
        return [into, inner], previous, []


def _forwards(cell, x, mask, states):
    """Runs the recurrence over `[T, B, D]`.

    Returns:
      What the way back needs, as arrays of T tensors `[B, ...]`: the states before each
      step, then what the cell keeps; the outputs, `[B, U]`, likewise; and the last
      states.
    """
    projected = cell.project(x)
    steps = tf.shape(projected)[0]
    before = [tf.TensorArray(x.dtype, steps) for _ in states]
    kept = tf.TensorArray(x.dtype, steps)
    outputs = tf.TensorArray(x.dtype, steps)

    def body(t, states, output, before, kept, outputs):
        before = [array.write(t, s) for array, s in zip(before, states, strict=True)]
        new, keep = cell.forward(projected[t], states)
        out = new[0]
        if mask is not None:
            # A masked step repeats the output before it and leaves the states alone.
            on = mask[t]
            out = tf.where(on, out, output)
            new = [tf.where(on, n, s) for n, s in zip(new, states, strict=True)]
        return t + 1, new, out, before, kept.write(t, keep), outputs.write(t, out)

    start = (tf.constant(0), states, tf.zeros_like(states[0]), before, kept, outputs)
    _, last, _, before, kept, outputs = tf.while_loop(
        lambda t, *_: t < steps, body, start, maximum_iterations=steps
    )
    return [*before, kept], outputs, last


def _backwards(cell, saved, mask, repeats, at_outputs, at_states):
    """The gradients at the gates, `[T, B, ...]` each, and at the initial states."""
    *before, kept = saved
    steps = tf.shape(at_outputs)[0]
    count = 2 if isinstance(cell, _GRU) else 1
    gates = [tf.TensorArray(kept.dtype, steps) for _ in range(count)]

    def body(t, dh, dstates, doutput, gates):
        states, keep = [state.read(t) for state in before], kept.read(t)
        dout = at_outputs[t] + doutput
        if mask is None:
            made, dh, dstates = cell.backward(dh + dout, dstates, states, keep)
        else:
            on = tf.cast(mask[t], keep.dtype)
            made, new_dh, new_dstates = cell.backward(
                on * (dh + dout), [on * d for d in dstates], states, keep
            )
            dh = new_dh + (1 - on) * dh
            dstates = [
                n + (1 - on) * d for n, d in zip(new_dstates, dstates, strict=True)
            ]
            doutput = repeats * (1 - on) * dout
        gates = [array.write(t, g) for array, g in zip(gates, made, strict=True)]
        return t - 1, dh, dstates, doutput, gates

    dh, *dstates = at_states
    start = (steps - 1, dh, dstates, tf.zeros_like(dh), gates)
    _, dh, dstates, _, gates = tf.while_loop(
        lambda t, *_: t >= 0, body, start, maximum_iterations=steps
    )
    return [array.stack() for array in gates], [dh, *dstates]


register_call_rule(CallRule(_applies, _outputs, _build, _pull_back))
