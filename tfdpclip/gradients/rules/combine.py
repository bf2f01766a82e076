"""Joins the uses of a variable into a per-example gradient of the variable.

Several uses of a variable (weight tying, unrolled recurrence, a layer called twice) are
a single gradient: the norms of the uses must not be added. A variable that is reshaped,
split or transformed before it meets the batch is differentiated through that
transformation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._constants import vector
from tfdpclip.gradients.forms.base_form import (
    Budget,
    Explicit,
    Form,
    Measured,
    in_chunks,
    keep_gradients,
    sum_squares,
    sum_weighted,
)
from tfdpclip.gradients.forms.lookup import Lookup
from tfdpclip.gradients.forms.outer import Outer
from tfdpclip.gradients.graph import op_copies
from tfdpclip.gradients.rules.tied import tie
from tfdpclip.gradients.rules.uses import Use
from tfdpclip.noise import philox


class VariableGradient:
    """Every example's gradient of a variable.

    Where several uses add up, or the variable is transformed, the parts of an example's
    gradient may cancel. The sum over the batch is then made of the examples' own
    gradients, the same numbers that the norms measure, and not of the parts, as no norm
    bounds the rounding error of parts. (`floors` has the bound for parts within a use,
    and for tied tables.)

    Args:
      variable: the variable.
      handle: the variable's handle in the graph.
      uses: the ops at which the variable meets the batch.
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
        # The squared norms of forms of disjoint pieces of the variable add up.
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

    def measured(self, budget: Budget) -> Measured:
        """The norms, and the tensors of the weighted sum, of the variable's shape."""
        found = self._measured(budget)

        def weighted_sum(weights, saved):
            total = found.weighted_sum(weights, saved)
            # A variable of a coarse type gets its sum in float32: rounding before the
            # noise is added would break the bound on an example's influence.
            dtype = self.variable.dtype
            return tf.cast(total, dtype) if dtype.size >= 4 else total

        return dataclasses.replace(found, weighted_sum=weighted_sum)

    def _measured(self, budget: Budget) -> Measured:
        if self._orthogonal:
            each = [form.measured(budget) for _, form in self.parts]
            return self._sum_of_parts(each, tf.add_n([m.squared_norms for m in each]))
        size = math.prod(self.variable.shape)
        memory = 4 * (sum(math.prod(form.shape) for _, form in self.parts) + size)
        fits = budget.fits(memory)
        tied = tie(self.parts)
        if tied is not None and (tied.is_cheap() or not fits):
            each = [form.measured(budget) for _, form in self.parts]
            own = [m.squared_norms for m in each]
            widest = max((part.dtype for part in own), key=lambda dtype: dtype.size)
            squares = tf.add_n([tf.cast(part, widest) for part in own])
            return self._sum_of_parts(each, tied.squared_norms(squares, budget))
        if fits and budget.reserve(4 * size):
            shape = self.variable.shape
            built = self._gradients(self.parts)
            found = keep_gradients([built], lambda sums: tf.reshape(sums[0], shape))

            def of_kept(weights, saved):
                return found.weighted_sum(tf.cast(weights, built.dtype), saved)

            return dataclasses.replace(found, weighted_sum=of_kept)
        chunk = None if fits else budget.chunk(memory)

        def compute(start, size):
            return sum_squares(self.gradients(start, size))

        if fits:
            squares = sum_squares(self._gradients(self.parts))
        else:
            squares = in_chunks(compute, self._batch_size, chunk)
        return self._sum_of_examples(squares, chunk)

    def _sum_of_parts(self, each: list[Measured], squares: tf.Tensor) -> Measured:
        """A sum for each part, and the sum of these sums."""
        counts = [len(part.saved) for part in each]

        def weighted_sum(weights, saved):
            given, sums = iter(saved), []
            for (_, form), part, count in zip(self.parts, each, counts, strict=True):
                own = [next(given) for _ in range(count)]
                sums.append(part.weighted_sum(tf.cast(weights, form.dtype), own))
            return self._added(sums)

        saved = [tensor for part in each for tensor in part.saved]
        rows = [count for part in each for count in part.rows]
        return Measured(squares, saved, rows, weighted_sum)

    def _sum_of_examples(self, squares: tf.Tensor, chunk: int | None) -> Measured:
        """The sum of the examples' gradients, which are built a second time."""
        counts = [len(form.saved()) for _, form in self.parts]

        def weighted_sum(weights, saved):
            given = iter(saved)
            parts = [
                (use, form.replaced([next(given) for _ in range(count)]))
                for (use, form), count in zip(self.parts, counts, strict=True)
            ]
            return self._sum_by_examples(weights, parts, chunk)

        saved = [tensor for _, form in self.parts for tensor in form.saved()]
        rows = [form.rows for _, form in self.parts for _ in form.saved()]
        return Measured(squares, saved, rows, weighted_sum)

    @property
    def _batch_size(self) -> tf.Tensor:
        return self.parts[0][1].batch_size

    def gradients(self, start: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        """The gradients of consecutive examples, `[size, *variable.shape]`."""
        return self._gradients(
            [(use, form.part(start, size)) for use, form in self.parts]
        )

    def _gradients(self, parts) -> tf.Tensor:
        """`[b, *variable.shape]`, through the transformation of the variable."""
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
        """Gathers (use, gradient) by the tensor to differentiate the parameter by."""
        roots: dict = {}
        for use, gradient in parts:
            param, root = in_float32(use.param, self._handle)
            entry = roots.setdefault(root.ref(), ([], root, []))
            entry[0].append(param)
            entry[2].append(gradient)
        return roots.values()

    @property
    def has_several_terms(self) -> bool:
        """Whether an example's gradient is a sum of terms that may cancel."""
        ((use, form), *others) = self.parts
        return bool(others) or not use.path.isometric or form.has_several_terms

    def part_squares(self, count: tf.Tensor | None = None) -> tf.Tensor:
        """`[B]`: the summed squares of each term, before any terms cancel.

        The rounding error of an ordinary gradient is relative to this sum. A
        transformation of the variable counts as the multiple of a rotation with the
        same Frobenius norm.

        Args:
          count: the number of first examples to return; all by default.
        """
        total = []
        for use, form in self.parts:
            square = tf.cast(_part_squares(form, count), tf.float32)
            if not use.path.isometric:
                square *= tf.cast(self._mean_square(use), tf.float32)
            total.append(square)
        return tf.add_n(total)

    def _mean_square(self, use: Use) -> tf.Tensor:
        """The mean square of the singular values of d parameter / d variable."""
        param, root = in_float32(use.param, self._handle)
        found = []
        for seed in (1, 2):
            fixed = tf.constant([seed, seed], tf.int64)
            signs = philox.uniform(tf.shape(param), fixed) < 0.5
            seeds = tf.where(signs, tf.ones_like(param), -tf.ones_like(param))
            pulled = tf.gradients(param, root, grad_ys=seeds)[0]
            if pulled is not None:
                square = tf.reduce_sum(tf.square(tf.convert_to_tensor(pulled)))
                found.append(square / tf.cast(2 * tf.size(param), square.dtype))
        return tf.add_n(found) if found else tf.constant(0.0)

    def _sum_by_examples(self, weights, parts, chunk: int | None) -> tf.Tensor:
        """Builds the gradients a second time, as for the norms, and adds them up."""
        if chunk is None:
            built = self._gradients(parts)
            return sum_weighted(tf.cast(weights, built.dtype), built)
        batch_size = tf.shape(weights)[0]
        size = tf.minimum(chunk, tf.maximum(batch_size, 1))
        count = tf.where(batch_size > 0, (batch_size + size - 1) // size, 0)
        shape = self.variable.shape

        def body(i, total):
            start = tf.minimum(i * size, batch_size - size)
            rows = start + tf.range(size)
            # The last chunk is moved back; examples that are in two chunks count once.
            fresh = tf.cast(rows >= i * size, weights.dtype)
            built = self._gradients([(u, form.part(start, size)) for u, form in parts])
            added = sum_weighted(
                tf.cast(tf.gather(weights, rows) * fresh, total.dtype),
                tf.cast(built, total.dtype),
            )
            return i + 1, total + tf.reshape(added, shape)

        wide = any(form.dtype == tf.float64 for _, form in parts)
        zeros = tf.zeros(shape, tf.float64 if wide else tf.float32)
        _, total = tf.while_loop(
            lambda i, _: i < count, body, (tf.constant(0), zeros), parallel_iterations=1
        )
        return total

    def _added(self, sums: list[tf.Tensor]) -> tf.Tensor:
        """The sums of all parts, through the transformation of the variable, added."""
        total, others = None, []
        for (use, _), part in zip(self.parts, sums, strict=True):
            if _is_renamed(use):
                part = tf.reshape(part, vector(*self.variable.shape))
                total = part if total is None else total + part
            else:
                others.append((use, part))
        for params, root, seeds in self._by_root(others):
            seeds = [tf.cast(g, p.dtype) for p, g in zip(params, seeds, strict=True)]
            (part,) = tf.gradients(params, root, grad_ys=seeds)
            part = tf.convert_to_tensor(part)
            total = part if total is None else total + tf.cast(part, total.dtype)
        return total


def _entries(use: Use, form: Form):
    """A key; uses with equal keys have gradients with the same order of entries."""
    if not use.path.isometric:
        return None
    if isinstance(form, Outer):
        # After a transposition, only uses of the same tensor surely agree.
        moved = use.param.ref() if use.path.moved else None
        return ("outer", use.path.piece, form.layout, moved)
    if isinstance(form, Lookup) and _is_renamed(use):
        return ("lookup", tuple(form.shape))
    if isinstance(form, Explicit) and (_is_renamed(use) or not use.path.moved):
        return ("explicit", use.path.piece, None if use.path.piece else 0)
    return None


def _sum_forms(forms: Sequence[Form]) -> Form:
    first = forms[0]
    if isinstance(first, (Outer, Lookup)):
        return first.joined(list(forms[1:]))
    flat = [tf.reshape(form.values, [form.batch_size, -1]) for form in forms]
    values = tf.reshape(tf.add_n(flat), [first.batch_size, *first.shape])

    def parts(count):
        return tf.add_n([_part_squares(form, count) for form in forms])

    return Explicit(values, first.shape, parts)


def _part_squares(form: Form, count: tf.Tensor | None) -> tf.Tensor:
    return form.part_squares() if count is None else form.first_part_squares(count)


def _is_renamed(use: Use) -> bool:
    """Whether the parameter holds the variable's entries in the variable's order."""
    path = use.path
    return path.isometric and not path.moved and path.piece is None


def in_float32(param: tf.Tensor, handle: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The parameter, computed again without casts to a coarse type, and its root.

    A sum over examples that is rounded to bfloat16 would move by more than the clipped
    gradient of an example.

    Returns:
      The parameter, and the tensor to differentiate it by: the variable's handle, or,
      for a variable of a coarse type, the variable's value cast to float32.
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
        lifted = op_copies.emit_in_type(op, inputs)[tensor.value_index]
    done[tensor.ref()] = lifted
    return lifted
