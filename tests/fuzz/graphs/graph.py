"""One random graph: built, judged by the proof, and by brute force."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import tensorflow as tf

from tests.fuzz.graphs import other_steps, sparse_start  # noqa: F401  more steps
from tests.fuzz.graphs.array_steps import STEPS
from tests.fuzz.graphs.truth import first_batch, moves
from tests.fuzz.graphs.values import ROWS, Drawer, SkipStep, Value, fixed
from tfdpclip.gradients.engine import PerExampleGradients
from tfdpclip.gradients.errors import ExampleIsolationError, LossStructureError
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.inlining import inline_calls
from tfdpclip.gradients.loss.loss_parts import take_apart
from tfdpclip.gradients.proof.isolation_proof import prove

# The fuzzer measures each op's own arithmetic, so rewrites of the graph are off; a
# graph then also takes a third of the time.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

_WEIGHTS = 97
#: The possible shapes of a row of a record.
_ROW_SHAPES = ([6], [4], [3, 4], [2, 3, 2], [4, 2], [12], [4, 4, 1])


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdicts on a graph: the proof's and brute force's.

    Attributes:
      verdict: "proven", "mixed", "unknown" or "refused"; "impossible" for no graph.
      moves: how an example moves another example's loss or gradient; None if brute
        force found no effect.
      gap: the type of the first op that prevents a proof.
      detail: the steps, and the text of the verdict.
    """

    verdict: str
    moves: str | None = None
    gap: str = ""
    detail: str = ""

    @property
    def unsound(self) -> bool:
        return self.verdict == "proven" and self.moves is not None


@dataclasses.dataclass
class _Graph:
    """A traced loss, and the proof's verdict on it."""

    function: object = None
    verdict: str = "impossible"
    gap: str = ""
    said: str = ""


def _body(draw: Drawer, x: Value, y: Value, only: tuple[str, ...]) -> Value:
    draw.pool += [x, y]
    names = list(STEPS)
    weights = [STEPS[name][1] * (not only or name in only) for name in names]
    value = x
    depth = draw.random.randint(2, 8)
    tries = 0
    while depth and tries < 40:
        tries += 1
        name = "dense" if tries == 1 else draw.random.choices(names, weights)[0]
        draw.names.append(name)
        try:
            new = STEPS[name][0](draw, value)
        except (SkipStep, ValueError, TypeError, IndexError, tf.errors.OpError):
            draw.names.pop()
            continue
        if new.rank > 6:
            draw.names.pop()
            continue
        depth -= 1
        value = new
        draw.pool.append(value)
    return value


def _losses(draw: Drawer, value: Value, x: Value, y: Value) -> tf.Tensor:
    """A loss of some form: `[rows]` first."""
    axes = [i for i, d in enumerate(value.dims) if d == ROWS] or [
        i for i, d in enumerate(value.dims) if not d.fixed
    ]
    found = value.tensor
    if not axes:
        found = tf.reduce_sum(found) * tf.ones_like(y.tensor)
    else:
        axis = draw.pick(axes)
        length = value.dims[axis]
        order = [axis, *(i for i in range(value.rank) if i != axis)]
        found = tf.transpose(found, order) if axis else found
        if length != ROWS and not length.more:
            rest = [d.more if d.fixed else -1 for d in value.dims]
            rest = [rest[i] for i in order[1:]]
            if -1 in rest:
                found = tf.reduce_sum(found, list(range(1, value.rank)))
                rest = []
            found = tf.reshape(found, [-1, length.per_row, *rest])
        elif length != ROWS:
            found = found[: tf.shape(y.tensor)[0]]
        if found.shape.rank > 1:
            found = tf.reduce_mean(found, list(range(1, found.shape.rank)))
    form = draw.pick(["plain", "plain", "label", "labels"])
    if form == "label":
        found = tf.square(found - y.tensor)
    elif form == "labels" and draw.chance(0.15):
        found = tf.reduce_mean(tf.square(found[:, tf.newaxis] - y.tensor), 1)
    form = draw.pick(["vector", "vector", "mean", "sum", "divided", "penalty"])
    draw.names.append(form)
    if form == "mean":
        return tf.reduce_mean(found)
    if form == "sum":
        return tf.reduce_sum(found)
    if form == "divided":
        return tf.reduce_sum(found) / tf.cast(tf.size(found), tf.float32)
    if form == "penalty":
        return tf.reduce_mean(found) + 0.1 * tf.nn.l2_loss(draw.weights)
    return found


