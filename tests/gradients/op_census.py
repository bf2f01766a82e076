"""Which ops occur in models, which the table of ops must know, and the trials of each.

The models are those of tests/proof_coverage, tests/keras_io and tests/zoo.

    python -m tests.gradients.op_census                  # all models; an hour
    python -m tests.gradients.op_census proof core       # words in names of models
    python -m tests.gradients.op_census --tried          # the columns of the trials

The results are in docs/results/ops.csv. A stack writes its own column, and leaves the
second stack's column as it is.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import tensorflow as tf

import tfdpclip as dpc
from tests import stack
from tests.gradients import lemma_trials
from tests.keras_io import check as keras_io_check
from tests.keras_io.examples import GROUPS as KERAS_IO
from tests.proof_coverage import check as proof_check
from tests.proof_coverage import networks
from tests.proof_coverage.entries import GROUPS, NEEDS_HUB, here
from tests.zoo import check as zoo_check
from tests.zoo import entries as zoo_entries
from tfdpclip._variables import all_unwrapped
from tfdpclip.gradients.flows import dataflow, lists, op_flows, sparse
from tfdpclip.gradients.flows.flow import DATA
from tfdpclip.gradients.graph import ops

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "results" / "ops.csv"
COLUMNS = ("op", "forms", "attributes", "Keras 2", "Keras 3", "trials", "gradients")
COLUMN = "Keras 3" if stack.KERAS_3 else "Keras 2"
#: How many random uses of an op are tried.
TRIALS = 60

#: Types of the table that no model's loss contains, by the reason.
BESIDES = {
    **dict.fromkeys(
        """EluGrad LeakyReluGrad Relu6Grad SeluGrad SoftplusGrad SoftsignGrad SqrtGrad
        TanhGrad ReciprocalGrad""".split(),
        "gradients of activations, in losses with a penalty of gradients",
    ),
    **dict.fromkeys(
        """SegmentSum SparseSegmentSum SparseSegmentSqrtN SparseReorder""".split(),
        "sparse inputs of Keras and bags of ids: tests/gradients/sparse_test.py",
    ),
    **dict.fromkeys(
        [*ops.LEARNING_SAMPLERS, "ComputeAccidentalHits"],
        "losses of sampled classes: docs/pitfalls.md",
    ),
    **dict.fromkeys(
        (
            "DynamicPartition ListDiff UniqueV2 UniqueWithCounts UniqueWithCountsV2"
        ).split(),
        "nothing is claimed: their length depends on the whole batch",
    ),
    "RandomShuffle": "nothing is claimed: the order of the batch",
    **dict.fromkeys(
        ("TensorListPushBack", "TensorListPopBack"), "loops that were differentiated"
    ),
    "BatchMatMulV3": "products of integers in models in int8",
    "ArgMax": "ArgMin has the same kernel",
    "CTCLossV2": "CTCLoss, for GPUs alone",
}
_DULL = frozenset(
    """T T1 T2 Tidx Tindices Tparams Taxis Tdim Tshape Tlen Tmultiples Tpaddings Tperm
    Tblock_shape Tcrops dtype type SrcT DstT out_type output_type container shared_name
    N f U body cond element_dtype Tin Tout value dtypes output_shapes seed seed2 config
    config_proto executor_type parallel_iterations output_shape Targmax Tsegmentids
    Tnumsegments Tsplits Index TI Ta Tb Treal Tcomplex Tk Tshift index_type shape
    element_shape shape_type epsilon exponential_avg_factor alpha pattern rewrite key
    num_split num boundaries num_buckets Truncate validate_indices _class then_branch
    else_branch branches num_original_outputs power2 bad_indices_policy""".split()
)


def table() -> set[str]:
    """All types that the analysis knows."""
    flows = {*op_flows._TABLE, *op_flows._BY_VALUES, *lists._RULES, *sparse._RULES}
    return flows | (ops.GRADIENTS_APART - {"Fill", "IdentityN"})


# The ops that occur.


class Census:
    """The ops that the analysis met: by type, models, forms of batches, attributes."""

    def __init__(self):
        self.models: dict[str, set[str]] = {}
        self.forms: dict[str, set[str]] = {}
        self.attributes: dict[str, set[str]] = {}
        self.model = ""

    def note(self, op: tf.Operation, flows: list) -> None:
        """Notes an op with the flows of its inputs."""
        if any(f is None for f in flows):
            return
        self.models.setdefault(op.type, set()).add(self.model)
        for tensor, flow in zip(op.inputs, flows, strict=True):
            if flow.kind == DATA:
                self.forms.setdefault(op.type, set()).add(_form(tensor, flow))
        for name in op.node_def.attr:
            if name not in _DULL and not name.startswith("_"):
                kept = self.attributes.setdefault(op.type, set())
                with contextlib.suppress(ValueError):
                    kept.add(f"{name}={op.get_attr(name)}".replace("b'", "'"))


def _form(tensor: tf.Tensor, flow) -> str:
    if flow.entry is not None:
        return "entries"
    if flow.axes is None:
        return "unknown"
    rank, axes = tensor.shape.rank, "".join(map(str, flow.axes)) or "-"
    rows = "repeated" if flow.minor else "rows" if (flow.rows or 1) > 1 else ""
    return f"{axes} of {rank} {rows}".strip()


@contextlib.contextmanager
def counting() -> Iterator[Census]:
    """Notes all ops that the analysis of losses visits."""
    visit, census = dataflow.Dataflow._visit, Census()

    def _visit(self, op):
        visit(self, op)
        census.note(op, [self._flows.get(t.ref()) for t in op.inputs])

    with mock.patch.object(dataflow.Dataflow, "_visit", _visit):
        yield census


def models(words: list[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """The models with any of the words in the name, and functions that analyse them."""
    for name, run in _all_models():
        if not words or any(word in name for word in words):
            yield name, run


def _all_models() -> Iterator[tuple[str, Callable[[], object]]]:
    for group, entries in GROUPS.items():
        for name, entry in entries.items():
            if here(entry) and (networks.HUB or group != NEEDS_HUB):
                sizes = (None,) if group in networks.GROUPS else proof_check.SIZES
                run = functools.partial(proof_check.examine, entry, sizes)
                yield f"proof: {group}, {name}", run
    for examples in KERAS_IO.values():
        for name, example in examples.items():
            yield (
                f"keras_io: {name}",
                functools.partial(keras_io_check.outcome, example, 1),
            )
    for name, entry in zoo_entries.ENTRIES.items():
        for rank in (None, 4) if entry.lora != "none" else (None,):
            if stack.KERAS_3 and zoo_entries.HUB:
                run = functools.partial(_trace, entry, rank)
                yield f"zoo: {name}{' LoRA' * bool(rank)}", run


def _trace(entry: zoo_entries.Entry, lora: int | None) -> None:
    """Traces the norms of a model of the zoo; runs nothing."""
    tf.keras.utils.set_random_seed(1)
    model = entry.build()
    if lora:
        model.backbone.enable_lora(lora, entry.targets)
    x, y = entry.data()
    loss = zoo_check.loss_function(reduction="none")
    variables = all_unwrapped(model.trainable_variables)

    def losses(x, y):
        found = loss(y, tf.cast(model(x, training=True), tf.float32))
        return tf.reduce_mean(tf.reshape(found, [tf.shape(found)[0], -1]), 1)

    specs = tf.nest.map_structure(
        lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), (x, y)
    )
    tf.function(
        lambda x, y: dpc.gradients.per_example_norms(losses(x, y), variables),
        specs,
        autograph=False,
    ).get_concrete_function()


# The page.


def rows() -> dict[str, dict[str, str]]:
    """The lines of docs/results/ops.csv, by op."""
    if not PAGE.exists():
        return {}
    with open(PAGE, newline="") as file:
        return {row["op"]: row for row in csv.DictReader(file)}


def write(found: dict[str, dict[str, str]]) -> None:
    """Writes the lines of the types in the table."""
    with open(PAGE, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(found[op] for op in sorted(table()) if op in found)


def _joined(old: str, new: set[str], limit: int = 12) -> str:
    both = sorted({*old.split("; "), *new} - {"", "..."})
    return "; ".join(both[:limit] + ["..."] * (len(both) > limit))


def update(census: Census) -> None:
    """Writes the census into the column of this stack."""
    found = rows()
    for op in table():
        row = found.setdefault(op, {"op": op})
        names = census.models.get(op, set())
        if names:
            row[COLUMN] = f"{len(names)}: {min(names)}"
            row["forms"] = _joined(row.get("forms", ""), census.forms.get(op, set()))
            attributes = census.attributes.get(op, set())
            row["attributes"] = _joined(row.get("attributes", ""), attributes)
    write(found)


def update_trials() -> None:
    """Writes how many trials had a claim, and how many gradients were tried."""
    found = rows()
    for op in sorted(table()):
        row = found.setdefault(op, {"op": op})
        with_claim, _, gradients = lemma_trials.tried(op, TRIALS)
        row["trials"], row["gradients"] = str(with_claim), str(gradients)
        print(op, with_claim, gradients, flush=True)
        write(found)


def main(words: list[str]) -> None:
    """Analyses the models with any of the words in the name, or all."""
    if words == ["--tried"]:
        return update_trials()
    with counting() as census:
        for name, run in models(words):
            census.model = name
            print(name, flush=True)
            try:
                run()
            except Exception as error:  # noqa: BLE001  The rest is analysed.
                print(f"{name}: {type(error).__name__}: {error}"[:500], flush=True)
    return update(census)


if __name__ == "__main__":
    main(sys.argv[1:])
