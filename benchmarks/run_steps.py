"""Runs step files wherever JAX runs: on a GPU, on a machine without TensorFlow.

    python run_steps.py FOLDER

A step file is a training step in the form that XLA gets, which `python -m
benchmarks.compiled --folder=FOLDER` wrote; this file is copied beside it, and needs
jaxlib (through JAX) and NumPy alone. Every step is compiled here, taken once and
compared with TensorFlow's results for the same arguments; then the plain and the
private steps are timed in turn. Also printed, where the device's client offers it:
bytes and operations by the compiler's own count, memory, and the additional kernels of
a private step.

The file is long because it is to be copied alone.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import math
import os
import pathlib
import re
import statistics
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

MANIFEST, ARRAYS = "steps.json", "arrays.npz"
VERSION = 1
# A private step checks itself at the steps 1, 2, 4 and 8.
WARM_UP_STEPS = 8
LEAST_REPEATS = 7
# The allowed distance of a result from TensorFlow's, in units of the result's length.
# Other compilers sum in a different order; a GPU multiplies in TF32 by default.
TOLERANCE = {"float32": 1e-3, "mixed_bfloat16": 5e-2}
TOLERANCE_ELSEWHERE = 5e-2
_HELP = ("-h", "-help", "--help", "--helpshort", "--helpfull")
_BITS = {"pred": 8, "f8": 8, "bf16": 16, "c64": 64, "c128": 128}
# They move nothing.
_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
        *("after-all", "opt-barrier", "partition-id", "replica-id"),
    )
)
_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|body|condition|true_computation|false_computation)"
    r"=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


class StepFileError(ValueError):
    """A folder of steps is incomplete or changed."""


def digest(array: np.ndarray) -> str:
    """The key of an array: its type, shape and bytes, hashed."""
    head = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(head + array.tobytes()).hexdigest()[:32]


def read(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The manifest and the arrays of a folder, after a check of all its files.

    Raises:
      StepFileError: if a part is missing, broken or changed; the message names it.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise StepFileError(
            f"{folder} has no {MANIFEST}: it is no folder of `benchmarks.compiled`."
        )
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise StepFileError(f"{MANIFEST} is broken: {error}.") from error
    if manifest.get("version") != VERSION:
        raise StepFileError(
            f"{MANIFEST} is of version {manifest.get('version')}, this program reads "
            f"{VERSION}. Write the folder again."
        )
    for step in manifest["steps"]:
        name = step["program"]
        program = folder / name
        if not program.exists():
            raise StepFileError(f"{name} is missing.")
        if hashlib.sha256(program.read_bytes()).hexdigest() != step["sha256"]:
            raise StepFileError(f"{name} is not what was written: broken or changed.")
    return manifest, _read_arrays(folder, manifest)


def _read_arrays(folder, manifest) -> dict[str, np.ndarray]:
    wanted = {
        value["array"]: f"{kind} {value['name']} of {step['name']}"
        for step in manifest["steps"]
        for kind in ("results", "arguments")
        for value in step[kind]
        if value.get("array")
    }
    if not wanted:
        return {}
    found = {}
    try:
        with np.load(folder / ARRAYS) as stored:
            for key, what in wanted.items():
                if key not in stored:
                    raise StepFileError(f"{ARRAYS} lacks the {what}.")
                found[key] = stored[key]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, StepFileError):
            raise
        raise StepFileError(f"{ARRAYS} is broken: {error}.") from error
    for key, what in wanted.items():
        if digest(found[key]) != key:
            raise StepFileError(f"{ARRAYS}: the {what} are not what was written.")
    return found


class Program:
    """A step, compiled for a device.

    Args:
      hlo: the program, a serialised HLO module.
      updates: for each result the argument that it is the next value of, or None.
      ranks: for each argument that is to be split over all devices along its first
        axis, its rank; None for arguments that all devices have. Without `ranks`, the
        program is for the first device.
    """

    def __init__(
        self,
        hlo: bytes,
        updates: Sequence[int | None],
        ranks: Sequence[int | None] | None = None,
    ):
        import jax
        from jax._src import compiler
        from jax._src.lib import xla_client

        jax.config.update("jax_enable_x64", True)
        self.updates = list(updates)
        devices = jax.devices() if ranks else jax.devices()[:1]
        self.device = devices[0]
        client = self.device.client
        mlir = xla_client._xla.mlir
        started = time.perf_counter()
        if hasattr(mlir, "hlo_to_stablehlo"):
            module = mlir.hlo_to_stablehlo(hlo)
        else:
            module = mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(hlo))
        if ranks:
            module = _split(module, ranks, len(devices))
        ids = np.array([[device.id for device in devices]])
        options = compiler.get_compile_options(1, len(devices), device_assignment=ids)
        if hasattr(options.executable_build_options, "use_shardy_partitioner"):
            options.executable_build_options.use_shardy_partitioner = False
        if hasattr(client, "compile_and_load"):
            each = xla_client.DeviceList(tuple(devices))
            self._loaded = client.compile_and_load(module, each, options)
        else:
            self._loaded = client.compile(module, options)
        self.compile_seconds = time.perf_counter() - started
        self.text = self._loaded.hlo_modules()[0].to_string()

    def put(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        """The arguments, on the device."""
        import jax

        return [jax.device_put(array, self.device) for array in arrays]

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """Takes a step, and waits for it."""
        try:
            made = self._loaded.execute_sharded([[one] for one in arguments])
        except TypeError:
            made = self._loaded.execute_sharded(list(arguments))
        results = [one[0] for one in made.disassemble_into_single_device_arrays()]
        for result in results:
            result.block_until_ready()
        return results

    def after(self, arguments: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """The arguments of the next step."""
        following = list(arguments)
        for result, place in zip(results, self.updates, strict=True):
            if place is not None:
                following[place] = result
        return following

    def analysis(self) -> dict[str, Any]:
        """The compiler's analysis of the program, as far as this client offers it."""
        found: dict[str, Any] = {}
        try:
            cost = self._loaded.cost_analysis()
        except Exception:
            cost = {}
        cost = cost[0] if isinstance(cost, list) else cost
        for name, key in (("flops", "flops"), ("bytes", "bytes accessed")):
            if key in (cost or {}):
                found[name] = float(cost[key])
        try:
            memory = self._loaded.get_compiled_memory_stats()
        except Exception:
            return found
        parts = {
            part: int(getattr(memory, f"{part}_size_in_bytes"))
            for part in ("argument", "output", "alias", "temp", "generated_code")
        }
        found |= {f"{part}_bytes": size for part, size in parts.items()}
        found["peak_bytes"] = (
            parts["argument"] + parts["output"] - parts["alias"] + parts["temp"]
        )
        return found

    def used_bytes(self) -> int | None:
        """The most that this process had on the device, where the device says so."""
        try:
            return int((self.device.memory_stats() or {})["peak_bytes_in_use"])
        except Exception:
            return None


