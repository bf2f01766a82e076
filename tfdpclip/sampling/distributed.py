"""Draws for the replicas of a strategy, on one machine or on several."""

from __future__ import annotations

import hashlib
import math
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments
from tfdpclip._docs import see
from tfdpclip.sampling import handed_out
from tfdpclip.sampling.allocation import RandomAllocation
from tfdpclip.sampling.capacity import fit_capacity
from tfdpclip.sampling.drawer import Drawer
from tfdpclip.sampling.elements import drawn_elements
from tfdpclip.sampling.poisson import FullBatch, Poisson
from tfdpclip.sampling.separated import CyclicPoisson, MinSeparation
from tfdpclip.sampling.sources import Source

STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)
# Schemes with a fixed order, which one iterator must read in a row.
_IN_A_ROW = (MinSeparation, CyclicPoisson, RandomAllocation)
_PARTS = (
    "each of {shards} machines drew from its own part of the records, independently "
    "of all further machines; every machine was given the same records in the same "
    "order; records per step are of one part"
)


class Part(Source):
    """Every W-th record of a source: the part of one machine of W."""

    def __init__(self, whole: Source, shard: int, shards: int):
        self._whole = whole
        self._shard = shard
        self._shards = shards
        self.size = len(range(shard, whole.size, shards))
        self.row_spec = whole.row_spec
        self.threads = whole.threads

    def fingerprint(self) -> int:
        """A number that identifies the records and their order.

        A hash of the number of records, and of the first, the middle and the last
        record: machines with the same records in the same order agree on the number.
        """
        size = self._whole.size
        places = np.array([0, size // 2, size - 1])
        columns = tf.nest.flatten(self._whole.take(places, 3))
        text = repr([size, [np.asarray(column).tolist() for column in columns]])
        # 48 bits, which a float64 holds exactly.
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    def take(self, indices, rows):
        places = np.asarray(indices) * self._shards + self._shard
        return self._whole.take(places, rows)


def distribute(batches: Any, strategy: tf.distribute.Strategy) -> Any:
    """See `Batches.distribute`."""
    if type(strategy) not in STRATEGIES:
        raise ValueError(
            "strategy must be a tf.distribute.MirroredStrategy, OneDeviceStrategy or "
            f"MultiWorkerMirroredStrategy, got {_arguments.shown(strategy)}."
            + see("several-replicas")
        )

    ordered = not batches.scheme.independent_steps
    if ordered and not isinstance(batches.scheme, _IN_A_ROW):
        raise ValueError(
            f"{batches.scheme.describe()}: a strategy gathers elements ahead, and "
            "elements that are gathered but not used would be missing from their "
            "epoch. Use sampling.Poisson(rate), or MinSeparation(population, "
            "batch_size)." + see("several-replicas")
        )
    if ordered and batches._cut is not None:
        raise ValueError(
            "take: a strategy gathers elements ahead, even beyond the end of take(), "
            "and a fixed order must not skip any. Give fit steps_per_epoch and epochs "
            "instead." + see("several-replicas")
        )
    if batches._cut:
        raise ValueError(
            "take: an iteration of these batches ends in the middle of a step, and "
            "the next iteration begins a new draw: a step would mix two draws. "
            f"Take a multiple of accumulation_steps={batches.accumulation_steps}."
            + see("several-replicas")
        )

    def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
        shards = context.num_input_pipelines
        replicas = context.num_replicas_in_sync // shards
        drawer = batches._drawer
        if shards > 1:
            drawer = _drawer_of_part(batches, context.input_pipeline_id, shards)
        # TensorFlow fetches elements ahead, so every iterator begins a new step.
        drawer.runs_ahead = True
        said = (_PARTS.format(shards=shards),) if shards > 1 else ()
        # With one row, a mean loss equals a sum, and the scale would stay unknown.
        least = 2 if context.num_replicas_in_sync > 1 else 1
        dealt = _dealt(batches, drawer, replicas, least)
        derived = batches._derived(lambda data: dealt, *said)
        derived._drawer, derived._replicas = drawer, context.num_replicas_in_sync
        dealt_to = drawer.dealt.setdefault(context.num_replicas_in_sync, [])
        dealt_to.append(derived.element_spec)
        known.append(weakref.ref(drawer))
        return derived

    known: list[weakref.ref[Drawer]] = []
    given = strategy.distribute_datasets_from_function(share)
    return handed_out.remember_dealt(given, strategy, known)


def _drawer_of_part(batches: Any, shard: int, shards: int) -> Drawer:
    before = batches._drawer
    if not isinstance(before.scheme, (Poisson, FullBatch, RandomAllocation)):
        raise ValueError(
            f"{before.scheme.describe()}: several machines would have to draw "
            "together. Use sampling.Poisson(rate) or FullBatch(), which draw from each "
            "machine's part of the records independently; or the devices of one "
            "machine, MirroredStrategy." + see("several-replicas")
        )
    if before.by_group:
        raise ValueError(
            "independent_groups is for clipping per group, which one device does."
        )
    if before.rows_per_record > 1 or before.draws_people:
        raise ValueError(
            "Views, and examples of people, are for the devices of one machine, "
            "MirroredStrategy." + see("several-replicas")
        )
    if not before.source.by_index:
        raise ValueError(
            "A Stream is read by one machine: MirroredStrategy. For several machines, "
            "give each machine access by index, see docs/data.md."
        )
    if before.source.size < shards:
        raise ValueError(
            f"{before.source.size} records are fewer than the {shards} machines."
        )
    if before.successor is not None:
        raise ValueError(
            "These batches were distributed before. Make new batches with "
            "scheme.batches(data), which have new draws."
        )
    source = Part(before.source, shard, shards)
    scheme, rows = batches._asked
    # Room for the largest part, since rows are public and equal on every machine.
    scheme, rows = fit_capacity(
        _of_part(scheme, shards),
        math.ceil(before.source.size / shards),
        None if rows is None else math.ceil(rows / shards),
        before.pieces,
        False,
    )
    drawer = Drawer(
        scheme,
        source,
        rows,
        before.pieces,
        before.seed,
        initial_step=before.position // before.pieces,
        population=before.population,
        shard=shard,
    )
    before.hand_over(drawer)
    return drawer


def _of_part(scheme: Any, shards: int) -> Any:
    if getattr(scheme, "capacity", None) is None:
        return scheme
    capacity = math.ceil(scheme.capacity / shards)
    return scheme._with_room(capacity, math.ceil(scheme.population / shards))


def _dealt(batches: Any, drawer: Drawer, replicas: int, least: int) -> tf.data.Dataset:
    """The elements for each replica of a machine, in turn, without end."""
    # A fixed order is read by a single iterator: see `Drawer`.
    independent = drawer.scheme.independent_steps
    dataset = drawn_elements(drawer, batches._steps if independent else None)
    for change in batches._recipe:
        dataset = change(dataset)
    rows, each = max(least, math.ceil(drawer.rows / replicas)), drawer.rows_per_record

    def deal(*element):
        return tf.nest.map_structure(split, element)

    def split(tensor):
        # Record i goes to replica i modulo `replicas`: drawn records come first.
        missing = (rows * replicas - drawer.rows) * each
        padding = [[0, missing], *[[0, 0]] * (tensor.shape.rank - 1)]
        padded = tf.pad(tensor, padding) if missing else tensor
        parts = tf.reshape(padded, [rows, replicas, each, *tensor.shape[1:]])
        parts = tf.transpose(parts, [1, 0, *range(2, parts.shape.rank)])
        return tf.reshape(parts, [replicas, rows * each, *tensor.shape[1:]])

    deal = tf.autograph.experimental.do_not_convert(deal)
    dealt = tf.data.Dataset.map(dataset, deal).unbatch()
    return dealt.repeat() if independent else dealt
