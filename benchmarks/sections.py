"""The sections of report.md: tables (Markdown) from the benchmarks' CSV files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks import charts, growth
from driver_kit import intervals
from tfdpclip import pictures

# Next to the peers, three of ours are enough.
_OWN_CHOICE = ("quantile", "layerwise", "batch")
_PEERS = ("tfp_", "opacus_", "jax_")


def _read(folder: pathlib.Path, name: str) -> pd.DataFrame | None:
    path = folder / name
    return pd.read_csv(path) if path.exists() else None


def _markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def _ratio(value: float) -> str:
    if not np.isfinite(value):
        return ""
    return f"{value:.2f}" if value < 10 else f"{value:.3g}"


def _cell(row: pd.Series, name: str = "ratio") -> str:
    """A ratio and its quartiles, or why there is none."""
    if row["status"] != "ok":
        return str(row["status"])
    low, high = row.get(f"{name}_q25"), row.get(f"{name}_q75")
    spread = ""
    if low is not None and np.isfinite(low):
        spread = f" ({_ratio(low)}-{_ratio(high)})"
    return f"{_ratio(row[name])}{spread}"


def _pivot(
    table: pd.DataFrame,
    variants: Sequence[str],
    cell: Callable[[pd.Series], str],
    first: Callable[[pd.DataFrame], str] | None = None,
    head: str = "",
) -> str:
    """Rows by model and batch size, a column for each variant."""
    columns = ["model", "batch_size"] if "batch_size" in table else ["model"]
    rows = []
    for key, part in table.groupby(columns, sort=False):
        by_variant = {row["variant"]: row for _, row in part.iterrows()}
        cells = [cell(by_variant[v]) if v in by_variant else "" for v in variants]
        if any(cells):
            rows.append([*key, *([first(part)] if first else []), *cells])
    header = ["model", "B"][: len(columns)] + ([head] if first else [])
    return _markdown([*header, *variants], rows)


def _split(table: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """Titles and variants: ours, and each peer's framework."""
    names = [name for name in table["variant"].unique() if name != "plain"]
    peers = [name for name in names if name.startswith(_PEERS)]
    ours = [name for name in names if name not in peers]
    return [part for part in (("tfdpclip", ours), ("others", peers)) if part[1]]


def _plain_ms(part: pd.DataFrame) -> str:
    plain = part[(part["variant"] == "plain") & (part["framework"] == "tensorflow")]
    plain = plain["median_ms"].dropna()
    return f"{plain.iloc[0]:.2f}" if len(plain) else ""


def _time_section(folder: pathlib.Path, name: str) -> tuple[str, list[pathlib.Path]]:
    table = _read(folder, name)
    if table is None or table.empty:
        return "", []
    stem = pathlib.Path(name).stem
    text, figures = "", []
    for (adam, jit), part in table.groupby(["adam", "jit"], sort=False):
        kind = ("Adam" if adam else "SGD") + (", XLA" if jit else "")
        text += f"## Time of a step / plain step ({kind})\n\n"
        text += (
            "Median of the ratios to the same framework's plain step of the same "
            "round, and their quartiles; the plain column is TensorFlow's, in ms.\n\n"
        )
        if name == "step_time.csv":
            for title, variants in _split(part):
                text += f"### {title}\n\n"
                text += _pivot(part, variants, _cell, _plain_ms, "plain ms") + "\n"
                path = folder / f"{stem}_{title}_{'adam' if adam else 'sgd'}"
                path = path.with_name(path.name + ("_xla.png" if jit else ".png"))
                shown = variants
                if title == "others":
                    shown = [*_OWN_CHOICE, *variants]
                charts.time_figure(part, shown, path)
                figures.append(path)
        text += "### Seconds of the first step (tracing, compiling)\n\n"
        names = list(part["variant"].unique())
        text += _pivot(
            part[(part["variant"] != "plain") | (part["framework"] == "tensorflow")],
            names,
            lambda row: _ratio(row["first_step_s"]),
        )
        text += "\n"
    bad = table[table["status"] != "ok"]
    if len(bad):
        text += "### Not measured\n\n" + _markdown(
            ["variant", "model", "B", "status", "why"],
            bad[["variant", "model", "batch_size", "status", "note"]]
            .astype(str)
            .replace({"nan": ""})
            .replace({r"\|": "/"}, regex=True)
            .values.tolist(),
        )
        text += "\n"
    return text, figures


