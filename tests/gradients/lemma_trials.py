"""Random uses of an op where lemmas break: axes of one length, and any ranks.

A trial applies an op to batches and constants of ranks 1 to 5, of which every axis has
the length of the batch, or 1. The batch is of a static or of an unknown size; its axis
is the first, a later one, has two rows for each example, or the whole batch twice.
Where the proof says which entries of the output belong to which example, a replaced
example must move no other entries and no other gradients, the order of the examples
must not matter, and a further example must move nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip.gradients.flows.dataflow import Dataflow
from tfdpclip.gradients.flows.flow import DATA, Flow
from tfdpclip.gradients.proof import isolation_proof

#: (the length of all further axes, the static number of examples).
SIZES = ((3, 3), (3, None), (1, 3), (1, None))
#: How a batch is laid out in an input.
FORMS = ("first", "behind", "last", "pairs", "twice")
_TYPES = (tf.float32, tf.int32, tf.bool, tf.string, tf.complex64, tf.int64)
_INTEGERS = (tf.int32, tf.int64)


@dataclasses.dataclass(frozen=True)
class Batch:
    """An input with the examples, of a rank, in one of the `FORMS`."""

    rank: int
    form: str = "first"
    dtype: tf.DType = tf.float32

    def source(self, n: int) -> list[int]:
        """The shape of the data of an example."""
        if self.form == "pairs":
            return [2, *[n] * (self.rank - 1)]
        return [n] * (self.rank - 1)

    def laid_out(self, x: tf.Tensor) -> tf.Tensor:
        """The input, from the data with the examples on axis 0."""
        rank = x.shape.rank
        if self.form == "behind":
            return tf.transpose(x, [1, 0, *range(2, rank)])
        if self.form == "last":
            return tf.transpose(x, [*range(1, rank), 0])
        if self.form == "pairs":
            return tf.reshape(x, [-1, *x.shape[2:]])
        if self.form == "twice":
            return tf.tile(x, [2, *[1] * (rank - 1)])
        return x


@dataclasses.dataclass(frozen=True)
class Public:
    """A constant of a rank, of which all entries differ, or are alike."""

    rank: int
    alike: bool = False
    dtype: tf.DType = tf.float32


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """A constant."""

    value: np.ndarray


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of the first batch."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """An op with inputs (lists for inputs of many tensors) and attributes."""

    op: str
    inputs: tuple
    attributes: tuple
    n: int
    size: int | None

    @property
    def batches(self) -> list[Batch]:
        """The inputs with examples, in order."""
        return [i for i in _flat(self.inputs) if isinstance(i, Batch)]

    def outputs(self, data: list[tf.Tensor]) -> list[tf.Tensor]:
        """The outputs of the op, for the data of each batch."""
        rest = iter(data)

        def made(one: Any) -> Any:
            if isinstance(one, list | tuple):
                return [made(part) for part in one]
            if isinstance(one, Batch):
                return one.laid_out(next(rest))
            if isinstance(one, Public):
                return tf.constant(_constant(one, self.n))
            return (
                tf.shape(data[0]) if isinstance(one, Shape) else tf.constant(one.value)
            )

        given = [made(one) for one in self.inputs]
        function = getattr(tf.raw_ops, self.op)
        definition = _tf_private.definition_of(self.op)
        named = list(inspect.signature(function).parameters)
        listed = [a.name for a in definition.input_arg]
        attributes = {a.name for a in definition.attr}
        # Names of inputs that Python spells differently from the op's definition.
        others = iter(n for n in named if n not in listed and n not in attributes)
        keys = [n if n in named else next(others) for n in listed]
        found = function(**dict(zip(keys, given, strict=True)), **dict(self.attributes))
        return tf.nest.flatten(found)


def _flat(inputs: Any) -> list:
    return [
        leaf
        for i in inputs
        for leaf in (_flat(i) if isinstance(i, list | tuple) else [i])
    ]


def _constant(of: Public, n: int) -> np.ndarray:
    shape = [n] * of.rank
    rng = np.random.default_rng(of.rank)
    made = _values(rng, shape, of.dtype)
    return np.full(shape, made.flat[0], made.dtype) if of.alike else made


def _values(rng, shape, dtype) -> np.ndarray:
    if dtype in _INTEGERS:
        return rng.integers(0, 3, shape).astype(dtype.as_numpy_dtype)
    if dtype == tf.bool:
        return rng.random(shape) < 0.5
    if dtype == tf.string:
        return rng.integers(1000, 9999, shape).astype("S4").astype(object)
    real = rng.uniform(0.1, 0.9, shape)
    if dtype == tf.complex64:
        return (real + 1j * rng.normal(size=shape)).astype("complex64")
    return real.astype(dtype.as_numpy_dtype)


# The claims of the proof.


def claims(trial: Trial) -> tuple[list[Flow | None], bool]:
    """The flow of each output where the proof trusts it; whether the gradient, too."""
    with tf.Graph().as_default() as graph:
        data = [
            tf.compat.v1.placeholder(b.dtype, [trial.size, *b.source(trial.n)])
            for b in trial.batches
        ]
        factor = tf.compat.v1.placeholder(tf.resource, [])
        read = tf.raw_ops.ReadVariableOp(resource=factor, dtype=tf.float32)
        read.set_shape([])
        trained = [x * tf.cast(read, x.dtype) if x.dtype in _REAL else x for x in data]
        outputs = trial.outputs(trained)
        del graph
    size = trial.size
    found: list[Flow | None] = []
    for output in outputs:
        flows = Dataflow([output], [], size)
        flow = flows[output]
        trusted = flow.kind == DATA and bool(flow.axes) and not flow.made
        trusted = trusted and flow.coupled is None and not flow.placed
        trusted = trusted and next(isolation_proof._gaps(flows), None) is None
        found.append(flow if trusted else None)
    handles = [factor]
    backward = any(found) and all(
        next(isolation_proof._gaps(Dataflow([o], handles, size)), None) is None
        for o, f in zip(outputs, found, strict=True)
        if f is not None
    )
    return found, backward


_REAL = (tf.float32, tf.complex64)


class Moved(AssertionError):
    """An example moved another example's entries, or its gradient."""


