"""Tries every op of TensorFlow along and across the examples, and tables the results.

`python -m tests.gradients.op_table` applies each op of `tf.raw_ops` that takes floating
numbers to the activations of a small model, along the examples and across them: in the
loss, in a factor on the gradient alone, and in a mask. It measures by brute force
whether replacing an example moves the gradients of the other examples, and records the
verdict of a training step. The tables are written to docs/results/ops_and_isolation.md
and .csv.

Some ops end the process that calls them with odd arguments: each chunk of ops has its
own process, and continues after the op that ended a process.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import inspect
import itertools
import json
import os
import subprocess
import sys
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from tests.gradients import op_table_page
from tfdpclip import _tf_private
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import clipped_sum
from tfdpclip.gradients.errors import ExampleIsolationError, LossStructureError
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.proof.single_examples import OneByOneWarning

B, D = 6, 3
USES = op_table_page.USES
# An example has an effect if it moves another example's gradient by at least this,
# relative to the largest gradient.
_EFFECT = 1e-4
_OURS = ("ExampleIsolationError", "GradientMismatchError", "LossStructureError")
_CHUNK, _SECONDS = 8, 400
# Ops that are no functions of their inputs, and ops that models do not use.
_SKIPPED = ("Dataset", "Iterator", "Collective", "Nccl", "Xla", "TPU", "Tpu", "Summary")
_SKIPPED += ("TensorList", "TensorArray", "Stage", "Queue", "Barrier", "Ragged", "Map")
_SKIPPED += ("Debug", "Print", "PyFunc", "Encode", "Decode", "Save", "Restore")
_SKIPPED += ("Send", "Recv", "Sparse", "Switch", "Merge", "Enter", "Exit")
_SKIPPED += ("NextIteration", "Quantized", "OneHotDataset", "Mkl", "Cudnn", "Boosted")
_SKIPPED += ("Apply", "Assign", "Scatter", "BatchFFT", "BatchIFFT", "BatchMatrix")
_SKIPPED += ("Grad", "Backprop", "Fused", "LSTM", "GRU", "DrawBounding", "Assert")

# The batch, in the shapes that ops take, by example on axis 0, and across.
FORMS = {
    "rows": (0, lambda f: f),
    "columns": (1, lambda f: tf.transpose(f)),
    "vector": (0, lambda f: tf.reduce_sum(f, 1)),
    "matrices": (0, lambda f: f[:, :, None] + 4 * tf.eye(D)),
    "matrix rows": (1, lambda f: tf.stack([f, 2 * f + 1], 0)),
    "images": (0, lambda f: f[:, None, :, None] + tf.ones([1, D, 1, D])),
    "image rows": (1, lambda f: f[None, :, :, None] + tf.ones([1, 1, 1, D])),
    "volumes": (0, lambda f: f[:, None, None, :, None] + tf.ones([1, 2, 2, 1, D])),
    "volume rows": (1, lambda f: f[None, :, None, :, None] + tf.ones([1, 1, 2, 1, D])),
}
_KERNELS = {
    "Conv2D": np.linspace(-1, 1, 3 * 3 * D * 2).reshape([3, 3, D, 2]),
    "DepthwiseConv2dNative": np.linspace(-1, 1, 3 * 3 * D).reshape([3, 3, D, 1]),
    "Dilation2D": np.linspace(-1, 1, 3 * 3 * D).reshape([3, 3, D]),
    "Conv3D": np.linspace(-1, 1, 2 * 2 * 2 * D).reshape([2, 2, 2, D, 1]),
}
_IMAGES = {"strides": [1, 1, 1, 1], "padding": "SAME"}
_VOLUMES = {"strides": [1, 1, 1, 1, 1], "padding": "SAME"}
#: Attributes without a default, by op.
ATTRIBUTES = {
    **dict.fromkeys(("Conv2D", "DepthwiseConv2dNative"), _IMAGES),
    "Conv3D": _VOLUMES,
    "Dilation2D": {**_IMAGES, "rates": [1, 1, 1, 1]},
    **dict.fromkeys(("AvgPool", "MaxPool"), {**_IMAGES, "ksize": [1, 2, 2, 1]}),
    "MaxPoolWithArgmax": {**_IMAGES, "ksize": [1, 2, 2, 1]},
    **dict.fromkeys(("AvgPool3D", "MaxPool3D"), {**_VOLUMES, "ksize": [1, 2, 2, 2, 1]}),
    "MaxPoolV2": {"padding": "SAME"},
    "ExtractImagePatches": {
        "ksizes": [1, 2, 2, 1],
        "strides": [1, 1, 1, 1],
        "rates": [1, 1, 1, 1],
        "padding": "SAME",
    },
    "FractionalAvgPool": {"pooling_ratio": [1.0, 1.4, 1.4, 1.0]},
    "FractionalMaxPool": {"pooling_ratio": [1.0, 1.4, 1.4, 1.0]},
    "Bucketize": {"boundaries": [0.1, 0.5]},
    "Cast": {"DstT": tf.float32},
    "Bitcast": {"type": tf.int32},
    "Einsum": {"equation": "ab->ab"},
    "TopK": {"k": 2},
    "DepthToSpace": {"block_size": 1},
    "SpaceToDepth": {"block_size": 1},
    "Split": {"num_split": 3},
    "SplitV": {"num_split": 2},
    "Unpack": {"num": 3},
    "ApproxTopK": {"k": 2},
    "QuantizeV2": {"T": tf.quint8},
    "EnsureShape": {"shape": [None, D]},
    "PlaceholderWithDefault": {"shape": [None, D]},
}


def names() -> list[str]:
    """The ops whose first input may be of float32."""
    found = []
    for name in sorted(dir(tf.raw_ops)):
        definition = _tf_private.definition_of(name) if name[0].isupper() else None
        skipped = any(word in name for word in _SKIPPED)
        if definition is None or (skipped and "TensorScatter" not in name):
            continue
        if name in ops.RANDOM or definition.is_stateful or not definition.output_arg:
            continue
        if definition.input_arg and _takes_floats(definition, definition.input_arg[0]):
            found.append(name)
    return found


def _takes_floats(definition, argument) -> bool:
    if argument.type:
        return argument.type in (tf.float32.as_datatype_enum, 8)
    for attribute in definition.attr:
        if attribute.name == argument.type_attr:
            allowed = attribute.allowed_values.list.type
            return not allowed or tf.float32.as_datatype_enum in allowed or 8 in allowed
    return False


def _wants(definition, argument) -> tf.DType | None:
    """The type that an argument beside the data must have; None for the data's type."""
    if argument.type:
        return tf.as_dtype(argument.type)
    if argument.type_attr == definition.input_arg[0].type_attr:
        return None
    for attribute in definition.attr:
        if attribute.name == argument.type_attr and attribute.allowed_values.list.type:
            return tf.as_dtype(attribute.allowed_values.list.type[0])
    return tf.int32


