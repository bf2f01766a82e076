"""Per-example gradients by a vectorised Jacobian, where no rule applies.

Correct for any op that TensorFlow can differentiate, and slow: the cost of one backward
pass for every example, each over the whole batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._devices import in_xla
from tfdpclip._docs import see
from tfdpclip.gradients import ops, origins
from tfdpclip.gradients._copies import repeatable, scratch_graph
from tfdpclip.gradients.errors import LossStructureError
from tfdpclip.gradients.forms import (
    Budget,
    cut_rows,
    in_chunks,
    rows_where,
    sum_squares,
    sum_weighted,
)


class JacobianFallbackWarning(UserWarning):
    """Some variables take the slow path."""


def warn(variables: Sequence[tf.Variable], reasons: Sequence[str]) -> None:
    """Warns once per trace, naming the variables and the cost."""
    named = "; ".join(
        f"{variable.name} ({reason})"
        for variable, reason in zip(variables, reasons, strict=True)
    )
    warnings.warn(
        "No per-example rule covers how these variables are used, so their gradients "
        "come from a vectorised Jacobian, which costs about one backward pass per "
        f"example: {named}.",
        JacobianFallbackWarning,
        stacklevel=2,
    )


def jacobian(
    per_example: tf.Tensor,
    variables: Sequence[tf.Variable],
    handles: Sequence[tf.Tensor],
    indices: tf.Tensor,
) -> list[tf.Tensor]:
    """The gradients of the losses at `indices`: one `[len(indices), *shape]` each.

    Differentiates by the variables' handles in the graph of the loss, so that it works
    inside loops and branches too. Where TensorFlow cannot take the backward pass for
    all examples at once, it takes one after the other.
    """

    def one(index):
        seed = tf.one_hot(index, tf.shape(per_example)[0], dtype=per_example.dtype)
        gradients = tf.gradients(per_example, list(handles), grad_ys=seed)
        return [
            tf.zeros(v.shape, v.dtype) if g is None else tf.convert_to_tensor(g)
            for g, v in zip(gradients, variables, strict=True)
        ]

    if not (in_xla() and _needs_sizes(per_example, handles, one, indices)):
        try:
            found = tf.vectorized_map(one, indices, fallback_to_while_loop=True)
            # Behind a branch whose ranks differ, nobody knows any more.
            return [
                tf.ensure_shape(g, [None, *v.shape])
                for g, v in zip(found, variables, strict=True)
            ]
        except ValueError as error:
            if not _lost_lists(error):
                raise
    signature = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    return tf.map_fn(one, indices, fn_output_signature=signature, parallel_iterations=1)


def _needs_sizes(per_example, handles, one, indices) -> bool:
    """Whether XLA could not compile the vectorised form of a backward pass.

    Of one with branches, that divides examples among them, into sizes that are known
    when it runs; XLA needs them before. Of a loop that TensorFlow cannot vectorise, it
    keeps what comes out of each example's in a list, of lists where the loop has some,
    which XLA does not have.

    Raises:
      NotImplementedError: if XLA could not compile the backward passes one by one,
        either: of a loop in the graph itself, the process would die.
    """
    with scratch_graph() as graph:
        tf.gradients(per_example, list(handles))
        found = {op.type for op in graph.get_operations()}
        if found & ops.BRANCHES:
            return True
        if not found & (ops.LOOPS | ops.FUNCTION_CALLS):
            return False
    with scratch_graph() as graph:
        try:
            tf.vectorized_map(one, indices, fallback_to_while_loop=True)
            fails = any(map(_has_lists_of_lists, graph.get_operations()))
        except ValueError as error:
            fails = _lost_lists(error)
    if not fails:
        return False
    if found & ops.LOOPS:
        raise NotImplementedError(
            "A loop uses variables in a way that no per-example rule covers, and XLA "
            "cannot compile the Jacobian that they take instead. Leave out "
            "jit_compile=True, give batches a static size, or use tf.vectorized_map in "
            "the place of tf.map_fn." + see("layers-that-are-not-supported")
        )
    return True


def _lost_lists(error: ValueError) -> bool:
    """Whether converters of loops lost what they knew of lists of tensors."""
    return "handle data" in str(error)


def _has_lists_of_lists(op: tf.Operation) -> bool:
    """Whether a function that an op calls makes lists of what is no tensor."""
    return any(
        node.op == "TensorListReserve"
        and node.attr["element_dtype"].type == tf.variant.as_datatype_enum
        for name in origins.functions_of(op)
        for definition in origins.definitions(op.graph, name)
        if definition is not None
        for node in definition.node_def
    )


class SlowGradients:
    """Every example's gradients of the variables that no rule covers.

    Where they fit into memory, they are built once, and the norms and the sums are made
    of the same numbers. Elsewhere they are built twice, which is the same only if a
    backward pass gives the same result twice; this is looked up, not assumed. One pass
    then gives the sum under all weights, as gradients are linear in what comes back;
    behind a gradient function of somebody's own they need not be, and each example has
    a pass of its own again.

    Args:
      per_example: the losses, `[B]`.
      variables: the variables.
      handles: the graph's tensors that stand for them.
      batch_size: B.
      budget: what memory there is.
      coarse: whether a variable is used in a type below float32, to which ordinary
        gradients would round the sum over examples.
      linear: whether all gradient functions are TensorFlow's.

    Raises:
      LossStructureError: if they do not fit, and a second backward pass would draw
        other random numbers than the first.
    """

    def __init__(
        self,
        per_example: tf.Tensor,
        variables: Sequence[tf.Variable],
        handles: Sequence[tf.Tensor],
        batch_size: tf.Tensor,
        budget: Budget,
        *,
        coarse: bool = False,
        linear: bool = True,
    ):
        self.variables = list(variables)
        self._losses = per_example
        self._handles = list(handles)
        self._batch_size = batch_size
        self._budget = budget
        self._one_by_one = coarse or not linear
        self._bytes = 4 * sum(math.prod(v.shape) for v in variables)
        self._kept: list[tf.Tensor] | None = None
        if budget.reserve(self._bytes):
            self._kept = self._built(tf.constant(0), batch_size)
        else:
            self._refuse_random_passes()

    def _built(self, start, size) -> list[tf.Tensor]:
        indices = start + tf.range(size)
        return jacobian(self._losses, self.variables, self._handles, indices)

    def part(self, start, size) -> list[tf.Tensor]:
        """Some examples' gradients, `[size, *shape]` for each variable."""
        if self._kept is None:
            return self._built(start, size)
        return [cut_rows(values, start, size) for values in self._kept]

    def squared_norms(self) -> tf.Tensor:
        """`[B, V]`: one column for each of the V variables.

        A value that is not a number in one example's backward pass reaches every
        other's here, because each differentiates the whole batch. Nothing can then be
        said about anybody's norm, so the step fails. (XLA drops the assertion; every
        example is then dropped for its norm.)
        """

        def compute(start, size):
            squares = [
                tf.cast(sum_squares(g), tf.float32) for g in self.part(start, size)
            ]
            return tf.stack(squares, axis=1)

        if self._kept is not None:
            squares = compute(tf.constant(0), self._batch_size)
        else:
            chunk, width = self._budget.chunk(self._bytes), len(self.variables)
            squares = in_chunks(compute, self._batch_size, chunk, width)
        numbers = tf.reduce_all(tf.logical_not(tf.math.is_nan(squares)))
        assertion = tf.debugging.Assert(numbers, [not_a_number(self.variables)])
        with tf.control_dependencies([] if assertion is None else [assertion]):
            return tf.identity(squares)

    def weighted_sums(
        self, columns: Sequence[tf.Tensor], kept: tf.Tensor | None
    ) -> list[tf.Tensor]:
        """sum_i weights_i g_i for each variable.

        Args:
          columns: the weights, `[B]`, for each variable.
          kept: which examples count, whatever the others contain; None for all.
        """
        if self._kept is None:
            return self._sums_of_another_pass(columns, kept)
        sums = []
        for weights, values in zip(columns, self._kept, strict=True):
            values = tf.cast(values, tf.float32) if values.dtype.size < 4 else values
            if kept is not None:
                values = rows_where(kept, values)
            sums.append(sum_weighted(tf.cast(weights, values.dtype), values))
        return sums

    def _sums_of_another_pass(self, columns, kept):
        groups: dict = {}
        for place, weights in enumerate(columns):
            groups.setdefault(weights.ref(), (weights, []))[1].append(place)
        sums: list = [None] * len(self.variables)
        for weights, places in groups.values():
            variables = [self.variables[place] for place in places]
            handles = [self._handles[place] for place in places]
            if kept is None and not self._one_by_one:
                seeds = tf.cast(weights, self._losses.dtype)
                found = tf.gradients(self._losses, handles, grad_ys=seeds)
            else:
                # Autodiff would round the sum over examples to a coarse type, and
                # who knows what a gradient function makes of small weights.
                every = tf.ones_like(weights, tf.bool) if kept is None else kept
                found = masked_sums(self._losses, variables, handles, weights, every)
            for place, variable, total in zip(places, variables, found, strict=True):
                if total is None:
                    total = tf.zeros(variable.shape, variable.dtype)
                sums[place] = tf.convert_to_tensor(total)
        return sums

    def _refuse_random_passes(self) -> None:
        with scratch_graph() as graph:
            tf.gradients(self._losses, self._handles)
            random = [op for op in graph.get_operations() if not repeatable(op)]
        if random:
            raise LossStructureError(
                "The backward pass of these variables draws random numbers, or has "
                f"effects, of its own ({random[0].name!r}, a {random[0].type}), so "
                "that norms and sums would come from different passes: "
                f"{', '.join(v.name for v in self.variables)}. Take tf.recompute_grad "
                "out, or let the gradients fit into memory: gradient_memory="
                f"{self._bytes * self._budget.batch_size} at least."
            )