# What runs.


def _run(trial: Trial, arrays, found, cotangents) -> tuple[list, list]:
    """The outputs of which something is claimed, and the gradients at the data."""
    data = [tf.constant(a) for a in arrays]
    watched = [x for x in data if x.dtype in _REAL]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        outputs = trial.outputs(data)
    kept = [o for o, f in zip(outputs, found, strict=True) if f is not None]
    values = [o.numpy() for o in kept]
    if cotangents is None or not watched:
        return values, []
    real = [(o, i) for i, o in enumerate(kept) if o.dtype in _REAL]
    if not real:
        return values, []
    weights = [tf.cast(cotangents(i, o.shape), o.dtype) for o, i in real]
    try:
        gradients = tape.gradient(
            [o for o, _ in real], watched, output_gradients=weights
        )
    except LookupError:
        return values, []  # TensorFlow has no gradient, so that none passes.
    return values, [
        None if g is None else tf.convert_to_tensor(g).numpy() for g in gradients
    ]


def owners(flow: Flow, length: int, examples: int) -> np.ndarray:
    """The example of each entry of the axis that counts examples."""
    rows = flow.rows or length // examples
    if rows * examples != length:
        raise Moved(f"alone: {length} entries for {examples} examples of {rows}")
    return (np.arange(length) // (rows // flow.repeats)) % examples


def _by_example(value: np.ndarray, flow: Flow, examples: int) -> list[np.ndarray]:
    (axis,) = flow.axes
    owner = owners(flow, value.shape[axis], examples)
    return [np.compress(owner == i, value, axis) for i in range(examples)]


def _same(a: np.ndarray, b: np.ndarray, room: float = 1e-4) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype.kind not in "fc":
        return np.array_equal(a, b)
    scale = room * max(1.0, float(np.max(np.abs(a[np.isfinite(a)]), initial=0)))
    return np.allclose(a, b, rtol=0, atol=scale, equal_nan=True)


def _compare(trial, found, before, after, pairs, examples, what):
    """Raises if an example's entries moved.

    Args:
      trial: the trial.
      found: the flows of the outputs.
      before: outputs and gradients.
      after: outputs and gradients after a change.
      pairs: numbers of examples before and after the change that must be alike.
      examples: how many examples there are, before and after.
      what: the change.
    """
    flows = [f for f in found if f is not None]
    for flow, a, b in zip(flows, before[0], after[0], strict=True):
        parts = _by_example(a, flow, examples[0]), _by_example(b, flow, examples[1])
        for i, j in pairs:
            if not _same(parts[0][i], parts[1][j]):
                raise Moved(f"{what}: {trial}")
    for a, b in zip(before[1], after[1], strict=True):
        if (a is None) != (b is None):
            raise Moved(f"the gradient, {what}: {trial}")
        for i, j in pairs if a is not None else ():
            if not _same(a[i], b[j]):
                raise Moved(f"the gradient, {what}: {trial}")


def _hold_alone(trial, found, before, base, cotangents) -> None:
    """Raises if an example has other entries where it is the only one."""
    try:
        alone = _run(trial, [a[:1] for a in base], found, cotangents([0]))
    except tf.errors.OpError:
        return  # A constant has other lengths.
    for flow, value in zip((f for f in found if f), alone[0], strict=True):
        if value.shape[flow.axes[0]] != (flow.rows or value.shape[flow.axes[0]]):
            raise Moved(f"a single example has {value.shape}: {trial}")
    _compare(trial, found, before, alone, [(0, 0)], (len(base[0]), 1), "alone")


def hold(trial: Trial) -> tuple[int, int]:
    """Raises where a claim of the proof does not hold.

    Returns:
      How many outputs and gradients were tried.
    """
    found, backward = claims(trial)
    found = [f if f is not None and len(f.axes or ()) == 1 else None for f in found]
    if not any(found):
        return 0, 0
    rng = np.random.default_rng(zlib.crc32(f"{trial}".encode()))
    examples = trial.size or 3
    more = examples + 1
    full = [_values(rng, [more, *b.source(trial.n)], b.dtype) for b in trial.batches]
    base = [a[:examples] for a in full]
    flows = [f for f in found if f is not None]
    kept: dict = {}

    def cotangents(order, fresh=None):
        """Weights of the outputs that follow the examples' numbers in `order`."""

        def made(number, shape):
            flow, shape = flows[number], list(shape)
            (axis,) = flow.axes
            owner = owners(flow, shape[axis], len(order))
            values = np.zeros(shape)
            for place, example in enumerate(order):
                part = np.compress(owner == place, values, axis).shape
                seed = (number, example, part, example == fresh)
                if seed not in kept:
                    kept[seed] = rng.normal(size=part)
                index = [slice(None)] * len(shape)
                index[axis] = np.flatnonzero(owner == place)
                values[tuple(index)] = kept[seed]
            return values

        return made if backward else None

    order = list(range(examples))
    try:
        before = _run(trial, base, found, cotangents(order))
    except (tf.errors.OpError, LookupError, ValueError):
        return 0, 0  # The kernel does not take these shapes.
    for row, number in itertools.product(range(examples), ("another", "nan")):
        after = [a.copy() for a in base]
        for a, b in zip(after, trial.batches, strict=True):
            new = _values(rng, np.shape(a[row]), b.dtype)
            a[row] = np.nan if number == "nan" and b.dtype in _REAL else new
        try:
            moved = _run(trial, after, found, cotangents(order, row))
        except tf.errors.OpError:
            continue  # Some kernels refuse NaN.
        pairs = [(i, i) for i in order if i != row]
        what = f"row {row} is {number}"
        _compare(trial, found, before, moved, pairs, (examples, examples), what)
    if trial.size is None:
        _hold_alone(trial, found, before, base, cotangents)
    turned = order[1:] + order[:1]
    moved = _run(trial, [a[turned] for a in base], found, cotangents(turned))
    pairs = [(i, turned.index(i)) for i in order]
    _compare(trial, found, before, moved, pairs, (examples, examples), "another order")
    if trial.size is None:
        try:
            moved = _run(trial, full, found, cotangents([*order, more]))
        except tf.errors.OpError:
            return len(flows), sum(g is not None for g in before[1])
        pairs = [(i, i) for i in order]
        _compare(trial, found, before, moved, pairs, (examples, more), "a row more")
    return len(flows), sum(g is not None for g in before[1])


# Trials.


def _axes(rng, rank: int) -> np.ndarray:
    """Some axes of a tensor, from the front or from behind."""
    chosen = rng.permutation(rank)[: int(rng.integers(1, max(rank, 1) + 1))]
    return chosen - rank * rng.integers(0, 2, chosen.shape)


def _lengths(rng, rank: int, n: int) -> np.ndarray:
    """Lengths of the axes of a result: -1 is the rest."""
    shape = rng.choice([n, n, n, 1, n * n], rank)
    if rng.random() < 0.6:
        shape[int(rng.integers(rank))] = -1
    return shape


def _pads(rng, rank: int, n: int) -> np.ndarray:
    """Numbers of entries before and behind each axis: on a single axis."""
    pads = np.zeros([rank, 2], int)
    pads[int(rng.integers(rank))] = rng.integers(0, 2, 2)
    return pads


def _number(rng, rank: int, n: int) -> np.ndarray:
    return rng.integers(-1, 3)


#: By name of an input of integers: what it may hold, for a first input of a rank.
_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(
        "axis dim dimension concat_dim split_dim batch_dim".split(),
        lambda rng, rank, n: rng.integers(-rank, rank),
    ),
    "reduction_indices": lambda rng, rank, n: _axes(rng, rank),
    "perm": lambda rng, rank, n: rng.permutation(rank),
    "paddings": _pads,
    "crops": lambda rng, rank, n: np.zeros([1, 2], int),
    "block_shape": lambda rng, rank, n: rng.integers(1, 4, [1]),
    "multiples": lambda rng, rank, n: rng.permutation([2] + [1] * (rank - 1)),
    "begin": lambda rng, rank, n: rng.integers(0, 2, rank) * (rng.random(rank) < 0.4),
    "end": lambda rng, rank, n: rng.choice([n, n, 0], rank),
    "strides": lambda rng, rank, n: rng.choice([1, 1, 1, -1, 2], rank),
    "size": lambda rng, rank, n: (
        rng.choice([-1, n, 1], rank)
        if rank < 4 or rng.random() < 0.3
        else np.array([2, n])
    ),
    **dict.fromkeys(
        "dims shape".split(),
        lambda rng, rank, n: _lengths(rng, int(rng.integers(1, 6)), n),
    ),
    "input_sizes": lambda rng, rank, n: np.array([3] + [n] * (rank - 1)),
    "shift": _number,
    "size_splits": lambda rng, rank, n: np.array([1, n - 1] if n > 1 else [1]),
    "depth": lambda rng, rank, n: np.array(3),
    "k": lambda rng, rank, n: (
        rng.integers(-1, 2) if rng.random() < 0.5 else np.sort(rng.integers(-1, 2, 2))
    ),
    **dict.fromkeys("num_rows num_cols".split(), lambda rng, rank, n: np.array(-1)),
    "num_segments": lambda rng, rank, n: np.array(3),
    **dict.fromkeys("num_lower num_upper".split(), _number),
    "output_shape": lambda rng, rank, n: np.array([3, 3]),
}