def _candidates(name, definition, argument):
    """Values to try for an argument: functions of the data in their form."""
    if name in _KERNELS and argument.name in ("filter", "input"):
        return [lambda f: tf.constant(_KERNELS[name], tf.float32)]
    if name == "StridedSlice":
        bounds = {"begin": [0, 0], "end": [B, 2], "strides": [1, 1]}
        back = {"begin": [B - 1, 0], "end": [-B - 1, 2], "strides": [-1, 1]}
        return [lambda f, v=v: tf.constant(v[argument.name]) for v in (bounds, back)]
    if argument.name == "ksize":
        return [lambda f: tf.constant([1, 2, 2, 1])]
    if argument.name == "strides" and name == "MaxPoolV2":
        return [lambda f: tf.constant([1, 1, 1, 1])]
    if argument.name == "size" and name.startswith("Resize"):
        return [lambda f: tf.constant([5, 5])]
    wanted = _wants(definition, argument)
    if wanted is None or wanted.is_floating:
        kinds = [
            lambda f: f,
            lambda f: tf.constant(0.5, f.dtype),
            lambda f: tf.constant([0.2, 0.5, 0.9], f.dtype),
            lambda f: tf.reverse(f, [f.shape.rank - 1]),
            lambda f: tf.constant([-1.0, 1.0], f.dtype),
            lambda f: tf.ones([D, 2], f.dtype),
            lambda f: tf.transpose(f),
        ]
    elif wanted.is_integer:
        kinds = [
            lambda f, v=v: tf.constant(v, wanted)
            for v in (
                *(-1, 0, 1, 2, [0], [1], [0, 1, 1], [0, 0, 1, 1, 2, 2]),
                *([1, 2], [D], [B], [0, 0], [1, 1], [[0, 0], [0, 0]], [[1, 0], [0, 0]]),
                *([B, D], [D, B], [1, 0], [[0], [1]], [2, 1]),
            )
        ]
    elif wanted == tf.bool:
        kinds = [lambda f: tf.constant(True), lambda f: f > 0]
    elif wanted.is_complex:
        kinds = [lambda f: tf.cast(f, wanted)]
    else:
        return []
    return kinds