def _memory_section(folder: pathlib.Path) -> tuple[str, list[pathlib.Path]]:
    text = ""
    table = _read(folder, "memory.csv")
    if table is not None and len(table):
        names = [name for name in table["variant"].unique() if name != "plain"]

        def plain(part):
            rows = part[part["variant"] == "plain"]
            rows = rows[rows["framework"] == "tensorflow"]["peak_mib"].dropna()
            return f"{rows.iloc[0]:.0f}" if len(rows) else ""

        text += "## Peak memory / plain\n\n"
        text += (
            "The whole process, and in brackets what it grew by from the first step "
            "on; the plain column is TensorFlow's, in MiB.\n\n"
        )
        text += _pivot(
            table,
            names,
            lambda row: (
                f"{_ratio(row['ratio'])} ({_ratio(row['step_ratio'])})"
                if row["status"] == "ok"
                else str(row["status"])
            ),
            plain,
            "plain MiB",
        )
        text += "\n"
    table = _read(folder, "largest_batch.csv")
    if table is not None and len(table):
        budget = table["budget_mib"].iloc[0]
        text += f"## Largest batch in {budget:g} MiB\n\n"
        labels = table["framework"] + " plain"
        table["variant"] = table["variant"].where(table["variant"] != "plain", labels)
        text += _pivot(
            table,
            list(table["variant"].unique()),
            lambda row: (
                f"{row['largest_batch']:.0f}"
                if row["status"] == "ok"
                else f"{row['largest_batch']:.0f} ({row['status']})"
            ),
        )
        text += "\n"
    return text, []


def _scaling_section(folder: pathlib.Path) -> tuple[str, list[pathlib.Path]]:
    path = folder / "scaling.csv"
    if not path.exists():
        return "", []
    rows = pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
    found = growth.exponents(rows)
    if not found:
        return "", []
    text = "## Growth\n\n"
    text += (
        f"Exponents fitted to the largest {growth.FIT_POINTS} sizes; FASTER: by more "
        f"than {growth.TOLERANCE} than the plain step's. The last column is the ratio "
        "at the largest size. What a step needs at any size (tracing, buffers) makes "
        "exponents of memory small where steps are.\n\n"
    )
    names = {"median_ms": "time", "step_mib": "memory"}
    text += _markdown(
        [
            "axis",
            "model",
            "variant",
            "of",
            "plain",
            "private",
            "difference",
            "faster?",
            "/ plain",
        ],
        [
            [
                row["axis"],
                row["model"],
                row["variant"],
                names[row["quantity"]],
                f"{row['plain_exponent']:.2f}",
                f"{row['exponent']:.2f}",
                f"{row['difference']:+.2f}",
                row["grows_faster"],
                _ratio(row["last_ratio"]),
            ]
            for row in found
        ],
    )
    table = pd.read_csv(path)
    figures = []
    for quantity, unit in (("median_ms", "ms"), ("step_mib", "MiB")):
        groups = list(table.groupby(["axis", "model"], sort=False))
        figure, axes = charts.grid(len(groups))
        for axis, ((name, model), part) in zip(axes, groups, strict=True):
            for variant in part["variant"].unique():
                points = part[part["variant"] == variant]
                charts.lines(axis, points, variant, "value", quantity, variant)
            axis.set(xscale="log", yscale="log", title=f"{model}: {name}")
            charts.numbers(axis, "x", sorted(part["value"].unique()))
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_minor_locator(NullLocator())
            pictures.dress(axis)
        kind = names[quantity]
        figure.supylabel(f"{kind} of a step ({unit})", fontsize="medium")
        charts.legend(figure, axes)
        figures.append(folder / f"scaling_{kind}.png")
        pictures.save(figure, figures[-1])
    return text + "\n", figures


def _plain_table(folder: pathlib.Path, name: str, title: str) -> str:
    table = _read(folder, name)
    if table is None or table.empty:
        return ""
    shown = table.map(
        lambda value: f"{value:.4g}" if isinstance(value, float) else value
    )
    shown = shown.astype(str).replace({"nan": ""})
    return f"## {title}\n\n" + _markdown(shown.columns, shown.values.tolist()) + "\n"