#: By op: the ranks that its inputs have, the last one also of all further inputs.
_RANKS: dict[str, tuple] = {
    **dict.fromkeys("Conv2D DepthwiseConv2dNative".split(), (4,)),
    **dict.fromkeys("AvgPool MaxPool ExtractImagePatches DepthToSpace".split(), (4,)),
    **dict.fromkeys("Conv3D AvgPool3D MaxPool3D".split(), (5,)),
    "Conv2DBackpropInput": (4,),
    "Conv3DBackpropInputV2": (5,),
    "FusedBatchNormV3": (4, 1),
    "AdjustContrastv2": (4, 0),
    **dict.fromkeys("ResizeBilinear ResizeNearestNeighbor".split(), (4, 1)),
    **dict.fromkeys("MatMul SparseMatMul".split(), (2,)),
    "SoftmaxCrossEntropyWithLogits": (2,),
    "SparseSoftmaxCrossEntropyWithLogits": (2, 1),
    "DenseBincount": (2, 0, 2),
    "BiasAdd": (None, 1),
    "OneHot": (None, 0),
    "PadV2": (None, 2, 0),
}
_ODD_ATTRIBUTES: dict[str, tuple] = {
    "equation": (
        "ab,bc->ac ab,cb->ac ab,ac->a abc,abc->ab abc,abd->acd abc,cd->abd ab->ba "
        "aab->ab ab,ab->a abc->cab ...a,ab->...b abc,adc->abd ab,cb->ca abc,bc->ab "
        "aa->a ab,ab->"
    ).split(),
    "ksize": ([1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 2, 2, 1]),
    "ksizes": ([1, 2, 2, 1], [1, 1, 1, 1]),
    "rates": ([1, 1, 1, 1], [1, 2, 1, 1]),
    "strides": ([1, 1, 1, 1], [1, 2, 2, 1], [1, 1, 2, 2], [1, 1, 1, 1, 1]),
    "dilations": ([1, 1, 1, 1], [1, 2, 2, 1], [1, 1, 1, 1, 1]),
    "explicit_paddings": ([],),
    "boundaries": ([0.3, 0.6],),
    "squeeze_dims": ([], [0], [1], [-1], [1, 2]),
    "pattern": ("1.*",),
    "rewrite": ("a",),
    "num_buckets": (7,),
    "key": ([1, 2],),
    "shape": ([None, 3], [3, 3], [None, None, 3]),
    "reduction_dimension": (-1, 0, 1),
    "block_size": (1, 3),
    "interpolation": ("NEAREST", "BILINEAR"),
    "message": ("",),
    "DstT": (tf.int32, tf.float32, tf.bfloat16, tf.bool),
    "batch_dims": (0, 1, 2),
    "axis": (0, 1, -1, 2),
    "num_split": (3, 1, 2),
    "num": (3, 1),
    "N": (),
}
_DEFAULTS = frozenset(
    """container shared_name _output_shapes explicit_paddings use_cudnn_on_gpu T
    debug_name device_name tensor_name debug_urls gated_grpc""".split()
)