def _split(module: str | bytes, ranks: Sequence[int | None], devices: int) -> str:
    """A StableHLO module that says which arguments are split over devices."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    order = ",".join(map(str, range(devices)))
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        (function,) = (
            op
            for op in parsed.body.operations
            if ir.StringAttr(op.attributes["sym_name"]).value == "main"
        )
        kinds = []
        for rank in ranks:
            tiles = ",".join(map(str, [devices, *[1] * ((rank or 1) - 1)]))
            text = f"{{devices=[{tiles}]{order}}}" if rank else "{replicated}"
            sharding = {"mhlo.sharding": ir.StringAttr.get(text)}
            kinds.append(ir.DictAttr.get(sharding))
        function.attributes["arg_attrs"] = ir.ArrayAttr.get(kinds)
        return str(parsed)


def _shape_and_rest(text: str) -> tuple[str, str]:
    """An instruction's type and the rest of its text."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for i, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if not depth:
            return text[: i + 1], text[i + 2 :]
    return text, ""


def arrays_in(shape: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """The arrays of a type as HLO writes it: element type, shape and bytes of each.

    >>> list(arrays_in("(f32[8,2]{1,0}, pred[])"))
    [('f32', (8, 2), 64), ('pred', (), 1)]
    """
    for kind, dimensions in _ARRAY.findall(shape):
        sizes = tuple(int(size) for size in dimensions.split(",") if size)
        digits = re.sub(r"\D", "", kind)
        bits = _BITS.get(kind) or _BITS.get(kind[:2]) or int(digits or 0)
        yield kind, sizes, math.prod(sizes) * bits // 8


def instructions(text: str) -> dict[str, list[tuple[str, str, str]]]:
    """By computation, the instructions of an HLO module's text.

    Returns:
      (operation, type, the rest of the line) for each; the entry is called "ENTRY".
    """
    found: dict[str, list[tuple[str, str, str]]] = {}
    current: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line)
        if match := _COMPUTATION.match(line):
            name = "ENTRY" if match[1] else match[2]
            current = found.setdefault(name, [])
        elif match := _INSTRUCTION.match(line):
            shape, rest = _shape_and_rest(match[2])
            operation = rest.partition("(")[0].strip()
            current.append((operation, shape, rest))
    return found


