"""Checks of a rule of the library: a pure function, in every graph and in groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.clipping.rule_trials import (
    ROUNDING,
    UNALIGNED,
    Trial,
    as_double,
    drawn,
    format_state,
    groups_of,
)
from tfdpclip._arguments import shown
from tfdpclip.clipping import ClipRule, LayerwiseClip, PublicNormClip, ScaledClip
from tfdpclip.gradients.graph import ops

# Ops that are stateful because of their bodies, which are checked separately; and
# `Assert`, by which Keras's piecewise schedules check the step.
_HARMLESS = ops.FIRST_ARGUMENT.keys() | {"Assert"}
# Bodies list only the names of their ops.
_OUTSIDE = ops.RANDOM | ops.READS | ops.ITERATORS
_PARTS = ("VarHandle", "VariableOp", "PyFunc", "Rng", "Stateful", "Print")
# XLA rounds smaller numbers to 0.
_ORDINARY = (1e-30, 1e30)
_RECORDS = 100.0
_SIZES = (0, 1)


def _everything(rule: ClipRule) -> Callable[..., tuple[Any, ...]]:
    """Everything that a step computes by a rule, as one function."""
    counts = len(rule.count_stddevs(_RECORDS))

    def compute(norms, present, state):
        indicators = rule.indicators(norms, state, present)
        sums = tf.reshape(tf.reduce_sum(indicators, axis=0), [counts])
        fractions = tf.clip_by_value(tf.cast(sums, tf.float32) / 100 + 0.5, 0, 1)
        return (
            rule.weights(norms, state),
            indicators,
            rule.sensitivity(state),
            rule.noise_scales(state),
            rule.clip_norm(state),
            rule.next_state(state, fractions),
        )

    return compute


def _inputs(rule: ClipRule, state: Any, dtype: Any) -> tuple[tf.Tensor, tf.Tensor]:
    norms = Trial(rule, state, dtype).norms
    return tf.constant(norms, dtype), tf.constant(np.arange(len(norms)) % 3 > 0)


def _specs(rule: ClipRule, state: Any, dtype: Any) -> tuple[Any, Any, Any]:
    groups = groups_of(rule)
    shape = [None, groups] if groups else [None]
    return (
        tf.TensorSpec(shape, dtype),
        tf.TensorSpec([None], tf.bool),
        tf.nest.map_structure(tf.TensorSpec.from_tensor, state),
    )


def check_pure(rule: ClipRule, states: list[Any]) -> None:
    """Raises AssertionError if a rule's results depend on earlier calls."""
    compute = _everything(rule)
    state, other = states[0], states[-1]
    norms, present = _inputs(rule, state, np.float32)
    before = _flat(compute(norms, present, state))
    # Calls with a different size, type and state, twice.
    for _ in range(2):
        compute(norms[:7] * 3, present[:7], other)
        compute(tf.cast(norms, tf.float64), present, other)
    after = _flat(compute(norms, present, state))
    for one, two in zip(before, after, strict=True):
        if not np.array_equal(one, two, equal_nan=True):
            raise AssertionError(
                f"the same norms in the same state, {format_state(state)}, give "
                f"{shown(two.tolist())} after {shown(one.tolist())} at first: a rule "
                "is a pure function"
            )
    concrete = tf.function(compute, autograph=False).get_concrete_function(
        *_specs(rule, state, tf.float32)
    )
    if concrete.captured_inputs:
        raise AssertionError(
            "its graph reads tensors or variables from outside, "
            f"{shown([t.name for t in concrete.graph.internal_captures])}, which a "
            "federated computation cannot contain; make constants in the methods"
        )
    for name, kind in _impure(concrete.graph):
        raise AssertionError(
            f"its graph has the op {name!r}, a {kind}, which draws random numbers, "
            "keeps state or reads more than its inputs"
        )