def _with_interval(values: pd.Series, places: int) -> str:
    """The mean, and half a 95 % interval (t) where there are two runs or more."""
    if len(values) < 2:
        return f"{values.iloc[0]:.{places}f}"
    found = intervals.of_mean(list(values), "mean")
    half = found["high"] - found["mean"]
    return f"{found['mean']:.{places}f} ± {half:.{places}f}"


def _accuracy_section(folder: pathlib.Path) -> str:
    """Seconds and accuracies by library: means of all turns, with intervals."""
    table = _read(folder, "to_accuracy.csv")
    if table is None or table.empty:
        return ""
    rows = []
    for key, part in table.groupby(["task", "epochs", "library"], sort=False):
        seconds = _with_interval(part["seconds"], 1)
        accuracy = _with_interval(100 * part["accuracy"], 1)
        spent = part["spent"].max()
        stated = f"{spent:.2f}" if np.isfinite(spent) else ""
        rows.append([*key, len(part), seconds, accuracy, stated])
    header = ("task", "epochs", "library", "runs", "seconds", "accuracy, %", "epsilon")
    return "## From arrays to an accuracy\n\n" + _markdown(header, rows) + "\n"


def _environment(folder: pathlib.Path) -> str:
    path = folder / "environment.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    machine = found["machine"]
    text = (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}.\n\n"
    )
    rows = [
        [name, ", ".join(f"{key} {value}" for key, value in versions.items())]
        for name, versions in found["versions"].items()
    ]
    return text + _markdown(["environment", "versions"], rows) + "\n"


def _fit_section(folder: pathlib.Path) -> str:
    """A whole fit: ratios by model, examples and batch, and their geometric mean."""
    table = _read(folder, "whole_fit.csv")
    if table is None or table.empty:
        return ""
    wide = table.pivot_table(
        index=["model", "examples", "batch_size", "xla"], columns="variant", sort=False
    )
    parts = ("unchecked", "step", "batches", "plan", "executions", "several")
    rows = [
        [
            *(*key[:3], "yes" if key[3] else ""),
            f"{row['epoch_s', 'plain']:.3g}",
            *(_ratio(row["ratio", name]) for name in parts),
            f"{row['first_epoch_s', 'plain']:.3g}",
            f"{row['first_epoch_s', 'plan']:.3g}",
            f"{row['first_epoch_s', 'executions']:.3g}",
        ]
        for key, row in wide.iterrows()
    ]
    means = (np.exp(np.log(wide["ratio", name]).mean()) for name in parts)
    rows.append(["geometric mean", *("",) * 4, *map(_ratio, means), *("",) * 3])
    head = (
        *("model", "examples", "B", "XLA", "plain fit, s", "step", "step, checked"),
        *("with batches", "whole fit", "executions", "plain in executions"),
        *("first, plain", "first, whole", "first, executions"),
    )
    return (
        "## An epoch of `fit` / plain `fit`\n\n"
        "The best epoch after the first, in turn in one process. *Step*: private steps "
        "on full batches, nothing accounted, which do not check themselves. *With "
        "batches*: checked, drawn by Poisson sampling. *Whole fit*: the same with a "
        "plan's callbacks. *Executions*: the same, `plan.steps_per_execution` steps in "
        "one call. *First*: the seconds of the first epoch.\n\n"
        + _markdown(head, rows)
        + "\n"
    )


def write(folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes report.md and the figures from whatever CSV files there are.

    Args:
      folder: where the CSV files are, and where to write.

    Returns:
      The files that were written, report.md first.
    """
    text, figures = "# Speed and memory\n\n" + _environment(folder), []
    for section, made in (
        _time_section(folder, "step_time.csv"),
        _time_section(folder, "first_step.csv"),
        _memory_section(folder),
        _scaling_section(folder),
    ):
        text += section
        figures += made
    text += _fit_section(folder)
    text += _accuracy_section(folder)
    text += _plain_table(folder, "federated.csv", "A round of federated aggregation")
    text += _plain_table(folder, "federated_tasks.csv", "A round of federated tasks")
    text += _plain_table(folder, "accounting.csv", "Accounting")
    if figures:
        text += "## Figures\n\n"
        text += "\n".join(f"![{path.stem}]({path.name})\n" for path in figures)
    path = folder / "report.md"
    path.write_text(text)
    return [path, *figures]