def kind_of(operation: str, rest: str) -> str:
    """How an instruction is counted: fusions by kind, custom calls by target."""
    pattern = {"fusion": r"kind=(\w+)", "custom-call": r'custom_call_target="([^"]*)"'}
    if operation in pattern and (match := re.search(pattern[operation], rest)):
        return f"{operation} {match[1]}"
    return operation.removesuffix("-start")


def kernels(text: str) -> dict[str, dict[str, list[int]]]:
    """The kernels of an optimised module by kind: their number and bytes written.

    A loop's body counts once. Kernels within branches, such as the self-check of a
    step, are under "in branches", all else under "always"; under "fused" are the
    operations within fusions.
    """
    computations = instructions(text)
    found: dict[str, dict[str, list[int]]] = {
        place: collections.defaultdict(lambda: [0, 0])
        for place in ("always", "in branches", "fused")
    }

    def visit(name: str, place: str) -> None:
        for operation, shape, rest in computations.get(name, []):
            if operation in _FREE or operation.endswith("-done"):
                continue
            called = _CALLED.findall(rest)
            if match := _BRANCHES.search(rest):
                called += [one.strip().lstrip("%") for one in match[1].split(",")]
            if operation != "call":
                count = found[place][kind_of(operation, rest)]
                count[0] += 1
                count[1] += sum(size for *_, size in arrays_in(shape))
            if operation in ("call", "while"):
                inner = place
            elif operation == "conditional":
                inner = "in branches"
            elif operation == "fusion":
                inner = "fused"
            else:
                continue
            for one in called:
                visit(one, inner)

    visit("ENTRY", "always")
    return {place: dict(part) for place, part in found.items()}


def largest_arrays(text: str, count: int = 8) -> list[list[Any]]:
    """The largest arrays that a module's main computation makes: bytes, type, how.

    Arguments, and ops that only read them, are left out.
    """
    found = {}
    for operation, shape, rest in instructions(text)["ENTRY"]:
        if operation in _FREE:
            continue
        for kind, sizes, size in arrays_in(shape):
            key = f"{kind}{list(sizes)}".replace(" ", "")
            found.setdefault(key, [size, key, kind_of(operation, rest)])
    return sorted(found.values(), reverse=True)[:count]


def occurrences(text: str, shape: str) -> int:
    """How often a shape as "8,250000,64" is in a module, its axes in any order."""
    wanted = sorted(int(size) for size in shape.split(","))
    return sum(
        sorted(sizes) == wanted
        for part in instructions(text).values()
        for _, made, _ in part
        for _, sizes, _ in arrays_in(made)
    )


def collectives(text: str) -> dict[str, list[int]]:
    """The communication between devices: by operation, how often, and result bytes."""
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for part in instructions(text).values():
        for operation, shape, _ in part:
            name = operation.removesuffix("-start")
            if name in _COLLECTIVES:
                found[name][0] += 1
                found[name][1] += sum(size for *_, size in arrays_in(shape))
    return dict(found)