def _impure(graph: tf.Graph) -> Iterator[tuple[str, str]]:
    """Names and kinds of ops that are not functions of their inputs."""
    for op in graph.get_operations():
        if op.op_def.is_stateful and op.type not in _HARMLESS:
            yield op.name, op.type
    for function in graph.as_graph_def().library.function:
        for node in function.node_def:
            if node.op in ops.FIRST_ARGUMENT:
                continue
            if node.op in _OUTSIDE or any(part in node.op for part in _PARTS):
                yield node.name, node.op


def check_portable(rule: ClipRule, states: list[Any]) -> None:
    """Raises AssertionError if a rule differs between eager code and graphs."""
    compute = _everything(rule)
    for dtype in (np.float32, np.float64):
        specs = _specs(rule, states[0], dtype)
        traced = tf.function(compute, input_signature=specs, autograph=False)
        imported = _Imported(compute, specs)
        for state in (states[0], states[-1]):
            norms, present = _inputs(rule, state, dtype)
            for size in (*_SIZES, len(norms)):
                given = norms[:size], present[:size], state
                wanted = _flat(compute(*given))
                where = f"in a tf.function, for {size} records"
                _compare(wanted, _flat(traced(*given)), where, state)
                where = f"in a graph that was serialised, for {size} records"
                _compare(wanted, imported(*given), where, state)
    compiled = tf.function(compute, jit_compile=True, autograph=False)
    for state in (states[0], states[-1]):
        norms, present = _inputs(rule, state, np.float32)
        found = _flat(compiled(norms, present, state))
        _check_bound(found, norms.numpy(), state)
        sizes: Any = np.abs(norms.numpy())
        plain = (sizes == 0) | ((sizes > _ORDINARY[0]) & (sizes < _ORDINARY[1]))
        rows = plain.all(axis=1) if plain.ndim == 2 else plain
        given = norms[rows], present[rows], state
        wanted, found = _flat(compute(*given)), _flat(compiled(*given))
        _compare(wanted, found, "under XLA", state)


def _check_bound(found: list[np.ndarray], norms: np.ndarray, state: Any) -> None:
    weights, _, sensitivity, *_ = found
    finite = np.isfinite(norms)
    parts = np.where(finite, norms, 0).astype(float) * weights.astype(float)
    good: np.ndarray = np.where(
        finite, parts <= sensitivity * (1 + ROUNDING), weights == 0
    )
    if not good.all():
        index = tuple(np.argwhere(~good)[0])
        raise AssertionError(
            f"a record of norm {norms[index]!r} gets weight {weights[index]!r} under "
            f"XLA, in state {format_state(state)}; the sensitivity is "
            f"{shown(sensitivity.tolist())}"
        )


def _compare(wanted: list, found: list, where: str, state: Any) -> None:
    for one, two in zip(wanted, found, strict=True):
        # Some kernels round subnormal numbers to 0.
        close = one.shape == two.shape and np.allclose(
            one, two, rtol=UNALIGNED, atol=2e-38, equal_nan=True
        )
        if not close:
            raise AssertionError(
                f"{where}, it gives {shown(two.tolist())} and not "
                f"{shown(one.tolist())} as in eager code, in state "
                f"{format_state(state)}"
            )


def _flat(structure: Any) -> list[np.ndarray]:
    return [np.asarray(part) for part in tf.nest.flatten(structure)]


class _Imported:
    """A function as one serialised graph, imported into a new graph and run there."""

    def __init__(self, compute: Callable[..., Any], specs: Any):
        built = tf.Graph()
        with built.as_default():
            given = [
                tf.compat.v1.placeholder(spec.dtype, spec.shape)
                for spec in tf.nest.flatten(specs)
            ]
            results = compute(*tf.nest.pack_sequence_as(specs, given))
            outputs = [tf.identity(part) for part in tf.nest.flatten(results)]
        names = [tensor.name for tensor in (*given, *outputs)]
        self._graph = tf.Graph()
        with self._graph.as_default():
            tensors = tf.graph_util.import_graph_def(
                built.as_graph_def(), return_elements=names, name=""
            )
        self._given, self._outputs = tensors[: len(given)], tensors[len(given) :]

    def __call__(self, *given: Any) -> list[np.ndarray]:
        values = [part.numpy() for part in tf.nest.flatten(given)]
        with tf.compat.v1.Session(graph=self._graph) as session:
            fed = dict(zip(self._given, values, strict=True))
            return [np.asarray(x) for x in session.run(self._outputs, fed)]


