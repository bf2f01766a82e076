"""The recurrences of Keras's LSTM and GRU, forwards and backwards.

TensorFlow's own gradient adds up over the steps; here the terms of each step are kept.
"""

from __future__ import annotations

import tensorflow as tf


class LSTM:
    """One step of an LSTM, forwards and backwards. States: h, c."""

    # How many numbers the backward pass needs for each unit, besides the states.
    KEPT = 5

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

    def gates(self, found):
        return found


class GRU:
    """One step of a GRU with a reset gate after the matrix product. State: h."""

    KEPT = 4

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
        inner = tf.concat([dz, dr, dcandidate * r], axis=-1)
        previous = dh * z + tf.matmul(inner, self.recurrent, transpose_b=True)
        return [dcandidate, inner], previous, []

    def gates(self, found):
        candidate, inner = found
        # The product with the input has the same gates without the reset gate's factor.
        units = self.recurrent.shape[0]
        return [tf.concat([inner[..., : 2 * units], candidate], axis=-1), inner]


def forwards(cell, x, mask, states):
    """Runs the recurrence over `[T, B, D]`.

    Returns:
      Arrays of T tensors `[B, ...]` for the backward pass: the states before each step,
      then the numbers that the cell keeps; an array of T outputs `[B, U]`; and the last
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
            # A masked step repeats the previous output and leaves the states alone.
            on = mask[t]
            out = tf.where(on, out, output)
            new = [tf.where(on, n, s) for n, s in zip(new, states, strict=True)]
        return t + 1, new, out, before, kept.write(t, keep), outputs.write(t, out)

    start = (tf.constant(0), states, tf.zeros_like(states[0]), before, kept, outputs)
    _, last, _, before, kept, outputs = tf.while_loop(
        lambda t, *_: t < steps, body, start, maximum_iterations=steps
    )
    return [*before, kept], outputs, last


def backwards(cell, saved, mask, repeats, at_outputs, at_states):
    """The arguments of `cell.gates`, `[T, B, ...]`, and gradients at initial states."""
    *before, kept = saved
    steps = tf.shape(at_outputs)[0]
    count = 2 if isinstance(cell, GRU) else 1
    gates = [tf.TensorArray(kept.dtype, steps) for _ in range(count)]
    rows, units = at_states[0].shape

    def body(t, dh, dstates, doutput, gates):
        states, keep = [state.read(t) for state in before], kept.read(t)
        # The shapes are set again: an array of another graph has lost them.
        for state in states:
            state.set_shape([rows, units])
        keep.set_shape([rows, units * cell.KEPT])
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
