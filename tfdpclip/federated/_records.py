"""One client's update as a record: its layout, its groups, its clipping."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.clipping import ClipRule, bound_rule
from tfdpclip.federated import _tff
from tfdpclip.kernel import limits

# Below this, float32 squares that underflow could matter to the sum of squares.
_SMALL_SQUARES = 1e-18
# A leaf of this many coordinates gets a tensor of its own, which saves a copy.
_LARGE_LEAF = 2**16


class Layout:
    """How a structure of floating-point tensors lies in one vector.

    Args:
      value_type: the type of one client's value.
      names: a name for each leaf, for rules with groups; by default its path.

    Raises:
      ValueError: if it is not a structure of floating-point tensors of known shape.
    """

    def __init__(self, value_type: Any, names: Sequence[str] | None = None):
        self.value_type = value_type
        named = _tff.named_leaves(value_type)
        if not named:
            raise ValueError("value_type must hold at least one tensor, got none.")
        for name, leaf in named:
            if not tf.as_dtype(leaf.dtype).is_floating:
                raise ValueError(
                    f"value_type must hold floating-point tensors; {name!r} is {leaf}."
                )
            if leaf.shape is None or any(size is None for size in leaf.shape):
                raise ValueError(
                    f"value_type must have static shapes; {name!r} is {leaf}."
                )
        self.names = [name for name, _ in named] if names is None else list(names)
        if len(self.names) != len(named):
            raise ValueError(
                f"variable_names has {len(self.names)} entries, but an update has "
                f"{len(named)} tensors."
            )
        self.shapes = [list(leaf.shape) for _, leaf in named]
        self.dtypes = [tf.as_dtype(leaf.dtype) for _, leaf in named]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.size = sum(self.sizes)
        large = [i for i, size in enumerate(self.sizes) if size >= _LARGE_LEAF]
        small = [i for i in range(len(named)) if i not in large]
        #: The indices of the leaves that are sent as one tensor.
        self.pieces = [*([i] for i in large), *([small] if small else [])]
        wide = tf.float64 in self.dtypes
        self.dtype = tf.float64 if wide else tf.float32

    def to_vector(self, leaves: Sequence[tf.Tensor]) -> tf.Tensor:
        """The leaves as one vector of `dtype`."""
        parts = [tf.reshape(tf.cast(leaf, self.dtype), [-1]) for leaf in leaves]
        return tf.concat(parts, 0) if len(parts) > 1 else parts[0]

    def split(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """The coordinates of each leaf, from one vector of all coordinates."""
        return tf.split(vector, self.sizes) if len(self.sizes) > 1 else [vector]

    def to_pieces(self, leaves: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The leaves as few vectors of `dtype`, with few copies of large leaves."""
        return [self.to_vector([leaves[i] for i in piece]) for piece in self.pieces]

    def split_pieces(self, pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The coordinates of each leaf, from the pieces."""
        found: list[Any] = [None] * len(self.sizes)
        for places, piece in zip(self.pieces, pieces, strict=True):
            sizes = [self.sizes[i] for i in places]
            parts = tf.split(piece, sizes) if len(places) > 1 else [piece]
            for i, part in zip(places, parts, strict=True):
                found[i] = part
        return found

    def to_value(self, parts: Sequence[tf.Tensor]) -> Any:
        """The structure with these coordinates, with each leaf's own dtype."""
        leaves = [
            tf.cast(tf.reshape(part, shape), dtype)
            for part, shape, dtype in zip(parts, self.shapes, self.dtypes, strict=True)
        ]
        return _tff.pack(leaves, self.value_type)


@dataclasses.dataclass(frozen=True)
class Weighting:
    """The weighting of clients, with a public cap.

    Attributes:
      cap: the public cap; larger weights count as the cap.
      weight_type: the type of one client's weight.

    Raises:
      ValueError: if a weight is not a real number.
    """

    cap: float
    weight_type: Any

    def __post_init__(self):
        kind = self.weight_type
        scalar = isinstance(kind, _tff.TensorType) and list(kind.shape or []) == []
        dtype = tf.as_dtype(kind.dtype) if scalar else None
        if dtype is None or not (dtype.is_floating or dtype.is_integer):
            raise ValueError(
                "weight_type must be one number for each client, such as "
                f"tff.TensorType(np.float32), got {kind}."
            )

    @classmethod
    def of(cls, cap: float | None, weight_type: Any) -> Weighting | None:
        """Returns the weighting for a cap and a type, or None for neither.

        Raises:
          ValueError: if only one is given.
        """
        if cap is None and weight_type is not None:
            raise ValueError(
                "weight_type: clients are given weights here, and this clipped_mean has"
                " no weight_cap. Write clipped_mean(..., weight_cap=100), in which a "
                "client counts by its weight, up to 100; or use a builder without "
                "weights, such as build_unweighted_fed_avg."
                + see("a-factory-around-the-mean")
            )
        if cap is not None and weight_type is None:
            raise ValueError(
                "weight_type must be given, the type of one client's weight, with "
                f"weight_cap={cap:g}: create(value_type, tff.TensorType(np.float32))."
            )
        return None if cap is None else cls(cap, weight_type)

    def share(self, weight: tf.Tensor) -> tf.Tensor:
        """A graph: a client's weight over the cap, float64."""
        return tf.cast(weight, tf.float64) / self.cap


class RecordClip:
    """A clip rule applied to records of one layout, with or without groups.

    A flat rule has one group. An update with overflowing squares is measured in
    float64, so that a huge finite update is clipped, not dropped. (For norms above
    1e37, the factor vanishes in float32, and zeros are left.)
    """

    def __init__(self, rule: ClipRule, layout: Layout):
        self.layout = layout
        self.rule = bound_rule(rule, layout.names)
        assignment = self.rule.assignment
        self.flat = assignment is None
        self.assignment = (
            [0] * len(layout.names) if assignment is None else list(assignment)
        )
        self.groups = max(self.assignment) + 1
        self._check_public_norms()
        self.group_sizes = [
            sum(s for s, g in zip(layout.sizes, self.assignment, strict=True) if g == h)
            for h in range(self.groups)
        ]

    def initial_state(self) -> list[tf.Tensor]:
        """The rule's first state, flattened."""
        return [tf.convert_to_tensor(x) for x in tf.nest.flatten(self._template())]

    def state(self, flat: Sequence[tf.Tensor]) -> Any:
        """The rule's state from its flat form."""
        return tf.nest.pack_sequence_as(self._template(), list(flat))

    def _template(self) -> Any:
        return self.rule.initial_state()

    def _check_public_norms(self) -> None:
        """Raises if a rule lacks public norms, which are not measured here."""
        if not self.rule.takes_public_norms:
            return
        with tf.init_scope():
            known = bool(self.rule.knows_norms(self._template()))
        if not known:
            raise ValueError(
                f"clip is {self.rule}, which lacks public norms (or multipliers). In "
                "federated training give them as numbers, such as "
                "dpc.PublicNormClip(1.0, norms={'embedding': 0.3, 'dense': 1.2})."
            )

    def clip_norms(self, state: Any) -> tf.Tensor:
        """The clip norm of each group, float32 `[L]`, for reports."""
        report = self.rule.clip_norm if self.flat else self.rule.clip_norms
        return tf.reshape(tf.cast(report(state), tf.float32), [self.groups])

    def sensitivity(self, state: Any) -> tf.Tensor:
        """The largest norm of a clipped record in each group, float64 `[L]`."""
        bound = tf.cast(self.rule.sensitivity(state), tf.float64)
        return tf.reshape(bound, [self.groups])

    def noise_scales(self, state: Any) -> tf.Tensor:
        """The ratio of each group's noise stddev to z_g, float64 `[L]`."""
        scales = tf.cast(limits.scales_of(self.rule)(state), tf.float64)
        return tf.reshape(scales, [self.groups])

    def norms(self, leaves: Sequence[tf.Tensor], exact: bool = False) -> tf.Tensor:
        """The norm of each group of one record, float64 `[L]`.

        Args:
          leaves: the record's tensors.
          exact: whether to compute in float64 precision, not only its range; slower.
        """
        if exact:
            return tf.sqrt(self._wide_squares(leaves))
        # Half precision overflows at 65504.
        leaves = [
            leaf if leaf.dtype == tf.float64 else tf.cast(leaf, tf.float32)
            for leaf in leaves
        ]
        quick = self._per_group([2 * tf.nn.l2_loss(leaf) for leaf in leaves])
        accurate = tf.logical_and(tf.math.is_finite(quick), quick > _SMALL_SQUARES)
        squares = tf.cond(
            tf.reduce_all(accurate), lambda: quick, lambda: self._wide_squares(leaves)
        )
        return tf.sqrt(squares)

    def _wide_squares(self, leaves):
        # Squares of float32 neither overflow nor vanish in float64.
        return self._per_group(
            [tf.reduce_sum(tf.square(tf.cast(leaf, tf.float64))) for leaf in leaves]
        )

    def _per_group(self, squares):
        squares = tf.stack([tf.cast(part, tf.float64) for part in squares])
        if self.flat:
            return tf.reduce_sum(squares, keepdims=True)
        return tf.math.unsorted_segment_sum(squares, self.assignment, self.groups)

    def weigh(
        self,
        leaves: Sequence[tf.Tensor],
        state: Any,
        exact: bool = False,
        share: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Applies the rule to one record.

        Args:
          leaves: the record's tensors.
          state: the rule's state.
          exact: see `norms`.
          share: the client's weight over the public cap, float64, before clipping to
            [0, 1]; None without weights. The share makes no norm larger, and the
            indicators do not depend on it.

        Returns:
          The factor of each group, `[L]` float64; the norm of each group once weighted,
          `[L]` float64; and the indicators, `[K]`. All are 0 if any coordinate of any
          group, or the share, is not finite.
        """
        norms = self.norms(leaves, exact)
        present = tf.reduce_all(tf.math.is_finite(norms))
        if share is not None:
            present = tf.logical_and(present, tf.math.is_finite(share))
        norms = tf.where(present, norms, tf.zeros_like(norms))
        batched = norms if self.flat else norms[tf.newaxis]
        weights = limits.weights_of(self.rule, batched, state)
        weights = tf.reshape(weights, [self.groups])
        if share is not None:
            weights *= tf.cast(tf.clip_by_value(share, 0.0, 1.0), weights.dtype)
        weights = tf.where(present, weights, tf.zeros_like(weights))
        one = tf.reshape(present, [1])
        indicators = limits.indicators_of(self.rule, batched, state, one)
        return weights, weights * norms, tf.cast(tf.squeeze(indicators, 0), tf.float32)

    def spread(self, values: tf.Tensor) -> tf.Tensor:
        """One value per coordinate, from one value per group; a scalar if L = 1."""
        if self.groups == 1:
            return tf.reshape(values, [])
        return tf.repeat(
            tf.gather(values, self.assignment), np.asarray(self.layout.sizes)
        )

    def scale_leaves(
        self, leaves: Sequence[tf.Tensor], factors: tf.Tensor
    ) -> list[tf.Tensor]:
        """The record's tensors in the layout's dtype, every group times its factor.

        A factor of 0 gives zeros even for NaN.
        """
        factors = tf.unstack(tf.cast(factors, self.layout.dtype), num=self.groups)
        return [
            tf.math.multiply_no_nan(tf.cast(leaf, self.layout.dtype), factors[group])
            for leaf, group in zip(leaves, self.assignment, strict=True)
        ]
