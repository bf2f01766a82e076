"""Adversarial norms: how far a record can move a sum under a clip rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._arguments import shown
from tfdpclip.clipping.base import ClipRule
from tfdpclip.kernel.limits import ROUNDING

# The relative difference between vectorised arithmetic and scalar arithmetic.
UNALIGNED = 4 * ROUNDING
_NOT_FINITE = (np.inf, -np.inf, np.nan)
# The expected number of records in a step, for the defaults of counts.
_RECORDS = 100.0
# Norms drawn from all magnitudes for each state and type.
_COUNT = 500
# How many of the groups, and of the records, are tested alone.
_ALONE = 4


def check_bounded(
    rule: ClipRule, states: Sequence[Any], draw: np.random.Generator
) -> None:
    """Checks a rule of the library in these states, for adversarial norms."""
    kinds = [np.float32, np.float64]
    if not rule.has_groups:
        kinds += [np.float16, tf.bfloat16.as_numpy_dtype]
    for i, state in enumerate(states):
        for dtype in kinds:
            trial = Trial(rule, state, dtype, drawn(rule, dtype, draw))
            # Coupling shows in every state, and is slow to test, so one state suffices.
            fault = trial.fault() or (trial.coupling() if not i else None)
            assert fault is None, f"{rule}: {fault}"


def drawn(rule: ClipRule, dtype: Any, draw: np.random.Generator) -> np.ndarray:
    """Norms of all magnitudes, `[B]` or `[B, L]`."""
    low, high = (-330, 308) if dtype == np.float64 else (-46, 38)
    groups = groups_of(rule)
    size = (_COUNT, groups) if groups else (_COUNT,)
    norms = 10.0 ** draw.uniform(low, high, size)
    # Half of the norms are in the usual range of training.
    norms[::2] = 10.0 ** draw.uniform(-4, 4, norms[::2].shape)
    if groups:
        norms[1::4] *= draw.integers(0, 2, norms[1::4].shape)
    return norms


def groups_of(rule: ClipRule) -> int:
    """L, or 0 for a rule without groups."""
    return 0 if rule.assignment is None else max(rule.assignment) + 1


def _clip_norms(rule: ClipRule, state: Any) -> tf.Tensor:
    return rule.clip_norms(state) if rule.has_groups else rule.clip_norm(state)


def format_state(state: Any) -> str:
    """A state for a message."""
    return shown(tf.nest.map_structure(lambda part: np.asarray(part).tolist(), state))


def as_double(tensor: Any) -> np.ndarray:
    """A tensor's numbers in double precision."""
    return tf.cast(tensor, tf.float64).numpy()