#: Ops without random uses, as some of them end the process; they have cases by hand.
NOT_TRIED = frozenset(
    """Conv2DBackpropInput Conv3DBackpropInputV2 CTCLoss CTCLossV2 SplitV
    ResourceGather LookupTableFindV2 SparseCross""".split()
)


def trials(op: str, count: int, seed: int = 0) -> list[Trial]:
    """Random trials of an op: always the same."""
    if op in NOT_TRIED:
        return []
    rng = np.random.default_rng([zlib.crc32(op.encode()), seed])
    definition = _tf_private.definition_of(op)
    return [t for _ in range(count) if (t := _drawn(rng, op, definition)) is not None]


def _pick(rng, options):
    return options[int(rng.integers(len(options)))]


def _allowed(definition, argument) -> list[tf.DType]:
    if argument.type:
        return [tf.as_dtype(argument.type)]
    attribute = next(a for a in definition.attr if a.name == argument.type_attr)
    allowed = [tf.as_dtype(t) for t in attribute.allowed_values.list.type] or _TYPES
    return [t for t in _TYPES if t in allowed]


def _integers(rng, op: str, name: str, dtype, rank: int, n: int) -> Any:
    """An input that holds axes, lengths or places."""
    kind = dtype.as_numpy_dtype
    other = {"SpaceToBatchND paddings": "crops", "ReverseV2 axis": "reduction_indices"}
    name = other.get(f"{op} {name}", name)
    if op == "DenseBincount":
        return Given(kind(3)) if name == "size" else Batch(2, "first", dtype)
    made = _ARGUMENTS.get(name)
    if made is None or rng.random() < 0.1:
        own = int(rng.integers(0, 4))
        return Public(own, bool(rng.integers(2)), dtype)
    if name in ("dims", "shape", "multiples") and rng.random() < 0.3:
        return Shape() if dtype == tf.int32 else Public(1, True, dtype)
    return Given(np.asarray(made(rng, rank, n)).astype(kind))


