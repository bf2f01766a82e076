"""Joins the uses of one variable into one per-example gradient.

Several uses of a variable (weight tying, unrolled recurrence, a layer called twice) are
one gradient: their norms must not be added. A variable that is reshaped, split or
otherwise transformed before it meets the batch is handled through that transformation.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdpclip.gradients.forms import (
    Budget,
    Explicit,
    Form,
    Outer,
    in_chunks,
    sum_squares,
)
from tfdpclip.gradients.uses import Use


class VariableGradient:
    """Every example's gradient of one variable.

    Args:
      variable: the variable.
      handle: its handle in the graph.
      uses: where it meets the batch.
      forms: the form of each use.
    """

    def __init__(
        self,
        variable: tf.Variable,
        handle: tf.Tensor,
        uses: Sequence[Use],
        forms: Sequence[Form],
    ):
        self.variable = variable
        self._handle = handle
        self.parts = list(zip(uses, forms, strict=True))
        self._join()

    def _join(self) -> None:
        """Joins uses of the same parameter tensor where the forms allow it."""
        groups: dict = {}
        for use, form in self.parts:
            groups.setdefault(_entries(use, form), []).append((use, form))
        joined = []
        for key, parts in groups.items():
            forms = [form for _, form in parts]
            if key is not None and len(parts) > 1:
                joined.append((parts[0][0], _sum_forms(forms)))
            else:
                joined.extend(parts)
        self.parts = joined
        # One form for each disjoint piece of the variable: squared norms add up.
        pieces = [use.path.piece for use, _ in joined]
        splits = {piece[0] for piece in pieces if piece is not None}
        self._orthogonal = all(use.path.isometric for use, _ in joined) and (
            len(joined) == 1
            or (
                len(splits) == 1
                and None not in pieces
                and len(set(pieces)) == len(pieces)
            )
        )

    def squared_norms(self, budget: Budget) -> tf.Tensor:
        """`[B]`."""
        if self._orthogonal:
            return tf.add_n([form.squared_norms(budget) for _, form in self.parts])
        batch_size = self.parts[0][1].batch_size
        sizes = [math.prod(form.shape) for _, form in self.parts]
        memory = 4 * (sum(sizes) + math.prod(self.variable.shape))

        def compute(start, size):
            return sum_squares(self.gradients(start, size))

        if budget.fits(memory):
            return sum_squares(self._gradients(self.parts))
        return in_chunks(compute, batch_size, budget.chunk(memory))

    def gradients(self, start: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        """The gradients of some examples, `[size, *variable.shape]`."""
        return self._gradients(
            [(use, form.part(start, size)) for use, form in self.parts]
        )

    def _gradients(self, parts) -> tf.Tensor:
        """`[b, *variable.shape]`, through whatever transforms the variable."""
        shape = [-1, *self.variable.shape]
        built = [form.gradients() for _, form in parts]
        total = None
        others = []
        for (use, _), gradients in zip(parts, built, strict=True):
            if _is_renamed(use):
                part = tf.reshape(gradients, shape)
                total = part if total is None else total + part
            else:
                others.append((use, gradients))
        for param, root, gradients in self._by_root(others):

            def pull_back(seeds, param=param, root=root):
                pulled = tf.gradients(param, root, grad_ys=list(seeds))[0]
                return tf.convert_to_tensor(pulled)

            seeds = [tf.cast(g, p.dtype) for p, g in zip(param, gradients, strict=True)]
            part = tf.vectorized_map(pull_back, seeds, fallback_to_while_loop=True)
            part = tf.reshape(part, shape)
            total = part if total is None else total + part
        return total

    def _by_root(self, parts):
        """Gathers (use, gradient) by what the parameter is to be differentiated by."""
        roots: dict = {}
        for use, gradient in parts:
            param, root = in_float32(use.param, self._handle)
            entry = roots.setdefault(root.ref(), ([], root, []))
            entry[0].append(param)
            entry[2].append(gradient)
        return roots.values()

    def saved(self) -> list[tuple[tf.Tensor, int | None]]:
        """What `weighted_sum` reads, and how many rows of each are one example's."""
        return [(t, form.rows) for _, form in self.parts for t in form.saved()]

    def weighted_sum(self, weights: tf.Tensor, saved: Iterator[tf.Tensor]) -> tf.Tensor:
        """sum_i weights_i g_i, of the variable's shape.

        Args:
          weights: `[B]`.
          saved: yields what to take instead of the tensors that `saved` lists.
        """
        total, others = None, []
        for use, form in self.parts:
            tensors = [next(saved) for _ in form.saved()]
            part = form.replaced(tensors).weighted_sum(tf.cast(weights, form.dtype))
            if _is_renamed(use):
                part = tf.reshape(part, self.variable.shape)
                total = part if total is None else total + part
            else:
                others.append((use, part))
        for params, root, seeds in self._by_root(others):
            seeds = [tf.cast(g, p.dtype) for p, g in zip(params, seeds, strict=True)]
            (part,) = tf.gradients(params, root, grad_ys=seeds)
            part = tf.convert_to_tensor(part)
            total = part if total is None else total + tf.cast(part, total.dtype)
        # A variable of a coarse type gets its sum in float32: rounding it before the
        # noise is added would break the bound on one example's influence.
        dtype = self.variable.dtype
        return tf.cast(total, dtype) if dtype.size >= 4 else total