class Variant:
    """An op on the batch in some form, with the rest of its arguments."""

    def __init__(self, name, form, arguments, many):
        self.name, self.form, self.arguments, self.many = name, form, arguments, many
        self.complex = False
        self.axis: int | None = None
        self.sizes: list[int] = []

    def raw(self, features: tf.Tensor) -> tf.Tensor:
        """The op's first output that is a number."""
        definition = _tf_private.definition_of(self.name)
        data = FORMS[self.form][1](features)
        data = tf.cast(data, tf.complex64) if self.complex else data
        function = getattr(tf.raw_ops, self.name)
        # Python may name an input differently from the op's definition.
        called = [n for n in inspect.signature(function).parameters if n != "name"]
        listed = [a.name for a in definition.input_arg]
        others = iter(
            n for n in called if n not in listed and n not in _attributes(definition)
        )
        keys = [n if n in called else next(others) for n in listed]
        values = [[data, data] if self.many else data]
        values += [make(data) for make in self.arguments]
        given = dict(zip(keys, values, strict=True))
        attributes = dict(ATTRIBUTES.get(self.name, {}))
        found = function(**given, **attributes)
        for out in tf.nest.flatten(found):
            if out.dtype.is_complex:
                return tf.abs(out)
            if out.dtype not in (tf.string, tf.variant):
                return tf.cast(out, tf.float32)
        raise TypeError("no numbers")

    def statistic(self, features: tf.Tensor) -> tf.Tensor:
        """A number for each example, `[B]`, or a scalar, of the op's output."""
        out = self.raw(features)
        rank = len(self.sizes)
        if self.axis is not None:
            rest = [a for a in range(rank + 1) if a != self.axis]
            out = tf.transpose(out, [self.axis, *rest])
        if not self.sizes:
            return out
        # All weights differ: with equal weights, normalised outputs would add up to 1.
        weights = np.cos(np.arange(np.prod(self.sizes)) + 0.3)
        out *= tf.constant(weights.reshape(self.sizes), tf.float32)
        return tf.reduce_sum(out, list(range(-rank, 0)))

    def settle(self, features) -> bool:
        """Finds the axis of the output that counts examples; whether all is well."""
        out = self.raw(features)
        shape = out.shape.as_list()
        if out.shape.rank > 6 or np.prod(shape) > 1e5 or np.prod(shape) == 0:
            return False
        wanted = FORMS[self.form][0]
        if len(shape) > wanted and shape[wanted] == B:
            self.axis = wanted
        elif B in shape:
            self.axis = shape.index(B)
        self.sizes = [n for a, n in enumerate(shape) if a != self.axis]
        if not np.isfinite(out.numpy()).all():
            return False
        other = self.raw(features * 1.7 + 0.1).numpy()
        return other.shape != tuple(shape) or not np.array_equal(other, out.numpy())

    def combines(self, features) -> bool:
        """Whether an example's statistic depends on a different example."""
        if self.axis is None:
            return True
        before = self.statistic(features)
        for j in range(B):
            row = tf.constant([[0.9, -0.8, 0.7]])
            after = self.statistic(tf.tensor_scatter_nd_update(features, [[j]], row))
            kept = [i for i in range(B) if i != j]
            same = before.shape == after.shape and np.allclose(
                before.numpy()[kept], after.numpy()[kept], 1e-5, 1e-6
            )
            if not same:
                return True
        return False

    def __str__(self):
        return f"{self.name} on {self.form}"