def not_a_number(variables: Sequence[tf.Variable]) -> str:
    """The error for an example that cannot be kept apart from the others."""
    return (
        "An example's loss or gradient is not a number, and these variables take the "
        "Jacobian path, on which it cannot be kept apart from the other examples: "
        f"{', '.join(v.name for v in variables)}. Remove examples that are not finite "
        "before training."
    )


def masked_sums(
    per_example: tf.Tensor,
    variables: Sequence[tf.Variable],
    handles: Sequence[tf.Tensor],
    weights: tf.Tensor,
    kept: tf.Tensor,
) -> list[tf.Tensor]:
    """Weighted sums over the examples in `kept`, whatever the others contain.

    Examples are taken one at a time, because multiplying a gradient that is not finite
    by 0 does not remove it.
    """
    count = tf.shape(weights)[0]

    def body(i, sums):
        gradients = jacobian(per_example, variables, handles, i[tf.newaxis])
        added = [
            total + tf.where(kept[i], tf.cast(weights[i], g.dtype) * g[0], 0)
            for total, g in zip(sums, gradients, strict=True)
        ]
        return i + 1, added

    start = [tf.zeros(v.shape, v.dtype) for v in variables]
    _, sums = tf.while_loop(
        lambda i, sums: i < count,
        body,
        (tf.constant(0), start),
        parallel_iterations=1,
    )
    return sums
