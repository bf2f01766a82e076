"""Per-example gradients of variables that no rule covers: slow, and right for any op.

For losses that are proven to keep the examples apart, this module takes a vectorised
Jacobian: a backward pass over the whole batch for every example. For unproven losses,
`single_examples.py` makes the gradients one example at a time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._devices import has_form_of_xla
from tfdpclip._docs import see
from tfdpclip._tf_private import map_elements
from tfdpclip.gradients.errors import LossStructureError
from tfdpclip.gradients.forms.base_form import (
    Budget,
    cut_rows,
    in_chunks,
    rows_where,
    sum_squares,
    sum_weighted,
)
from tfdpclip.gradients.graph import ops, origins
from tfdpclip.gradients.graph.op_copies import repeatable, scratch_graph
from tfdpclip.gradients.proof.single_examples import ExamplesAlone


class JacobianFallbackWarning(UserWarning):
    """The gradients of some variables come from a Jacobian, the slow path."""


def warn(variables: Sequence[tf.Variable], reasons: Sequence[str]) -> None:
    """Warns once per trace, naming the variables and the cost.

    Args:
      variables: the variables on the slow path.
      reasons: for each variable, the reason why no rule covers it.
    """
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
    """The gradients of the losses at `indices`, `[len(indices), *shape]` by variable.

    Differentiates with respect to the variables' handles in the graph of the loss, so
    the function works inside loops and branches too. If TensorFlow cannot vectorise
    the backward passes, they run one after the other.
    """

    def one(index):
        seed = tf.one_hot(index, tf.shape(per_example)[0], dtype=per_example.dtype)
        gradients = tf.gradients(per_example, list(handles), grad_ys=seed)
        return [
            tf.zeros(v.shape, v.dtype) if g is None else tf.convert_to_tensor(g)
            for g, v in zip(gradients, variables, strict=True)
        ]

    if not (has_form_of_xla() and _needs_sizes(per_example, handles, one, indices)):
        try:
            rows = tf.vectorized_map(one, indices, fallback_to_while_loop=True)
            # If the branches of a condition differ in rank, TensorFlow loses the shape.
            return [
                tf.ensure_shape(g, [None, *v.shape])
                for g, v in zip(rows, variables, strict=True)
            ]
        except ValueError as error:
            if not _lost_lists(error):
                raise
    signature = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    return map_elements(one, indices, signature)


def _needs_sizes(per_example, handles, one, indices) -> bool:
    """Whether XLA cannot compile the vectorised backward passes.

    * With branches: the vectorised form divides the examples among the branches. The
      sizes of the parts are known only when the step runs, but XLA needs them before.
    * With a loop that TensorFlow cannot vectorise: the vectorised form keeps the
      results of each example in a list. If the loop has lists too, these are lists of
      lists, which XLA does not have.

    Raises:
      NotImplementedError: if XLA can compile neither the vectorised backward passes nor
        single backward passes. For a loop in the graph, the process would die.
    """
    with scratch_graph() as graph:
        tf.gradients(per_example, list(handles))
        types = {op.type for op in graph.get_operations()}
        if types & ops.BRANCHES:
            return True
        if not types & (ops.LOOPS | ops.FUNCTION_CALLS):
            return False
    with scratch_graph() as graph:
        try:
            tf.vectorized_map(one, indices, fallback_to_while_loop=True)
            fails = any(map(_has_lists_of_lists, graph.get_operations()))
        except ValueError as error:
            fails = _lost_lists(error)
    if not fails:
        return False
    if types & ops.LOOPS:
        raise NotImplementedError(
            "A loop uses variables in a way that no per-example rule covers, and XLA "
            "cannot compile a Jacobian of the loop. Leave out jit_compile=True, give "
            "batches a static size, or replace tf.map_fn by tf.vectorized_map."
            + see("layers-that-are-not-supported")
        )
    return True


def _lost_lists(error: ValueError) -> bool:
    """Whether TensorFlow's converter of loops lost the handle data of a tensor list."""
    return "handle data" in str(error)


def _has_lists_of_lists(op: tf.Operation) -> bool:
    """Whether a function that an op calls makes lists of lists."""
    return any(
        node.op == "TensorListReserve"
        and node.attr["element_dtype"].type == tf.variant.as_datatype_enum
        for node in origins.nodes_within(op)
    )


class Jacobian:
    """Makes per-example gradients by a backward pass of the batch for each example.

    Args:
      losses: `[B]`, proven to keep the examples apart.
      variables: the variables.
      handles: the graph's handles of `variables`.
      linear: whether all gradient functions are TensorFlow's, and no floating type is
        so coarse that an ordinary gradient would round the sum over examples.
    """

    #: Whether a NaN in the backward pass of an example reaches all examples' gradients.
    spreads_nan = True

    def __init__(self, losses, variables, handles, linear: bool = True):
        self._losses, self._linear = losses, linear
        self._variables, self._handles = list(variables), list(handles)

    def gradients(self, indices: tf.Tensor) -> list[tf.Tensor]:
        """The gradients at `indices`, `[n, *shape]` for each variable."""
        return jacobian(self._losses, self._variables, self._handles, indices)

    def sums(self, weights: tf.Tensor, places: Sequence[int]) -> list | None:
        """The weighted sums of some variables' gradients, from a single backward pass.

        Args:
          weights: the weights of the losses, `[B]`.
          places: the numbers of the variables.

        Returns:
          None if the sum of per-example gradients may differ.
        """
        if not self._linear:
            return None
        seeds = tf.cast(weights, self._losses.dtype)
        handles = [self._handles[place] for place in places]
        return tf.gradients(self._losses, handles, grad_ys=seeds)

    def drawing(self) -> tf.Operation | None:
        """An op that draws new numbers in a second backward pass; None if none does."""
        with scratch_graph() as graph:
            tf.gradients(self._losses, self._handles)
            random = [op for op in graph.get_operations() if not repeatable(op)]
        return random[0] if random else None


