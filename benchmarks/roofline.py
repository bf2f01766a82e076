"""The estimated time of a private step on a GPU; nothing is run.

    python -m benchmarks.roofline --cells=convnet:256,transformer:256

Every op of the graph of a plain and of a private step is a kernel that takes the
longest of three times: its multiplications and additions at the device's rate, the
bytes that it reads and writes at the rate of its memory, and a launch. The step is the
sum over all kernels. That is crude: kernels reach a part of those rates, TensorFlow
fuses some and runs others side by side, and the host's work is left out. Both steps are
estimated in the same way, so their ratio is less crude than their times.

Left out are loops over an unknown number of steps (fused LSTM and GRU: on a GPU a plain
layer is a kernel of cuDNN, a private layer a loop), and the self-check. Of branches the
cheaper branch counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.timing import Spec
from driver_kit import command_line

CELLS = (
    *("mlp:64", "mlp:1024", "mnist_cnn:256", "convnet:256", "transformer:256"),
    *("transformer6:64", "resnet18:64", "vit_tiny_film:64"),
)
MODE = "quantile_unchecked"
# These ops move no data, or leave their results with the host.
_FREE = frozenset(
    (
        *("Const", "Placeholder", "PlaceholderWithDefault", "Identity", "IdentityN"),
        *("Reshape", "ExpandDims", "Squeeze", "ReadVariableOp", "StopGradient", "NoOp"),
        *(
            "Shape",
            "ShapeN",
            "Size",
            "Rank",
            "PreventGradient",
            "Assert",
            "EnsureShape",
        ),
        *("BroadcastGradientArgs", "ConcatOffset", "Range", "VarHandleOp"),
    )
)
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
}
# Whole numbers of at most so many entries are sizes, and stay with the host.
_ON_HOST = 16


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU by its data sheet.

    Attributes:
      flops: operations of float32 a second.
      bandwidth: of its memory, in bytes a second.
      launch: seconds from one small kernel to the next.
    """

    flops: float = 19.5e12
    bandwidth: float = 1.55e12
    launch: float = 4e-6

    def seconds(self, kernel: Kernel) -> float:
        """The time of a kernel."""
        return max(
            kernel.flops / self.flops, kernel.bytes / self.bandwidth, self.launch
        )


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An op: its multiplications and additions, and the bytes it reads and writes."""

    op: str
    flops: float
    bytes: float


class LoopError(ValueError):
    """A graph has a loop, of which the number of steps is not known."""


def kernels(graph: Any) -> list[Kernel]:
    """The kernels of a function's graph.

    Raises:
      LoopError: if there is a loop.
    """
    found = []
    for op in _needed(graph):
        if op.type in _FREE:
            continue
        if "While" in op.type:
            raise LoopError(f"{op.name} is a loop.")
        if op.type in _BRANCHES:
            branches = [
                kernels(_function(graph, op, name)) for name in _BRANCHES[op.type]
            ]
            found += min(branches, key=lambda b: sum(map(Device().seconds, b)))
        elif op.type in _CALLS and not op.node_def.attr["_XlaMustCompile"].b:
            found += kernels(_function(graph, op, "f"))
        elif not _is_on_host(op):
            tensors = [*op.inputs, *op.outputs]
            found.append(Kernel(op.type, _flops(op), sum(map(_bytes, tensors))))
    return found


def _function(graph, op, attribute):
    name = op.get_attr(attribute).name
    while graph is not None:
        found = graph._get_function(name)
        if found is not None:
            return found.graph
        graph = getattr(graph, "outer_graph", None)
    raise ValueError(f"{op.name} calls {name}, which is not known.")


def _needed(graph) -> Iterator[Any]:
    """The ops that outputs depend on, and the ops that change a variable."""
    waiting = [t.op for t in graph.outputs]
    waiting += [op for op in graph.get_operations() if op.type.startswith("Assign")]
    waiting += [
        op for op in graph.get_operations() if op.type.startswith("ResourceApply")
    ]
    seen = set()
    while waiting:
        op = waiting.pop()
        if op in seen:
            continue
        seen.add(op)
        yield op
        waiting += [t.op for t in op.inputs]
        waiting += list(op.control_inputs)


def _is_on_host(op) -> bool:
    return all(t.dtype.is_integer and (_entries(t) <= _ON_HOST) for t in op.outputs)


def _entries(tensor) -> int:
    """How many there are; 0 if that is not known."""
    return tensor.shape.num_elements() or 0


def _bytes(tensor) -> int:
    known = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool
    return _entries(tensor) * tensor.dtype.size if known else 0


def _flops(op) -> float:
    if op.type in ("MatMul", "BatchMatMulV2"):
        turned = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
        inner = op.inputs[0].shape[-2 if turned else -1] or 0
        return 2.0 * _entries(op.outputs[0]) * inner
    if op.type == "Einsum":
        sizes: dict[str, int] = {}
        terms = op.get_attr("equation").decode().split("->")[0].split(",")
        for term, tensor in zip(terms, op.inputs, strict=True):
            sizes.update(zip(term, (d or 0 for d in tensor.shape), strict=False))
        return 2.0 * math.prod(sizes.values())
    if op.type.startswith(("Conv2D", "DepthwiseConv2d")):
        filters = {"Input": op.inputs[1], "ilter": op.outputs[0]}
        kernel = filters.get(op.type[-5:], op.inputs[1])
        places = op.outputs[0] if "Backprop" not in op.type else op.inputs[2]
        height, width, channels = kernel.shape[:3]
        channels = 1 if op.type.startswith("Depthwise") else channels
        return 2.0 * _entries(places) * math.prod((height, width, channels))
    return float(sum(map(_entries, op.outputs)))


def estimate(model: str, batch_size: int, mode: str, device: Device) -> dict:
    """Ratios of a private step to a plain step: a row of the table.

    Raises:
      LoopError: if a step has a loop.
    """
    from benchmarks import variants

    spec = Spec(model, batch_size, ("plain", mode))
    plain, private = (
        kernels(variants.graph_of_step(spec, name)) for name in spec.variants
    )

    def ratio(value):
        return sum(map(value, private)) / sum(map(value, plain))

    return {
        "model": model,
        "B": batch_size,
        "operations": ratio(lambda kernel: kernel.flops),
        "bytes": ratio(lambda kernel: kernel.bytes),
        "kernels": ratio(lambda kernel: 1),
        "plain, ms": 1e3 * sum(map(device.seconds, plain)),
        "private / plain": ratio(device.seconds),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table (Markdown)."""
    parser = command_line.argument_parser(__doc__)
    parser.add_argument(
        "--cells", default=",".join(CELLS), help="model:batch_size, by commas."
    )
    parser.add_argument("--mode", default=MODE, help="Which private step.")
    for field in dataclasses.fields(Device):
        parser.add_argument(f"--{field.name}", type=float, default=field.default)
    options = parser.parse_args(argv)
    device = Device(options.flops, options.bandwidth, options.launch)
    rows = []
    for cell in options.cells.split(","):
        model, _, batch_size = cell.partition(":")
        if not batch_size.isdigit():
            parser.error(f"--cells: {cell!r} must be model:batch_size, as in mlp:64")
        try:
            rows.append(estimate(model, int(batch_size), options.mode, device))
        except LoopError as error:
            parser.error(f"--cells: {cell!r} cannot be estimated: {error}")
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        values = [f"{v:.2f}" if isinstance(v, float) else v for v in row.values()]
        print("| " + " | ".join(map(str, values)) + " |")


if __name__ == "__main__":
    main()