def compared(step: dict, arrays: dict, results: Sequence[Any]) -> dict[str, Any]:
    """How far results are from TensorFlow's, in lengths of the step's change.

    Results that should not change at all, such as the bias of an attention's keys,
    change by rounding alone: no length is taken for less than a thousandth of the
    longest.

    Returns:
      `difference`, the largest, and `worst`, the name of that result.

    Raises:
      StepFileError: if there are not as many results, or they have other shapes.
    """
    if len(results) != len(step["results"]):
        raise StepFileError(
            f"{step['name']} returns {len(results)} results, TensorFlow's "
            f"{len(step['results'])}."
        )
    apart, lengths, differences = [], [], {}
    for result, about in zip(results, step["results"], strict=True):
        name = about["name"]
        made, wanted = np.asarray(result), arrays[about["array"]]
        if made.shape != wanted.shape:
            raise StepFileError(
                f"{name} of {step['name']} has the shape {made.shape}, TensorFlow's "
                f"{wanted.shape}."
            )
        if not np.issubdtype(wanted.dtype, np.floating):
            differences[name] = float(not np.array_equal(made, wanted))
            continue
        made, wanted = made.astype(np.float64), wanted.astype(np.float64)
        change = wanted
        if about["updates"] is not None:
            change = wanted - arrays[step["arguments"][about["updates"]]["array"]]
        # Where a weight hardly changes, its own rounding does not count as a
        # difference.
        floor = max(2e-4 * np.linalg.norm(wanted), 1e-30)
        apart.append((name, np.linalg.norm(made - wanted)))
        lengths.append((max(np.linalg.norm(change), floor), made.size))
    # Metrics are scalars, and of a different size than weights.
    longest = max((length for length, size in lengths if size > 1), default=0.0)
    for (name, distance), (length, size) in zip(apart, lengths, strict=True):
        length = max(length, 1e-3 * longest) if size > 1 else length
        differences[name] = float(distance / length)
    worst = max(differences, key=lambda name: _rank(differences[name]))
    return {"difference": differences[worst], "worst": worst}


def _rank(difference: float) -> float:
    """NaN is the worst of all."""
    return math.inf if math.isnan(difference) else difference