def _forms_for(name: str) -> list[str]:
    """The forms of the ranks that an op takes; wrong ranks may end the process."""
    given = ATTRIBUTES.get(name, {})
    padding, sliding = given.get("padding"), given.get("strides", [])
    if padding is None:
        return list(FORMS)
    kinds = ("volume",) if len(sliding) == 5 else ("image",)
    return [form for form in FORMS if form.startswith(kinds)]


def variants(name: str, features: tf.Tensor) -> list[tuple[str, Variant]]:
    """Variants that keep the examples apart ("along") and combine them ("across")."""
    definition = _tf_private.definition_of(name)
    many = bool(definition.input_arg[0].number_attr)
    floats = _takes_real(definition)
    rest = [_candidates(name, definition, a) for a in definition.input_arg[1:]]
    found: dict[str, Variant] = {}
    for form in _forms_for(name):
        for arguments in itertools.islice(itertools.product(*rest), 150):
            variant = Variant(name, form, arguments, many)
            variant.complex = not floats
            try:
                if not variant.settle(features):
                    continue
                kind = "across" if variant.combines(features) else "along"
            except (ValueError, TypeError, tf.errors.OpError, AttributeError):
                continue
            except NotImplementedError:
                continue
            found.setdefault(kind, variant)
            if len(found) == 2:
                return list(found.items())
    return list(found.items())


def _attributes(definition) -> set[str]:
    return {attribute.name for attribute in definition.attr}


class Together:
    """Variants that keep the examples apart, all in a single loss."""

    def __init__(self, members):
        self.members = members

    def statistic(self, features: tf.Tensor) -> tf.Tensor:
        """A number for each example."""
        found = [member.statistic(features) for member in self.members]
        found = [tf.where(tf.math.is_finite(s), s, tf.zeros_like(s)) for s in found]
        return tf.add_n([tf.tanh(s) for s in found])


def _takes_real(definition) -> bool:
    argument = definition.input_arg[0]
    if argument.type:
        return argument.type == tf.float32.as_datatype_enum
    for attribute in definition.attr:
        if attribute.name == argument.type_attr:
            allowed = attribute.allowed_values.list.type
            return not allowed or tf.float32.as_datatype_enum in allowed
    return False


def _model(weights, x):
    if weights.shape.rank == 3:  # of each example its own
        features = tf.tanh(tf.linalg.matvec(weights, x, transpose_a=True))
    else:
        features = tf.tanh(x @ weights)
    return features, tf.reduce_sum(tf.square(features - 0.3), 1)


def losses(variant: Variant, use: str, weights, x, threshold, stop=True) -> tf.Tensor:
    """The examples' losses, `[B]`, with the op in one of the `USES`."""
    features, plain = _model(weights, x)
    of = tf.stop_gradient(features) if use != "loss" or stop else features
    s = variant.statistic(of)
    s = tf.where(tf.math.is_finite(s), s, tf.zeros_like(s))
    if use == "loss":
        return plain * (1.0 + 0.5 * tf.tanh(s))
    if use == "gradient":
        g = tf.sigmoid(s)
        return g * plain + tf.stop_gradient((1.0 - g) * plain)
    mask = tf.broadcast_to(s >= threshold, tf.shape(plain))
    return tf.where(mask, plain, tf.stop_gradient(plain))