@dataclasses.dataclass
class Trial:
    """A rule in one state, with adversarial norms of one type.

    Attributes:
      rule: the rule, bound if it has groups.
      state: a state of the rule.
      dtype: the norms' type.
      more: more norms to test, `[B]` or `[B, L]`.
    """

    rule: ClipRule
    state: Any
    dtype: Any
    more: dataclasses.InitVar[np.ndarray | None] = None

    def __post_init__(self, more: np.ndarray | None) -> None:
        rule, state = self.rule, self.state
        count = groups_of(rule)
        self._shape = [count] if count else []
        self.sensitivity = as_double(rule.sensitivity(state))
        self.scales = as_double(rule.noise_scales(state))
        clips = as_double(_clip_norms(rule, state))
        around = np.stack(np.broadcast_arrays(self.sensitivity, clips))
        norms = _adversarial(around, count)
        if more is not None:
            norms = np.concatenate([norms, more])
        # Casting overflows to infinity and underflows to zero, which are adversarial.
        with np.errstate(over="ignore"):
            self._given = tf.cast(tf.constant(norms), tf.as_dtype(self.dtype))
        self.norms = as_double(self._given)
        self.weights = np.zeros_like(self.norms)

    def fault(self) -> str | None:
        """A description of the broken guarantee, or None."""
        return (
            self._of_scales()
            or self._of_weights()
            or self._of_norms()
            or self._of_indicators()
        )

    @property
    def worst(self) -> tuple[float, int]:
        """The largest norm of a weighted record, over the noise, and its index."""
        parts = self._parts() / self.scales
        sizes = np.linalg.norm(parts, axis=1) if self._shape else np.abs(parts)
        index = int(np.argmax(sizes))
        return float(sizes[index]), index

    def _of_scales(self) -> str | None:
        for method, found in (
            ("sensitivity", self.sensitivity),
            ("noise_scales", self.scales),
        ):
            if list(found.shape) != self._shape:
                wanted = f"of shape {self._shape}" if self._shape else "a scalar"
                return f"{method}(state) has shape {list(found.shape)}, not {wanted}"
            if not (np.isfinite(found).all() and (found > 0).all()):
                return (
                    f"{method}(state) is {shown(found.tolist())} in state "
                    f"{format_state(self.state)}; it must be finite and above 0"
                )
        return None

    def _of_weights(self) -> str | None:
        given = self.rule.weights(self._given, self.state)
        wanted = self._given.dtype if self._given.dtype.size >= 4 else tf.float32
        if given.dtype != wanted or given.shape != self._given.shape:
            return (
                f"weights(norms, state) is {given.dtype.name} {list(given.shape)} for "
                f"norms {self._given.dtype.name} {list(self._given.shape)}, and must "
                f"be {wanted.name} of the norms' shape"
            )
        self.weights = weights = as_double(given)
        wrong = ~(np.isfinite(weights) & (weights >= 0))
        wrong |= ~np.isfinite(self.norms) & (weights != 0)
        if not wrong.any():
            return None
        index = tuple(np.argwhere(wrong)[0])
        allowed = "0 for a norm that is not finite" * bool(
            ~np.isfinite(self.norms[index])
        )
        return self._about(index[0], allowed or "a finite weight, 0 or above")

    def _of_norms(self) -> str | None:
        parts = self._parts()
        over = parts > self.sensitivity * (1 + ROUNDING)
        if over.any():
            index = int(np.argwhere(over)[0][0])
            return self._about(
                index,
                f"the sensitivity, {shown(self.sensitivity.tolist())}",
            )
        size, index = self.worst
        if size > 1 + ROUNDING:
            return self._about(
                index,
                f"a norm of 1 in units of noise_scales(state), "
                f"{shown(self.scales.tolist())}, and this is {size:.7g}",
            )
        return None

    def _parts(self) -> np.ndarray:
        """The norms after weighting; exact, except for the last bit of float64."""
        finite = np.isfinite(self.norms)
        with np.errstate(over="ignore"):
            return np.where(finite, self.norms, 0) * self.weights

    def _of_indicators(self) -> str | None:
        counts = len(self.rule.count_stddevs(_RECORDS))
        rows = len(self.norms)
        plain = as_double(self.rule.indicators(self._given, self.state))
        if plain.shape != (rows, counts):
            return (
                f"indicators(norms, state) has shape {list(plain.shape)}, and must "
                f"have {[rows, counts]}: one column for each of count_stddevs"
            )
        if not counts:
            return None
        finite = np.isfinite(self.norms)
        # The caller drops a record as a whole.
        none = ~(finite.any(axis=1) if self._shape else finite)
        present = np.arange(rows) % 3 > 0
        masked = as_double(
            self.rule.indicators(self._given, self.state, tf.constant(present))
        )
        for found, absent, whose in (
            (plain, none, "a record of a norm that is not finite"),
            (masked, ~present, "padding"),
        ):
            over = ~(np.abs(found) <= 0.5 * (1 + ROUNDING)).all(axis=1)
            if over.any():
                index = int(np.argmax(over))
                return self._indicated(index, found, "-1/2 to 1/2")
            counted = (found != 0).any(axis=1) & absent
            if counted.any():
                index = int(np.argmax(counted))
                return self._indicated(index, found, f"0 for {whose}")
        return None

    def coupling(self) -> str | None:
        """How a record's weight or indicators move with further records, or None."""
        rows = len(self.norms)
        counted = len(self.rule.count_stddevs(_RECORDS)) > 0
        places = np.linspace(0, rows - 1, _ALONE).astype(int)
        # Half of the records: where the largest norm of all records decides, they have
        # one as large. Vectorised arithmetic differs in the last bit.
        parts = [slice(0, rows // 2), *(slice(i, i + 1) for i in places)]
        for method in ("weights", "indicators") if counted else ("weights",):
            call = getattr(self.rule, method)
            together = as_double(call(self._given, self.state))
            for part in parts:
                alone = as_double(call(self._given[part], self.state))
                wanted = together[part]
                close = np.isclose(
                    wanted, alone, rtol=UNALIGNED, atol=0, equal_nan=True
                )
                if not close.all():
                    index = int(np.argwhere(~close)[0][0])
                    return (
                        f"{method} of a record of norm "
                        f"{self._norm(part.start + index)} go from "
                        f"{shown(alone[index].tolist())} to "
                        f"{shown(wanted[index].tolist())} with the other records, in "
                        f"state {format_state(self.state)}: they may depend on the "
                        "record's own norm and the state alone"
                    )
        return None

    def _norm(self, index: int) -> str:
        return f"{shown(self.norms[index].tolist())} ({self._given.dtype.name})"

    def _about(self, index: int, allowed: str) -> str:
        parts = self._parts()[index]
        return (
            f"a record of norm {self._norm(index)} gets weight "
            f"{shown(self.weights[index].tolist())} in state "
            f"{format_state(self.state)}, and so norm {shown(parts.tolist())} once "
            f"weighted; allowed is {allowed}"
        )

    def _indicated(self, index: int, found: np.ndarray, allowed: str) -> str:
        return (
            f"a record of norm {self._norm(index)} gets indicators "
            f"{shown(found[index].tolist())} in state {format_state(self.state)}; "
            f"allowed is {allowed}"
        )


def _adversarial(around: np.ndarray, groups: int) -> np.ndarray:
    """Norms of records, `[B]`, or of the records' groups, `[B, L]`.

    Args:
      around: norms at which the rule may change, `[N]`, or `[N, L]`.
      groups: L, or 0 for a rule without groups.
    """
    single: Any = np.finfo(np.float32)
    double: Any = np.finfo(np.float64)
    anywhere: list[Any] = [0.0, *np.logspace(-36, 36, 25), *_NOT_FINITE]
    for limits in (single, double):
        least, most = float(limits.tiny), float(limits.max)
        anywhere += [float(limits.smallest_subnormal), least / 2, least, most]
        anywhere += [most / 2, least * (1 + limits.eps)]
    near: list[Any] = [0.5, 0.9, 1.5, 2.0, 10.0, 1e3]
    near += [1 + k * single.eps for k in range(-4, 5)]
    near += [1 + k * double.eps for k in (-2, -1, 1, 2)]
    near += [0.1, 1.1, 3.0, 5.0, 7.0, 30.0, 100.0, 1e5]
    if not groups:
        return np.array([*anywhere, *np.outer(around, near).ravel()])
    # All groups alike; groups rolled against each other; each group around its own
    # clip; and each group alone.
    column = np.array(anywhere)
    together = [np.tile(column[:, np.newaxis], groups)]
    together.append(np.stack([np.roll(column, 5 * h) for h in range(groups)], axis=1))
    clips = np.concatenate([np.outer(near, row) for row in around])
    together.append(clips)
    for h in sorted({*np.linspace(0, groups - 1, min(groups, _ALONE)).astype(int)}):
        alone = np.zeros([len(column) + len(clips), groups])
        alone[:, h] = [*column, *clips[:, h]]
        together.append(alone)
    return np.concatenate(together)