def check_groups(
    rule: ClipRule, names: Sequence[str], draw: np.random.Generator
) -> None:
    """Checks a rule without groups inside every rule that takes an inner rule."""
    places: list[ClipRule] = [LayerwiseClip(rule, groups="variable")]
    places.append(LayerwiseClip(rule, groups="variable", allocation="joint"))
    spread = np.geomspace(1e-2, 1e2, len(names)).tolist()
    numbers = dict(zip(names, spread, strict=True))
    places.append(ScaledClip(numbers, rule, groups="variable"))
    if rule.elementwise:
        _check_elementwise(rule, len(names), draw)
        places.append(PublicNormClip(rule, groups="variable", norms=numbers))
    for place in places:
        grouped = place.bind(names)
        state = grouped.initial_state()
        counts = len(grouped.count_stddevs(_RECORDS))
        moved = tf.constant(draw.uniform(size=counts), tf.float32, [counts])
        for there in (state, grouped.next_state(state, moved)):
            for dtype in (np.float32, np.float64):
                trial = Trial(grouped, there, dtype, drawn(grouped, dtype, draw))
                fault = trial.fault()
                if fault is not None:
                    raise AssertionError(f"inside {type(place).__name__}, {fault}")


def _check_elementwise(rule: ClipRule, groups: int, draw: np.random.Generator) -> None:
    """Checks that `[B, L]`, with a clip norm per column, equals separate columns."""
    counts = len(rule.count_stddevs(_RECORDS))
    if counts > 1:
        raise AssertionError(
            f"it has {counts} counts, so it cannot be elementwise: columns of "
            "indicators would be groups or counts"
        )
    norms = tf.constant(10.0 ** draw.uniform(-4, 4, (64, groups)), tf.float32)
    fractions = np.zeros([0]) if not counts else draw.uniform(size=groups)
    alone = [rule.initial_state() for _ in range(groups)]
    spread = tf.nest.map_structure(
        lambda part: tf.repeat(part, groups) if part.dtype.is_floating else part,
        rule.initial_state(),
    )
    for step in range(3):
        if step:
            own = [fractions[h : h + 1] for h in range(groups)]
            alone = [
                rule.next_state(state, tf.constant(part, tf.float32))
                for state, part in zip(alone, own, strict=True)
            ]
            spread = rule.next_state(spread, tf.constant(fractions, tf.float32))
        methods = ["weights", "indicators"] if counts else ["weights"]
        for method in methods:
            call = getattr(rule, method)
            columns = [
                as_double(call(norms[:, h], state)).reshape(-1)
                for h, state in enumerate(alone)
            ]
            together, wanted = as_double(call(norms, spread)), np.stack(columns, axis=1)
            if together.shape != wanted.shape or not np.allclose(
                together, wanted, rtol=UNALIGNED, atol=0
            ):
                raise AssertionError(
                    f"it says that it is elementwise, but {method} of {groups} groups "
                    "together differs from separate groups, in state "
                    f"{format_state(spread)}"
                )
        for method in ("sensitivity", "clip_norm"):
            wanted = [float(getattr(rule, method)(state)) for state in alone]
            found = np.broadcast_to(as_double(getattr(rule, method)(spread)), groups)
            if not np.allclose(found, wanted, rtol=ROUNDING, atol=0):
                raise AssertionError(
                    f"it says that it is elementwise, but {method} of {groups} groups "
                    f"together is {shown(found.tolist())}, and {shown(wanted)} for "
                    "separate groups"
                )