class SlowGradients:
    """Every example's gradients of the variables that no rule covers.

    If the gradients fit into memory, they are built once, and both the norms and the
    sums are computed from them. If they do not fit, they are built twice: for the norms
    and for the sums. This is right only if two backward passes give the same result;
    the constructor looks for ops that draw random numbers.

    Args:
      maker: a `Jacobian`, or `ExamplesAlone`.
      variables: the variables.
      batch_size: B.
      budget: the memory for gradients.

    Raises:
      LossStructureError: if the gradients do not fit, and a second backward pass would
        draw new random numbers.
    """

    def __init__(
        self,
        maker: Jacobian | ExamplesAlone,
        variables: Sequence[tf.Variable],
        batch_size: tf.Tensor,
        budget: Budget,
    ):
        self.variables = list(variables)
        self._maker = maker
        self._batch_size = batch_size
        self._budget = budget
        self._bytes = 4 * sum(math.prod(v.shape) for v in variables)
        self._gradients: list[tf.Tensor] | None = None
        if budget.reserve(self._bytes):
            self._gradients = self._built(tf.constant(0), batch_size)
        else:
            self._refuse_random_passes()

    def _built(self, start, size) -> list[tf.Tensor]:
        return self._maker.gradients(start + tf.range(size))

    def part(self, start, size) -> list[tf.Tensor]:
        """The gradients of `size` examples, `[size, *shape]` for each variable."""
        if self._gradients is None:
            return self._built(start, size)
        return [cut_rows(values, start, size) for values in self._gradients]

    def squared_norms(self) -> tf.Tensor:
        """The squared norms of the gradients, `[B, V]`, for V variables.

        In a Jacobian, a NaN in the backward pass of an example reaches the gradients of
        all examples, because each backward pass goes through the whole batch. No norm
        is then known, so the step fails. (XLA drops the assertion; every example is
        then dropped, because its norm is not finite.)
        """

        def compute(start, size):
            squares = [
                tf.cast(sum_squares(g), tf.float32) for g in self.part(start, size)
            ]
            return tf.stack(squares, axis=1)

        if self._gradients is not None:
            squares = compute(tf.constant(0), self._batch_size)
        else:
            chunk, width = self._budget.chunk(self._bytes), len(self.variables)
            squares = in_chunks(compute, self._batch_size, chunk, width)
        if not self._maker.spreads_nan:
            return squares
        numbers = tf.reduce_all(tf.logical_not(tf.math.is_nan(squares)))
        assertion = tf.debugging.Assert(numbers, [not_a_number(self.variables)])
        with tf.control_dependencies([] if assertion is None else [assertion]):
            return tf.identity(squares)

    def weighted_sums(
        self, columns: Sequence[tf.Tensor], kept: tf.Tensor | None
    ) -> list[tf.Tensor]:
        """The weighted sum of the examples' gradients, for each variable.

        Args:
          columns: the weights, `[B]`, for each variable.
          kept: the mask of the examples that count, `[B]`; None for all. The gradients
            of dropped examples may be infinite or NaN.
        """
        if self._gradients is None:
            return self._sums_of_another_pass(columns, kept)
        sums = []
        for weights, values in zip(columns, self._gradients, strict=True):
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
            totals = None if kept is not None else self._maker.sums(weights, places)
            if totals is None:
                every = tf.ones_like(weights, tf.bool) if kept is None else kept
                totals = self._masked_sums(places, weights, every)
            for place, total in zip(places, totals, strict=True):
                variable = self.variables[place]
                if total is None:
                    total = tf.zeros(variable.shape, variable.dtype)
                sums[place] = tf.convert_to_tensor(total)
        return sums

    def _masked_sums(
        self, places: Sequence[int], weights: tf.Tensor, kept: tf.Tensor
    ) -> list[tf.Tensor]:
        """Weighted sums over the examples in `kept`.

        The gradients of dropped examples may be infinite or NaN, and a weight of 0 does
        not remove them from a sum. So the loop takes one example at a time.
        """
        count = tf.shape(weights)[0]

        def body(i, sums):
            gradients = self._maker.gradients(i[tf.newaxis])
            gradients = [gradients[place] for place in places]
            added = [
                total + tf.where(kept[i], tf.cast(weights[i], g.dtype) * g[0], 0)
                for total, g in zip(sums, gradients, strict=True)
            ]
            return i + 1, added

        variables = [self.variables[place] for place in places]
        start = [tf.zeros(v.shape, v.dtype) for v in variables]
        _, sums = tf.while_loop(
            lambda i, sums: i < count,
            body,
            (tf.constant(0), start),
            parallel_iterations=1,
        )
        return sums

    def _refuse_random_passes(self) -> None:
        op = self._maker.drawing()
        if op is not None:
            raise LossStructureError(
                f"The op {op.name!r} (a {op.type}) in the backward pass draws random "
                "numbers or has an effect, so the norms and the sums of the gradients "
                "would come from different passes, for the variables "
                f"{', '.join(v.name for v in self.variables)}. Remove "
                "tf.recompute_grad, or let the gradients fit into memory: "
                f"gradient_memory={self._bytes * self._budget.batch_size} at least."
            )


def not_a_number(variables: Sequence[tf.Variable]) -> str:
    """The error message for a NaN in a Jacobian, which reaches all examples."""
    return (
        "The loss or gradient of an example is not a number (NaN). The gradients of "
        f"the variables {', '.join(v.name for v in variables)} come from a Jacobian, "
        "where the NaN reaches the gradients of all examples. Remove examples that are "
        "not finite before training." + see("numbers-out-of-range")
    )