def _entries(use: Use, form: Form):
    """Equal keys: the two gradients are entry by entry of the same numbers."""
    if not use.path.isometric:
        return None
    if isinstance(form, Outer):
        # Where a transposition moved entries, only one and the same tensor is safe.
        moved = use.param.ref() if use.path.moved else None
        return ("outer", use.path.piece, form.layout, moved)
    if isinstance(form, Explicit) and (_is_renamed(use) or not use.path.moved):
        return ("explicit", use.path.piece, None if use.path.piece else 0)
    return None


def _sum_forms(forms: Sequence[Form]) -> Form:
    first = forms[0]
    if isinstance(first, Outer):
        return first.joined(list(forms[1:]))
    flat = [tf.reshape(form.values, [form.batch_size, -1]) for form in forms]
    return Explicit(
        tf.reshape(tf.add_n(flat), [first.batch_size, *first.shape]), first.shape
    )


def _is_renamed(use: Use) -> bool:
    """Whether the parameter holds the variable's entries in the variable's order."""
    path = use.path
    return path.isometric and not path.moved and path.piece is None


def in_float32(param: tf.Tensor, handle: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The parameter, computed again without casts to a coarse type, and its root.

    A sum over examples that is rounded to bfloat16 would move by more than one
    example's clipped gradient.

    Returns:
      The parameter, and what to differentiate it by: the variable's handle, or, for a
      variable of a coarse type itself, its value cast to float32.
    """
    if param.dtype == tf.resource or param.dtype.size >= 4:
        return param, handle
    done: dict = {}
    lifted = _lift(param, handle, done)
    return lifted, done.get(handle.ref(), handle)


def _lift(tensor: tf.Tensor, handle: tf.Tensor, done: dict) -> tf.Tensor:
    if tensor.dtype == tf.resource or tensor.dtype.size >= 4:
        return tensor
    if not tensor.dtype.is_floating:
        return tensor
    if tensor.ref() in done:
        return done[tensor.ref()]
    op = tensor.op
    if op.type == "ReadVariableOp" and op.inputs[0] is handle:
        if handle.ref() not in done:
            done[handle.ref()] = tf.cast(tensor, tf.float32)
        return done[handle.ref()]
    if op.type == "Cast":
        lifted = tf.cast(_lift(op.inputs[0], handle, done), tf.float32)
    elif op.type in ("Const", "ReadVariableOp"):
        lifted = tf.cast(tensor, tf.float32)
    else:
        inputs = [_lift(t, handle, done) for t in op.inputs]
        lifted = _emit_again(op, inputs, tensor)
    done[tensor.ref()] = lifted
    return lifted


def _emit_again(op, inputs, output) -> tf.Tensor:
    """`op` on inputs of another type."""
    emit = getattr(tf.raw_ops, op.type)
    # Some raw ops rename their inputs or attributes, but none reorders them.
    names = list(inspect.signature(emit).parameters)
    arguments, position = {}, 0
    for name, arg in zip(names, op.op_def.input_arg, strict=False):
        if arg.number_attr or arg.type_list_attr:
            count = len(op.inputs) - len(op.op_def.input_arg) + 1
            arguments[name] = inputs[position : position + count]
            position += count
        else:
            arguments[name] = inputs[position]
            position += 1
    inferred = {
        name for arg in op.op_def.input_arg for name in (arg.type_attr, arg.number_attr)
    }
    attrs = [
        attr.name
        for attr in op.op_def.attr
        if attr.name not in inferred and not attr.name.startswith("_")
    ]
    free = [n for n in names if n not in (*arguments, *attrs, "name")]
    for attr in attrs:
        name = attr if attr in names else free.pop(0)
        arguments[name] = op.get_attr(attr)
    result = emit(**arguments)
    if isinstance(result, (list, tuple)):
        return result[output.value_index]
    return result
