"""The proof's verdict on an entry."""

from __future__ import annotations

import dataclasses
import re

import tensorflow as tf

from tests.proof_coverage.entry import Entry
from tfdpclip._variables import all_unwrapped
from tfdpclip.gradients.errors import ExampleIsolationError, LossStructureError
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.inlining import inline_calls
from tfdpclip.gradients.loss.loss_parts import take_apart
from tfdpclip.gradients.proof import isolation_proof

#: Batches of any size, and of a static size.
SIZES = (None, 11)
PROVEN, UNKNOWN, MIXED, REFUSED = "proven", "unknown", "mixed", "refused"


@dataclasses.dataclass(frozen=True)
class Found:
    """The proof's verdict.

    Attributes:
      verdict: PROVEN, UNKNOWN, MIXED, or REFUSED where the loss cannot be taken apart.
      at: the types of the ops that hinder the proof.
      said: the names of the ops, and the reasons; or the error.
    """

    verdict: str
    at: tuple[str, ...] = ()
    said: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {', '.join(self.at)}" if self.at else self.verdict


def examine(entry: Entry, sizes: tuple[int | None, ...] = (None,)) -> list[Found]:
    """Builds the model of an entry, and proves its loss as far as possible.

    Args:
      entry: the model and its loss.
      sizes: static numbers of examples; None: any number.

    Returns:
      A verdict for each of the sizes.
    """
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(0)
    model = entry.build()
    found: list[Found] = []

    def trace(inputs, labels):
        predictions = model(inputs, training=True)
        loss = entry.loss(labels, predictions)
        own = [tf.cast(term, loss.dtype) for term in getattr(model, "losses", ())]
        loss = inline_calls(tf.convert_to_tensor(tf.add_n([loss, *own])))
        found.append(_verdict(loss, all_unwrapped(model.trainable_variables)))
        return loss

    for size in sizes:
        specs = tf.nest.map_structure(
            lambda of, size=size: of.batch(size), (entry.inputs, entry.labels)
        )
        tf.function(trace).get_concrete_function(*specs)
    return found


@tf.autograph.experimental.do_not_convert
def _verdict(loss: tf.Tensor, variables) -> Found:
    handles = [loss.graph.capture(variable.handle) for variable in variables]
    flows = Dataflow([loss], handles)
    try:
        parts = take_apart(loss, flows, 64.0)
    except (ExampleIsolationError, LossStructureError) as error:
        mixed = isinstance(error, ExampleIsolationError)
        return Found(MIXED if mixed else REFUSED, _named(error), str(error))
    flows = Dataflow([parts.per_example], handles, flows.batch_size)
    proven = isolation_proof.prove(parts.per_example, flows)
    gaps = isolation_proof.gaps(parts.per_example, flows)
    said = "; ".join(f"{op.name} ({op.type}): {reason}" for op, reason in gaps)
    if proven.verdict is isolation_proof.Verdict.PROVEN:
        return Found(PROVEN)
    if proven.verdict is isolation_proof.Verdict.MIXED:
        return Found(MIXED, (proven.op.type,), str(proven))
    types = dict.fromkeys(op.type for op, _ in gaps)
    return Found(UNKNOWN, tuple(types)[:1], said)


def _named(error: Exception) -> tuple[str, ...]:
    """The type of the op that an error names, in "'name' (a Type)"."""
    found = re.search(r"\(an? (\w+)\)", str(error))
    return (found.group(1),) if found else ()
