"""The CSV files and tables of `benchmarks.compiled`, from its runner's results."""

from __future__ import annotations

import collections
import csv
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

KEY = ("device", "jaxlib", "model", "batch_size", "optimizer", "policy", "variant")
COLUMNS = (
    *KEY,
    *("written_by", "compile_s", "repeats", "median_ms", "q25_ms", "q75_ms"),
    *("ratio", "ratio_q25", "ratio_q75", "flops", "bytes", "temp_bytes", "peak_bytes"),
    *("difference", "agrees", "kernels", "in_branches", "more"),
)
PAPER_KEY = ("name", "blocks", "devices", "variant", "jaxlib")
PAPER_COLUMNS = (
    *PAPER_KEY,
    *("of", "parameters", "trained", "compile_s", "flops", "bytes"),
    *("argument_bytes", "temp_bytes", "peak_bytes", "kernels", "largest", "shapes"),
    "collectives",
)
ROOFLINE_COLUMNS = ("model", "batch_size", "ratio")


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table, from the results of `benchmarks.run_steps` for a folder."""
    steps = found["steps"]
    plain = steps[next(iter(steps))]
    device = "cpu" if found["platform"] == "cpu" else found["device"]
    rows = []
    for name, step in steps.items():
        row = {
            "device": device,
            **found["cell"],
            "variant": name,
            "jaxlib": found["jaxlib"],
            "written_by": f"TensorFlow {found['written_by']['tensorflow']}",
            **{k: step.get(k) for k in COLUMNS if k in step and k != "kernels"},
            "kernels": _count(step, "always"),
            "in_branches": _count(step, "in branches"),
            "more": _more(step, plain),
        }
        if "times_ms" in step:
            row |= _quartiles(step["times_ms"], ("q25_ms", "median_ms", "q75_ms"))
            row |= _quartiles(step["ratios"], ("ratio_q25", "ratio", "ratio_q75"))
        rows.append(row)
    return rows


def _quartiles(values: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    return dict(zip(names, values, strict=True))


def _count(step: dict, place: str) -> int:
    return sum(count for count, _ in step["kernels"][place].values())


def _more(step: dict, plain: dict) -> str:
    """Kinds of kernels of which there are more, or fewer, than in the plain step."""
    kinds: dict[str, int] = collections.Counter()
    for sign, one in ((1, step), (-1, plain)):
        for kind, (count, _) in one["kernels"]["always"].items():
            kinds[kind] += sign * count
    ordered = sorted(kinds.items(), key=lambda pair: (-abs(pair[1]), pair[0]))
    return "; ".join(f"{kind} {count:+d}" for kind, count in ordered if count)


def paper_row(of: int, found: dict[str, Any], variant: str) -> dict[str, Any]:
    """A row about a step that was compiled and not run.

    Args:
      of: the number of blocks of the whole model.
      found: the results of `benchmarks.run_steps`.
      variant: of the step.
    """
    step = found["steps"][variant]
    return {
        "of": of,
        "jaxlib": found["jaxlib"],
        **{k: step.get(k) for k in PAPER_COLUMNS if k in step and k != "kernels"},
        "kernels": _count(step, "always"),
        "largest": "; ".join(f"{kind} by {how}" for _, kind, how in step["largest"]),
        "shapes": _text(step["shapes"]),
        "collectives": "; ".join(
            f"{kind} {count} ({size} bytes)"
            for kind, (count, size) in step.get("collectives", {}).items()
        ),
        "parameters": found["cell"].get("parameters"),
        "trained": found["cell"].get("trained"),
    }


def _text(counts: dict[str, Any]) -> str:
    return "; ".join(f"[{key}]: {count}" for key, count in counts.items())


def write(folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes tables.md, of the CSV files of a folder."""
    lines = ["# Compiled steps: tables"]
    rows = _read(folder / "compiled.csv")
    rooflines = {
        (row["model"], row["batch_size"]): row["ratio"]
        for row in _read(folder / "roofline.csv")
    }
    for place in dict.fromkeys((row["device"], row["jaxlib"]) for row in rows):
        own = [row for row in rows if (row["device"], row["jaxlib"]) == place]
        title = f"## Steps on {place[0]}, jaxlib {place[1]}"
        lines += ["", title, *_steps(own, rooflines)]
    if papers := _read(folder / "paper.csv"):
        lines += ["", "## Compiled and not run", *_papers(papers)]
    path = folder / "tables.md"
    path.write_text("\n".join(lines) + "\n")
    return [path]