def _batches(rng):
    """A batch, and the same with an example replaced, in several ways."""
    x = rng.normal(size=[B, D]).astype(np.float32)
    yield x, None
    for j in (0, 2, 5):
        for row in (rng.normal(size=D), 4 * rng.normal(size=D), x[j] * -1, x[j] * 40):
            other = x.copy()
            other[j] = row
            yield other, j


def effect(variant: Variant, use: str, weights, threshold, stop) -> float:
    """How far a replaced example moves the others' gradients, by brute force."""

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([B, D])])
    def gradients(x):
        with tf.GradientTape(persistent=True) as tape:
            # Each example has its own copy of the weights, so that 0 times the NaN of
            # the replaced row stays out of the remaining gradients.
            own = tf.tile(weights[tf.newaxis], [B, 1, 1])
            tape.watch(own)
            rows = tf.unstack(losses(variant, use, own, x, threshold, stop))
        found = [tape.gradient(row, own) for row in rows]
        return tf.stack([tf.zeros_like(own) if g is None else g for g in found])

    rng = np.random.default_rng(1)
    worst, first = 0.0, None
    for batch, j in _batches(rng):
        after = gradients(batch).numpy()
        if j is None:
            first = after
            continue
        kept = [i for i in range(B) if i != j]
        difference = np.abs(after[kept] - first[kept])
        difference[:, j] = np.nan_to_num(difference[:, j], nan=0, posinf=0)
        scale = np.abs(first).max() + 1e-12
        worst = max(worst, float(np.nan_to_num(difference, nan=np.inf).max() / scale))
    return worst


def outcome(variant: Variant, use: str, weights, threshold, stop) -> tuple[str, str]:
    """The verdict of a step (passed, alone, moved, graph, step, error), its message.

    Where gradients are made one example at a time ("alone"), the sum of a batch must be
    that of batches of single examples; "moved" if the sum is not.
    """

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, D])])
    def step(x):
        loss = losses(variant, use, weights, x, threshold, stop)
        loss = tf.ensure_shape(loss, [None])
        return clipped_sum(loss, [weights], FixedClip(1.0), check_gradients="always")[0]

    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run = step.get_concrete_function()
        alone = any(issubclass(w.category, OneByOneWarning) for w in said)
    except (ExampleIsolationError, LossStructureError) as error:
        return "graph", str(error)
    except LookupError:
        return ("error", "no gradient") if stop else ("again", "")
    except Exception as error:  # noqa: BLE001  Any error about odd arguments.
        return "error", f"{type(error).__name__}: {error}"
    rng = np.random.default_rng(2)
    for _ in range(4):  # As many checks as there are in eight steps.
        x = tf.constant(rng.normal(size=[B, D]).astype(np.float32))
        try:
            (whole,) = run(x)
            if alone:
                apart = tf.add_n([run(x[i : i + 1])[0] for i in range(B)])
                if not np.allclose(whole, apart, rtol=0, atol=1e-4):
                    return "moved", f"off by {np.abs(whole - apart).max():.1e}"
        except tf.errors.InvalidArgumentError as error:
            # Without the trace, which has the machine's paths.
            said = str(error).rpartition("assertion failed: ")[2]
            if any(name in said for name in _OURS):
                return "step", said
            return "error", "InvalidArgumentError"
        except Exception as error:  # noqa: BLE001
            return "error", f"{type(error).__name__}: {error}"
    return ("alone" if alone else "passed"), ""


def judge(moved: float, came: str) -> str:
    """The entry of the table."""
    if came in ("error", "alone"):
        return {"error": "cannot run", "alone": "one by one"}[came]
    if came == "moved":
        return "SILENT"
    if moved > _EFFECT:
        return {"passed": "SILENT", "graph": "graph", "step": "step"}[came]
    return "sound" if came == "passed" else f"refused though sound ({came})"