def _timed(programs: dict, arguments: dict, repeats: int, seconds: float) -> dict:
    """Seconds of every step, taken in turn, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in programs}

    def take(name):
        started = time.perf_counter()
        results = programs[name](arguments[name])
        took = time.perf_counter() - started
        arguments[name] = programs[name].after(arguments[name], results)
        return took

    for name in programs:
        spent = 0.0
        for _ in range(WARM_UP_STEPS):
            spent += take(name)
            if spent > seconds:
                break
    for i in range(repeats):
        spent = sum(map(sum, times.values()))
        if i >= LEAST_REPEATS and spent > seconds * len(programs):
            break
        for name in programs:
            times[name].append(take(name))
    return times


def _quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [*values] * 3
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, statistics.median(values), high]


def measure(
    folder: pathlib.Path,
    *,
    repeats: int = 40,
    seconds: float = 10.0,
    shapes: Sequence[str] = (),
    split: bool = False,
) -> dict[str, Any]:
    """Compiles, compares and times the steps of a folder; the first is the plain step.

    Args:
      folder: of `benchmarks.compiled`.
      repeats: timed steps of each at most; 0 to compile and look only.
      seconds: about how long to time each.
      shapes: shapes to look for in the programs, as "8,250000,64".
      split: splits the data over all devices, and compiles and looks only.

    Raises:
      StepFileError: if the folder is broken.
    """
    import jax

    manifest, arrays = read(folder)
    programs, arguments, found = {}, {}, {}
    for step in manifest["steps"]:
        name = step["name"]
        hlo = (folder / step["program"]).read_bytes()
        updates = [about["updates"] for about in step["results"]]
        ranks = [
            len(about["shape"]) if about["name"].startswith("data ") else None
            for about in step["arguments"]
        ]
        try:
            program = Program(hlo, updates, ranks if split else None)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            jaxlib = sys.modules["jaxlib"].__version__
            raise StepFileError(
                f"{step['program']}, of TensorFlow {manifest['versions']['tensorflow']}"
                f", does not compile with jaxlib {jaxlib}: {why}. (What a newer "
                "TensorFlow wrote needs a newer jaxlib.)"
            ) from error
        row = {
            "compile_s": program.compile_seconds,
            **program.analysis(),
            "kernels": kernels(program.text),
            "largest": largest_arrays(program.text),
            "shapes": {shape: occurrences(program.text, shape) for shape in shapes},
        }
        found[name] = row
        if split:
            row["collectives"] = collectives(program.text)
        if split or not all(about.get("array") for about in step["arguments"]):
            continue
        given = [
            arrays[about["array"]].astype(jax.numpy.dtype(about["dtype"]))
            for about in step["arguments"]
        ]
        programs[name], arguments[name] = program, program.put(given)
        results = program(arguments[name])
        row |= compared(step, arrays, results)
        arguments[name] = program.after(arguments[name], results)
    device = jax.devices()[0]
    policy = manifest["cell"]["policy"]
    elsewhere = TOLERANCE_ELSEWHERE if device.platform != "cpu" else 0.0
    tolerance = max(TOLERANCE[policy], elsewhere)
    for name in programs:
        found[name]["agrees"] = bool(found[name]["difference"] <= tolerance)
    if repeats and programs:
        times = _timed(programs, arguments, repeats, seconds)
        plain = times[next(iter(times))]
        for name, own in times.items():
            ratios = [a / b for a, b in zip(own, plain, strict=True)]
            found[name]["times_ms"] = [1e3 * value for value in _quartiles(own)]
            found[name]["ratios"] = _quartiles(ratios)
            found[name]["repeats"] = len(own)
    return {
        "cell": manifest["cell"],
        "written_by": manifest["versions"],
        "platform": device.platform,
        "device": device.device_kind,
        "jaxlib": sys.modules["jaxlib"].__version__,
        "tolerance": tolerance,
        "peak_used_bytes": programs[name].used_bytes() if programs else None,
        "steps": found,
    }


def _more(found: dict, plain: dict) -> str:
    """The kinds of kernels that a step has more or fewer of than the plain step."""
    kinds: dict[str, int] = collections.Counter()
    for sign, row in ((1, found), (-1, plain)):
        for kind, (count, _) in row["kernels"]["always"].items():
            kinds[kind] += sign * count
    ordered = sorted(kinds.items(), key=lambda pair: -abs(pair[1]))
    return ", ".join(f"{kind} {count:+d}" for kind, count in ordered if count)


def summary(found: dict[str, Any]) -> str:
    """The results of `measure`, in lines for people."""
    cell = " ".join(f"{name}={value}" for name, value in found["cell"].items())
    lines = [f"{cell}: {found['device']} ({found['platform']})"]
    names = list(found["steps"])
    plain = found["steps"][names[0]]
    for name, row in found["steps"].items():
        parts = [f"compiled in {row['compile_s']:.1f} s"]
        if "times_ms" in row:
            low, middle, high = row["ratios"]
            parts.append(f"{row['times_ms'][1]:.3f} ms")
            parts.append(f"{middle:.2f} x {names[0]} ({low:.2f}-{high:.2f})")
        for key, label in (("bytes", "MB accessed"), ("peak_bytes", "MB at most")):
            if key in row:
                parts.append(f"{row[key] / 1e6:.1f} {label}")
        if "flops" in row:
            parts.append(f"{row['flops'] / 1e9:.2f} GFLOP")
        if "agrees" in row:
            verdict = "agrees" if row["agrees"] else f"DIFFERS in {row['worst']}"
            parts.append(f"{verdict} ({row['difference']:.1e})")
        lines.append(f"  {name}: " + "; ".join(parts))
        if row is not plain:
            lines.append(f"    kernels more: {_more(row, plain) or 'none'}")
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(1, f"run_steps: error: {message} See --help.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; 1 if a step does not agree with TensorFlow's."""
    parser = _Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument(*_HELP, action="help", help="Show this.")
    add = parser.add_argument
    add("folders", nargs="+", type=pathlib.Path, help="Folders with a steps.json.")
    add("--repeats", type=int, default=40, help="At most; 0 only compiles.")
    add("--seconds", type=float, default=10.0, help="About how long to time each step.")
    add("--shape", action="append", default=[], help="A shape to look for, as 8,9,64.")
    add("--devices", type=int, help="Splits steps over so many; only compiles them.")
    add("--output", type=pathlib.Path, help="Where to write all of it, as JSON.")
    options = parser.parse_args(argv)
    if options.output == pathlib.Path():
        parser.error("--output: name a file, for example --output=runs/steps.json")
    if options.devices:
        flag = f"--xla_force_host_platform_device_count={options.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    found = []
    for folder in options.folders:
        try:
            one = measure(
                folder,
                repeats=options.repeats,
                seconds=options.seconds,
                shapes=options.shape,
                split=bool(options.devices),
            )
        except StepFileError as error:
            parser.error(f"{folder}: {error}")
        print(summary(one), flush=True)
        found.append(one)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    rows = [row for one in found for row in one["steps"].values()]
    return int(not all(row.get("agrees", True) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