def build(
    seed: str, only: tuple[str, ...] = (), within: float = 0.9, alone: bool = False
) -> tuple[_Graph, list[list[int]], int | None, int, list[str]]:
    """Traces the graph of a seed.

    Returns:
      The graph, the shapes of a record, the static number of examples, how many rows
      each has, and the names of the steps.
    """
    rng = random.Random(seed)
    each = 2 if rng.random() < 0.12 else 1
    examples = rng.choice([None, None, 4, 5])
    shape = rng.choice(_ROW_SHAPES)
    sparse = rng.random() < 0.06
    weights = tf.Variable(
        np.random.default_rng(abs(hash_of(seed))).normal(size=_WEIGHTS) * 0.6,
        dtype=tf.float32,
    )
    rows = None if examples is None else examples * each
    graph = _Graph()
    names: list[str] = []
    shape = [sparse_start.WIDTH] if sparse else shape

    def trace(x, y, weight):
        draw = Drawer(seed, rows, weights)
        draw.names, draw.within = names, within
        labels = Value(y, (ROWS,))
        if sparse:
            data = sparse_start.start(draw, x)
        else:
            data = Value(x, (ROWS, *map(fixed, shape)))
        value = _body(draw, data, labels, only)
        loss = _losses(draw, value, data, labels)
        losses = _judge(graph, loss, weights, each)
        if alone:
            return _gradients_alone(graph, loss, weights, weight, each)
        (gradient,) = tf.gradients(losses, [weights], weight)
        if gradient is None:
            raise SkipStep
        return losses, tf.convert_to_tensor(gradient)

    data = tf.TensorSpec([rows, *shape], tf.float32)
    if sparse:
        data = tf.SparseTensorSpec([rows, *shape], tf.float32)
    function = tf.function(
        trace,
        input_signature=[
            data,
            tf.TensorSpec([rows], tf.float32),
            tf.TensorSpec([examples], tf.float32),
        ],
        autograph=False,
    )
    try:
        graph.function = function.get_concrete_function()
    except (SkipStep, ValueError, TypeError, LookupError, NotImplementedError) as error:
        if graph.verdict in ("proven", "unknown", "mixed"):
            graph.said = f"no gradient: {error}"
        graph.function = None
    if graph.function is not None and sparse:
        graph.function = sparse_start.of_dense(graph.function)
    return graph, [[each, *shape], [each]], examples, each, names


def _gradients_alone(graph: _Graph, loss, weights, weight, each):
    """The engine's norms, `[B]`, and weighted sum, if the proof does not know an op."""
    if graph.verdict != "unknown":
        raise SkipStep
    engine = PerExampleGradients(
        loss,
        [weights],
        nominal_batch_size=8.0,
        check_gradients="never",
        rows_per_record=each,
    )
    return engine.norms, engine.weighted_sum(weight)[0]


def hash_of(seed: str) -> int:
    return int.from_bytes(seed.encode()[-4:], "little") % 2**31


def _judge(graph: _Graph, loss, weights, each) -> tf.Tensor:
    """Asks for the proof's verdict as the engine does; returns the losses, `[B]`."""
    loss = inline_calls(loss)
    handles = [loss.graph.capture(weights.handle)]
    try:
        flows = Dataflow([loss], handles, rows_per_example=each)
        if not flows[loss].trained:
            raise SkipStep
        parts = take_apart(loss, flows, nominal_batch_size=8.0)
        losses = parts.per_example
        flows = Dataflow([losses], handles, flows.batch_size, (), each)
        proof = prove(losses, flows)
    except (ExampleIsolationError, LossStructureError) as error:
        graph.verdict, graph.said = "refused", str(error)[:150]
        if each == 1 and loss.shape.rank == 1:
            return loss
        return tf.reduce_mean(tf.reshape(loss, [-1, each]), 1)
    graph.verdict, graph.said = proof.verdict.value, str(proof)
    graph.gap = "" if proof.op is None else proof.op.type
    return losses


def judge(
    seed: str,
    only: tuple[str, ...] = (),
    within: float = 0.9,
    examples: int = 5,
    alone: bool = False,
) -> Judgement:
    """Judges the graph of a seed.

    Args:
      seed: draws the graph, and the numbers.
      only: the names of the steps that may be drawn; all of them if empty.
      within: how often an axis is drawn that counts no rows.
      examples: how many the first batch has, if that is not static.
      alone: judges, in the place of the loss, the gradients that the engine makes one
        example at a time; "impossible" if the proof does not end at an unknown op.
    """
    graph, shapes, static, _, names = build(seed, only, within, alone)
    said = f"{' > '.join(names)}: {graph.said}"
    if graph.function is None:
        return Judgement("impossible", None, "", said)
    rng = np.random.default_rng(hash_of(seed))
    batch = first_batch(rng, static or examples, shapes)
    try:
        found = moves(graph.function, batch, rng, static is None)
    except (tf.errors.OpError, ValueError) as error:
        return Judgement("impossible", None, "", f"{said}: {error}"[:600])
    return Judgement(graph.verdict, found, graph.gap, said)
