"""Per-example gradients where no rule applies: slow, and right for any op.

Of losses that are proven to keep the examples apart, a vectorised Jacobian: the cost of
one backward pass for every example, each over the whole batch. Of other losses,
`single_examples.py` has the gradients of one example at a time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfdpclip._devices import in_xla
from tfdpclip._docs import see
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


class Jacobian:
    """Makes the gradients of examples from a backward pass of the batch for each.

    Args:
      losses: `[B]`, proven to keep the examples apart.
      variables: the variables.
      handles: the graph's tensors that stand for them.
      linear: whether all gradient functions are TensorFlow's, and no type is so coarse
        that ordinary gradients would round the sum over examples.
    """

    #: Whether a value that is no number in one example reaches the others' gradients.
    spreads = True

    def __init__(self, losses, variables, handles, linear: bool = True):
        self._losses, self._linear = losses, linear
        self._variables, self._handles = list(variables), list(handles)

    def gradients(self, indices: tf.Tensor) -> list[tf.Tensor]:
        """The gradients at `indices`, `[n, *shape]` for each variable."""
        return jacobian(self._losses, self._variables, self._handles, indices)

    def sums(self, weights: tf.Tensor, places: Sequence[int]) -> list | None:
        """The weighted sums by some variables in one pass; None if that may differ."""
        if not self._linear:
            return None
        seeds = tf.cast(weights, self._losses.dtype)
        handles = [self._handles[place] for place in places]
        return tf.gradients(self._losses, handles, grad_ys=seeds)

    def drawing(self) -> tf.Operation | None:
        """An op that gives other numbers in another pass; None if none does."""
        with scratch_graph() as graph:
            tf.gradients(self._losses, self._handles)
            random = [op for op in graph.get_operations() if not repeatable(op)]
        return random[0] if random else None


class SlowGradients:
    """Every example's gradients of the variables that no rule covers.

    Where they fit into memory, they are built once, and the norms and the sums are made
    of the same numbers. Elsewhere they are built twice, which is the same only if a
    backward pass gives the same result twice; this is looked up, not assumed.

    Args:
      maker: a `Jacobian`, or `ExamplesAlone`.
      variables: the variables.
      batch_size: B.
      budget: what memory there is.

    Raises:
      LossStructureError: if they do not fit, and a second backward pass would draw
        other random numbers than the first.
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
        self._kept: list[tf.Tensor] | None = None
        if budget.reserve(self._bytes):
            self._kept = self._built(tf.constant(0), batch_size)
        else:
            self._refuse_random_passes()

    def _built(self, start, size) -> list[tf.Tensor]:
        return self._maker.gradients(start + tf.range(size))

    def part(self, start, size) -> list[tf.Tensor]:
        """Some examples' gradients, `[size, *shape]` for each variable."""
        if self._kept is None:
            return self._built(start, size)
        return [cut_rows(values, start, size) for values in self._kept]

    def squared_norms(self) -> tf.Tensor:
        """`[B, V]`: one column for each of the V variables.

        A value that is not a number in one example's backward pass reaches every
        other's in a Jacobian, because each differentiates the whole batch. Nothing can
        then be said about anybody's norm, so the step fails. (XLA drops the assertion;
        every example is then dropped for its norm.)
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
        if not self._maker.spreads:
            return squares
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
            found = None if kept is not None else self._maker.sums(weights, places)
            if found is None:
                every = tf.ones_like(weights, tf.bool) if kept is None else kept
                found = self._masked_sums(places, weights, every)
            for place, total in zip(places, found, strict=True):
                variable = self.variables[place]
                if total is None:
                    total = tf.zeros(variable.shape, variable.dtype)
                sums[place] = tf.convert_to_tensor(total)
        return sums

    def _masked_sums(
        self, places: Sequence[int], weights: tf.Tensor, kept: tf.Tensor
    ) -> list[tf.Tensor]:
        """Weighted sums over the examples in `kept`, whatever the others contain.

        Examples are taken one at a time, because multiplying a gradient that is not
        finite by 0 does not remove it.
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
                "The backward pass of these variables draws random numbers, or has "
                f"effects, of its own ({op.name!r}, a {op.type}), so "
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