def _drawn(rng, op, definition) -> Trial | None:
    n, size = SIZES[int(rng.integers(len(SIZES)))]
    rank, form = int(rng.integers(1, 6)), _pick(rng, FORMS[:1] * 4 + FORMS)
    alone = rng.random() < 0.4
    dtypes: dict[str, tf.DType] = {}
    inputs: list[Any] = []
    for number, argument in enumerate(definition.input_arg):
        allowed = _allowed(definition, argument)
        if argument.type_list_attr or not allowed:
            allowed = [tf.float32]
        chosen = allowed[0] if rng.random() < 0.8 else _pick(rng, allowed)
        dtype = dtypes.setdefault(argument.type_attr or f" {number}", chosen)
        lengths = argument.number_attr or argument.type_list_attr
        own = rank if rng.random() < 0.6 else int(rng.integers(0, 6))
        own_form = form if rng.random() < 0.8 else _pick(rng, FORMS)
        fixed = _RANKS.get(op)
        if fixed is not None and fixed[min(number, len(fixed) - 1)] is not None:
            own = fixed[min(number, len(fixed) - 1)]
            rank = own if number == 0 else rank
        batch = Batch(max(own, 1), own_form if own > 1 else "first", dtype)
        if own_form in ("pairs", "twice"):
            batch = Batch(max(own, 1), own_form, dtype)
        first = not any(isinstance(i, Batch) for i in _flat(inputs))
        if dtype in _INTEGERS and rng.random() < 0.8 - 0.6 * (allowed[0] != dtype):
            one = _integers(rng, op, argument.name, dtype, rank, n)
        elif op == "DenseBincount" and rng.random() < 0.6:
            one = Given(np.zeros([0], dtype.as_numpy_dtype))  # No weights.
        elif (
            own == 0
            or (op == "FusedBatchNormV3" and number)
            or rng.random() < (0.1 if first else 0.6 if alone else 0.25)
        ):
            one = Public(own, bool(rng.integers(2)), dtype)
        else:
            one = batch
        inputs.append([one] * int(rng.integers(1, 4)) if lengths else one)
    attributes: dict[str, Any] = {}
    types = {a.type_attr for a in definition.input_arg}
    numbers = {a.number_attr or a.type_list_attr for a in definition.input_arg}
    for attribute in definition.attr:
        name = attribute.name
        if name in types or name in numbers or name in _DEFAULTS:
            continue
        options = list(_ODD_ATTRIBUTES.get(name, ()))
        if attribute.type == "bool":
            options = [False, True]
        elif attribute.type == "string" and attribute.allowed_values.list.s:
            options = [s.decode() for s in attribute.allowed_values.list.s]
            options = [o for o in options if o != "EXPLICIT"]
        elif attribute.type == "type" and not options:
            options = [tf.int32, tf.float32]
        elif attribute.type == "int" and not options:
            options = [0, 1, 2, 3]
        elif attribute.type == "float":
            options = [0.2]
        if name == "batch_dims":  # TensorFlow ends the process where a rank is less.
            ranks = [getattr(i, "rank", 0) for i in inputs[:2]]
            options = [o for o in options if o < min(ranks)]
        has_default = attribute.HasField("default_value")
        if not options or has_default and rng.random() < 0.4:
            if not has_default:
                return None
            continue
        python = {"squeeze_dims": "axis"}.get(name, name)
        attributes[python] = _pick(rng, options)
    if not any(isinstance(i, Batch) for i in _flat(inputs)):
        return None
    held = tuple(tuple(i) if isinstance(i, list) else i for i in inputs)
    return Trial(op, held, tuple(sorted(attributes.items(), key=str)), n, size)


def tried(op: str, count: int, seed: int = 0) -> tuple[int, int, int]:
    """Tries an op; returns how many trials had a claim, outputs, and gradients."""
    total = [0, 0, 0]
    for trial in trials(op, count, seed):
        try:
            forward, backward = hold(trial)
        except (ValueError, TypeError, KeyError, LookupError):
            continue  # TensorFlow makes no such op.
        total[0] += forward > 0
        total[1] += forward
        total[2] += backward
    return tuple(total)