class Examiner:
    """Makes the rows of the table of some ops."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.weights = tf.Variable(rng.normal(size=[D, D]).astype(np.float32))
        x = rng.normal(size=[B, D]).astype(np.float32)
        self.features = tf.constant(_model(self.weights, x)[0].numpy())

    def _threshold(self, variant) -> float:
        """A threshold that replacing an example moves a remaining example across."""
        own = []
        for batch, j in _batches(np.random.default_rng(1)):
            found = variant.statistic(_model(self.weights, batch)[0]).numpy()
            found = np.broadcast_to(found, [B]).astype(np.float64)
            own.append(np.where(np.arange(B) == j, np.nan, found))
        own = np.where(np.isfinite(own), own, np.nan)
        least, most = np.nanmin(own, 0), np.nanmax(own, 0)
        row = np.nanargmax((most - least) / (np.abs(most) + np.abs(least) + 1e-9))
        if most[row] - least[row] > 1e-4 * np.abs(most[row]):
            return float((least[row] + most[row]) / 2)
        return float(np.nanmedian(own[0]))

    def _measured(self, variant, use):
        moved = 0.0
        try:
            threshold = self._threshold(variant)
            stop = use != "loss"
            came, said = outcome(variant, use, self.weights, threshold, stop)
            if came == "again":
                stop = True
                came, said = outcome(variant, use, self.weights, threshold, stop)
            moved = effect(variant, use, self.weights, threshold, stop)
        except Exception as error:  # noqa: BLE001  Any error about odd numbers.
            came, said = "error", f"{type(error).__name__}: {error}"
        said = " ".join(said.split())[:300]
        return {"entry": judge(moved, came), "effect": moved, "said": said}

    def rows(self, found: list[tuple[str, Variant]]):
        """The rows of all variants; sound variants along share a loss."""
        apart = [variant for way, variant in found if way == "along"]
        for use in USES:
            together = {"entry": ""}
            if len(apart) > 1:
                together = self._measured(Together(apart), use)
            for way, variant in found:
                sound = way == "along" and together["entry"] == "sound"
                row = together if sound else self._measured(variant, use)
                yield {
                    "op": variant.name,
                    "way": way,
                    "form": variant.form,
                    "use": use,
                    **row,
                }


def _work(given: list[str]) -> None:
    warnings.simplefilter("ignore")
    examiner = Examiner()
    found = []
    for name in given:
        print(json.dumps({"begin": name}), flush=True)
        those = variants(name, examiner.features)
        found += those
        if not those:
            row = {"op": name, "way": "", "use": "", "entry": "not called"}
            print(json.dumps(row), flush=True)
        print(json.dumps({"end": name}), flush=True)
    for row in examiner.rows(found):
        print(json.dumps(row), flush=True)
    print(json.dumps({"finished": True}), flush=True)


def _chunk(given: list[str]) -> list[dict]:
    """The rows of some ops, of a process that may die."""
    command = [sys.executable, "-m", "tests.gradients.op_table", "--work"]
    process = subprocess.Popen(
        [*command, ",".join(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        out, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
    lines = [json.loads(line) for line in out.splitlines() if line[:1] == "{"]
    if any("finished" in line for line in lines):
        return [line for line in lines if "entry" in line]
    if len(given) == 1:
        return [{"op": given[0], "way": "", "use": "", "entry": "ends the process"}]
    return [row for name in given for row in _chunk([name])]


def main(argv=None) -> int:
    """Writes the tables; returns how many entries are silent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", help="ops to examine in this process")
    parser.add_argument("--ops", help="these ops only; nothing is written")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    if args.work:
        _work(args.work.split(","))
        return 0
    chosen = args.ops.split(",") if args.ops else names()
    chunks = [chosen[i : i + _CHUNK] for i in range(0, len(chosen), _CHUNK)]
    rows: list[dict] = []
    with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
        for number, found in enumerate(pool.map(_chunk, chunks)):
            rows += found
            print(f"{number + 1} of {len(chunks)} chunks", file=sys.stderr, flush=True)
    counts = collections.Counter(row["entry"] for row in rows)
    print(dict(counts))
    if args.ops:
        for row in rows:
            print(row)
    else:
        op_table_page.write(rows)
    return counts["SILENT"]


if __name__ == "__main__":
    sys.exit(main())