def _read(path: pathlib.Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    marks = ["---"] * len(header)
    return ["", *("| " + " | ".join(line) + " |" for line in (header, marks, *rows))]


def _steps(rows: list[dict[str, str]], rooflines: dict) -> list[str]:
    cells: dict[tuple, dict[str, dict]] = collections.defaultdict(dict)
    for row in rows:
        cells[tuple(row[name] for name in KEY[2:-1])][row["variant"]] = row
    variants = [v for v in dict.fromkeys(r["variant"] for r in rows) if v != "plain"]
    head = ["model", "B", "optimizer", "policy"]
    times, more = [], []
    for cell, part in cells.items():
        plain = part["plain"]
        ratios = [_ratio(part[v]) if v in part else "" for v in variants]
        usual = cell[2:] == ("sgd", "float32")
        predicted = rooflines.get(cell[:2], "") if usual else ""
        times.append([*cell, _number(plain["median_ms"], 2), *ratios, predicted])
        for variant in variants:
            if variant in part:
                more.append([*cell, variant, *_beside(part[variant], plain)])
    columns = [*head, "plain, ms", *variants, "roofline, GPU"]
    lines = [
        "",
        "Time of a private step over that of the plain one, with quartiles; last, what",
        "`benchmarks.roofline` says of a GPU (without the self-check).",
        *_markdown(columns, times),
        "",
        "By the compiler's own count, private over plain: bytes, operations, memory.",
        "Kernels that always run and seconds to compile: plain, private. In branches:",
        "those of the self-check. Difference: how far results are from TensorFlow's,",
        "in lengths of what the step changed.",
    ]
    columns = ["bytes", "operations", "memory at most", "kernels", "in branches"]
    columns += ["compile, s", "difference", "kernels more"]
    return lines + _markdown([*head, "variant", *columns], more)


def _ratio(row: dict[str, str]) -> str:
    if not row["ratio"]:
        return ""
    low, middle, high = (
        _number(row[name], 2) for name in ("ratio_q25", "ratio", "ratio_q75")
    )
    return f"{middle} ({low}-{high})"


def _number(text: str, digits: int) -> str:
    return f"{float(text):.{digits}f}" if text else ""


def _over(row: dict, plain: dict, name: str) -> str:
    if not row.get(name) or not float(plain.get(name) or 0):
        return ""
    return f"{float(row[name]) / float(plain[name]):.2f}"


def _beside(row: dict[str, str], plain: dict[str, str]) -> list[str]:
    counts = [_over(row, plain, n) for n in ("bytes", "flops", "peak_bytes")]
    seconds = [_number(one["compile_s"], 1) for one in (plain, row)]
    apart = f"{float(row['difference']):.0e}" if row["difference"] else ""
    if row["agrees"] == "False":
        apart += " DIFFERS"
    kernels = f"{plain['kernels']}, {row['kernels']}"
    counts += [kernels, row["in_branches"], ", ".join(seconds)]
    return [*counts, apart, row["more"]]


def along(points: Sequence[tuple[float, float]], place: float) -> float:
    """The value at a place of the line through two points.

    >>> along([(2, 10.0), (4, 14.0)], 12)
    30.0
    """
    (first, low), (last, high) = points
    return low + (high - low) * (place - first) / (last - first)


def whole(rows: Iterable[dict[str, str]]) -> list[list[str]]:
    """The cost of models of all blocks, extrapolated from two depths.

    Returns:
      For each model its name, its blocks, the weights, and of its plain and of its
      private step TFLOP, GB accessed and GB at most; then the ratios of those three.
    """
    families: dict[tuple, dict[str, list]] = collections.defaultdict(dict)
    for row in rows:
        if int(row["of"]) > int(row["blocks"]) > 0:
            family = row["name"].rpartition(" ")[0], int(row["of"])
            families[family].setdefault(row["variant"], []).append(row)
    found = []
    for (name, blocks), variants in families.items():
        plain = variants.pop("plain", [])
        for private in variants.values():
            if len(plain) != 2 or len(private) != 2:
                continue
            line = [name, str(blocks)]
            for column in ("parameters", "trained"):
                line.append(f"{_at(plain, column, blocks) / 1e6:.3g} M")
            for column, unit in (("flops", 1e12), ("bytes", 1e9), ("peak_bytes", 1e9)):
                low, high = (_at(p, column, blocks) / unit for p in (plain, private))
                line.append(f"{low:.3g}, {high:.3g} ({high / low:.2f})")
            found.append(line)
    return found


def _at(pair: Sequence[dict[str, str]], column: str, blocks: int) -> float:
    return along([(float(row["blocks"]), float(row[column])) for row in pair], blocks)


def _papers(rows: list[dict[str, str]]) -> list[str]:
    lines = []
    header = ["model", "blocks", "weights", "that train", "TFLOP"]
    header += ["GB accessed", "GB at most"]
    if estimates := whole(rows):
        lines += [
            "",
            "All blocks, along the line through the two depths that are below: plain,",
            "private, and the ratio.",
            *_markdown(header, estimates),
        ]
    for split in (False, True):
        part = [row for row in rows if (row["devices"] != "1") == split]
        if not part:
            continue
        header = ["model", "blocks", "variant", "parameters", "trained"]
        if split:
            header += ["devices", "collectives"]
        else:
            header += ["TFLOP", "GB accessed", "GB at most", "compile, s", "shapes"]
        body = []
        for row in part:
            line = [row[n] for n in ("name", "blocks", "variant")]
            line += [row["parameters"], row["trained"]]
            if split:
                line += [row["devices"], row["collectives"] or "none"]
            else:
                line += [_scaled(row["flops"], 1e12), _scaled(row["bytes"], 1e9)]
                line += [_scaled(row["peak_bytes"], 1e9), _number(row["compile_s"], 1)]
                line.append(row["shapes"])
            body.append(line)
        lines += _markdown(header, body)
    return lines


def _scaled(text: str, unit: float) -> str:
    return f"{float(text) / unit:.3g}" if text else ""
