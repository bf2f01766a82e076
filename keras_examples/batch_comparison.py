"""Tables, figures and findings of runs that clip batches in several ways."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import ticker

from driver_kit import plotting
from tfdpclip import pictures

SGD = "sgd"
_TITLES = {"equal_sigma": "equal sigma", "equal_privacy": "equal privacy"}
#: Pairs that the paper compares, and its claim about the first of each.
_CLAIMS = (
    ("batch:adaptive", "batch:full", "adaptive layerwise clipping beats one flat clip"),
    ("batch:adaptive", "batch:layerwise", "adaptive clips beat equal ones"),
    ("batch:adaptive", "batch:adaptive_zhang", "a master clip norm helps"),
    ("batch:adaptive", "individual:adaptive", "clipping batches beats examples"),
    ("batch:adaptive", "group:adaptive", "clipping batches beats groups"),
    ("batch:scaled", "batch:full", "scaling layers beats one flat clip"),
)
_WORDS = {"batch_size": "m", "sigma": "sigma", "clip_norm": "C"}


class Run(NamedTuple):
    """A run of a sweep.

    Attributes:
      method: unit and way to clip, or `SGD`.
      batch_size: m.
      sigma: None for SGD.
      clip_norm: None where there is no master clip norm.
      equal_privacy: whether sigma is divided by sqrt(L).
      repeat: from 0.
    """

    method: str
    batch_size: int
    sigma: float | None
    clip_norm: float | None
    equal_privacy: bool
    repeat: int

    @property
    def name(self) -> str:
        """For figures."""
        return self.method + (" (sigma / sqrt(L))" if self.equal_privacy else "")

    @property
    def setting(self) -> str:
        """All but the repeat, in words.

        >>> Run("batch:full", 64, 0.5, 0.2, True, 1).setting
        'batch:full (sigma / sqrt(L)), m 64, sigma 0.5, C 0.2'
        """
        return f"{self.name}, {_values(self._asdict())}"


def _values(row: Mapping[str, Any]) -> str:
    known = [(word, row[key]) for key, word in _WORDS.items()]
    return ", ".join(f"{word} {v:g}" for word, v in known if v not in (None, ""))


Found = Mapping[Run, Mapping[str, Any]]
Rows = Sequence[Mapping[str, Any]]


def curves(found: Found) -> list[dict[str, Any]]:
    """A row for each epoch of each run."""
    return [{**_columns(run), **row} for run, e in found.items() for row in e["rows"]]


def _columns(run: Run) -> dict[str, Any]:
    return {k: "" if v is None else v for k, v in run._asdict().items()}


def signals(found: Found) -> list[dict[str, Any]]:
    """Signal and noise by layer, of the first repeat."""
    return [
        {**_columns(run), **row}
        for run, entry in found.items()
        if not run.repeat
        for row in entry.get("signal", ())
    ]


def ratios(found: Found) -> list[dict[str, Any]]:
    """Signal over noise of a step: a row for each layer, a column for each method.

    The last row of a moment is the cosine of the step's release with the gradient. "*"
    marks sigma / sqrt(L).
    """
    rows: dict[tuple, dict[str, Any]] = {}
    for row in signals(found):
        name = row["method"] + ("*" if row["equal_privacy"] else "")
        start = {key: row[key] for key in ("batch_size", "sigma", "clip_norm")}
        # Methods without a clip norm get the norm of the remaining methods.
        start["clip_norm"] = start["clip_norm"] or _first_norm(found)
        for layer, key in ((row["layer"], "ratio"), ("cosine", "cosine")):
            if key not in row:
                continue
            size = row["parameters"] if key == "ratio" else ""
            known = {**start, "moment": row["moment"], "layer": layer}
            place = tuple(known.values())
            rows.setdefault(place, {**known, "parameters": size})[name] = row[key]
    return list(rows.values())


def _first_norm(found: Found) -> Any:
    return next((run.clip_norm for run in found if run.clip_norm is not None), "")


def results(found: Found) -> list[dict[str, Any]]:
    """A row for each setting: accuracy over the repeats, and privacy."""
    groups: dict[tuple, list] = {}
    for run, entry in found.items():
        groups.setdefault(run[:-1], []).append((run, entry))
    rows = []
    for members in groups.values():
        run, entry = members[0]
        paths = [[100 * r["test_accuracy"] for r in e["rows"]] for _, e in members]
        last = [path[-1] for path in paths]
        columns = _columns(run)
        del columns["repeat"]
        rows.append(
            {
                **columns,
                "last": round(float(np.mean(last)), 2),
                "low": round(min(last), 2),
                "high": round(max(last), 2),
                "best": round(float(np.mean([max(path) for path in paths])), 2),
                "runs": len(members),
                "epsilon": entry.get("epsilon", ""),
                "relation": entry.get("relation", "not private"),
                "mu": entry.get("mu", ""),
                "seconds": round(
                    float(np.mean([e["rows"][-1]["seconds"] for _, e in members])), 1
                ),
            }
        )
    return rows


def shown_in(noise: str, row: Mapping[str, Any]) -> bool:
    """Whether a run or a row of results belongs to a comparison."""
    clip = row["method"].split(":")[-1]
    return clip not in ("full", "scaled") or row["equal_privacy"] == (
        noise == "equal_privacy"
    )


def _matches(row: Mapping[str, Any], place: Mapping[str, Any]) -> bool:
    return all(row[key] in ("", None, value) for key, value in place.items())


def places(
    rows: Rows, keys: Sequence[str] = ("batch_size", "sigma", "clip_norm")
) -> list[dict[str, Any]]:
    """Every combination of values that was run."""
    values = {
        key: sorted({row[key] for row in rows} - {"", None}) or [""] for key in keys
    }
    return [
        dict(zip(keys, chosen, strict=True))
        for chosen in itertools.product(*values.values())
    ]


def findings(rows: Rows, noises: Sequence[str], by_layer: Rows = ()) -> list[str]:
    """The findings in words; `by_layer` are the rows of `ratios`."""
    texts = []
    for place in places(rows):
        for noise in noises:
            mine = {
                row["method"]: row
                for row in rows
                if _matches(row, place) and shown_in(noise, row)
            }
            if len(mine) > 1:
                texts.append(_order(place, noise, mine))
                texts += _verdicts(place, noise, mine)
    texts += _trends(rows)
    for row in by_layer:
        if row["layer"] == "cosine":
            names = [key for key in row if key.split(":")[-1] != key]
            ordered = sorted(names, key=lambda name: -row[name])
            texts.append(
                f"{_values(row)}, {row['moment']} of training: cosine of what a step "
                "releases with its gradient (* sigma / sqrt(L)): "
                + ", ".join(f"{name} {row[name]:.4f}" for name in ordered)
                + "."
            )
    return texts


def _trends(rows):
    """The accuracy of each method as a single number changes."""
    for key in _WORDS:
        lines: dict[str, list] = {}
        for row in sorted(rows, key=lambda row: row[key] or 0):
            if row[key] != "":
                place = {**row, key: ""}
                name = Run(*(place.get(k) for k in Run._fields)).setting
                lines.setdefault(name, []).append(row)
        for name, mine in lines.items():
            if len(mine) > 1:
                found = [f"{row['last']:.1f} at {row[key]:g}" for row in mine]
                yield f"{name}, last epoch, %, by {_WORDS[key]}: {', '.join(found)}."


def _order(place, noise, mine) -> str:
    ordered = sorted(mine.values(), key=lambda row: -row["last"])
    names = [
        f"{row['method']} {row['last']:.1f}"
        + (f" ({row['low']:.1f} to {row['high']:.1f})" if row["runs"] > 1 else "")
        for row in ordered
    ]
    text = f"{_where(place, noise)}, last epoch, %: {', '.join(names)}."
    spent = [row["epsilon"] for row in ordered if row["epsilon"] != ""]
    if spent and max(spent) > 1.01 * min(spent):
        text += f" NOT equally private: epsilon {min(spent):.3g} to {max(spent):.3g}."
    return text


def _where(place, noise) -> str:
    return f"{_values(place)}, at {_TITLES[noise]}"


def _verdicts(place, noise, mine):
    for one, other, claim in _CLAIMS:
        if one not in mine or other not in mine:
            continue
        a, b = mine[one], mine[other]
        gap = a["last"] - b["last"]
        apart = a["low"] > b["high"] or b["low"] > a["high"]
        if min(a["runs"], b["runs"]) < 2:
            words = "one run each, so that chance is not excluded"
        else:
            words = f"the runs' ranges {'are apart' if apart else 'overlap'}"
        came = "as claimed" if gap > 0 else "against the claim"
        yield (
            f"Claim: {claim}. {_where(place, noise)}: {one} less {other} is "
            f"{gap:+.1f} points, {came}; {words}."
        )


def figures(found: Found, rows: Rows, noises: Sequence[str], title: str) -> dict:
    """Accuracy by epoch, and by each setting that has more than one value."""
    made = {"epochs": _by_epoch(found, rows, noises, title)}
    for key in _WORDS:
        if len({row[key] for row in rows} - {""}) > 1:
            made[key] = _by_value(key, rows, noises, title)
    return made


def _panels(rows: Sequence[Mapping], noises: Sequence[str], title: str):
    """A figure with a row of axes for each place, a column for each comparison."""
    height = 0.9 + 3.2 * len(rows)
    picture, axes = pictures.new(
        1.9 + 4.4 * len(noises), height, len(rows), len(noises), sharey="row"
    )
    for i, place in enumerate(rows):
        for j, noise in enumerate(noises):
            named = _values({**dict.fromkeys(_WORDS), **place})
            axes[i, j].set_title(f"{_TITLES[noise]}, {named}", fontsize=9.5)
        axes[i, 0].set_ylabel("test accuracy (%)", fontsize=9)
    pictures.title(picture, title)
    return picture, axes


def _looks(rows: Rows) -> dict[str, int]:
    """Each method has the same style in all panels."""
    return {m: k for k, m in enumerate(dict.fromkeys(row["method"] for row in rows))}


def _legend(picture, axes):
    known = {}
    for ax in axes.flat:
        known |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    picture.legend(
        known.values(), known.keys(), loc="outside right center", fontsize=8.5
    )


def _by_epoch(found, rows, noises, title):
    where, looks = places(rows), _looks(rows)
    picture, axes = _panels(where, noises, f"{title}: mean and range over runs")
    for i, place in enumerate(where):
        seen = []
        for j, noise in enumerate(noises):
            ax = axes[i, j]
            paths: dict[str, list] = {}
            for run, entry in found.items():
                row = run._asdict()
                if _matches(row, place) and shown_in(noise, row):
                    paths.setdefault(run.method, []).append(entry["rows"])
            for method, runs in paths.items():
                epochs = [row["epoch"] for row in runs[0]]
                values = 100 * np.array(
                    [[row["test_accuracy"] for row in one] for one in runs]
                )
                look = pictures.style(looks[method], marked=len(epochs) < 15)
                ax.plot(epochs, values.mean(axis=0), label=method, **look)
                ax.fill_between(
                    epochs,
                    values.min(axis=0),
                    values.max(axis=0),
                    color=look["color"],
                    alpha=0.18,
                    lw=0,
                )
                seen += values.ravel().tolist()
            ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
            if i == len(where) - 1:
                ax.set_xlabel("epoch")
        plotting.accuracy_axis(axes[i, 0], seen, most=100)
    _legend(picture, axes)
    return picture


def _by_value(key, rows, noises, title):
    where = places(rows, [other for other in _WORDS if other != key])
    looks = _looks(rows)
    picture, axes = _panels(where, noises, f"{title}: last epoch, mean and range")
    for i, place in enumerate(where):
        seen = []
        for j, noise in enumerate(noises):
            ax = axes[i, j]
            mine: dict[str, list] = {}
            for row in rows:
                if _matches(row, place) and shown_in(noise, row):
                    mine.setdefault(row["method"], []).append(row)
            for method, points in mine.items():
                points = sorted(points, key=lambda row: row[key])
                middle = np.array([p["last"] for p in points])
                look = pictures.style(looks[method])
                seen += [v for p in points for v in (p["low"], p["high"])]
                if points[0][key] == "":
                    look.pop("marker"), look.pop("markersize")
                    ax.axhline(middle[0], label=method, lw=1, **look)
                    continue
                ax.errorbar(
                    [p[key] for p in points],
                    middle,
                    yerr=[
                        middle - [p["low"] for p in points],
                        [p["high"] for p in points] - middle,
                    ],
                    label=method,
                    capsize=3,
                    **look,
                )
            ax.set_xscale("log")
            ticks = sorted({row[key] for row in rows} - {""})
            ax.set_xticks(ticks, [f"{v:g}" for v in ticks])
            ax.xaxis.set_minor_locator(ticker.NullLocator())
            if i == len(where) - 1:
                ax.set_xlabel(_WORDS[key])
        plotting.accuracy_axis(axes[i, 0], seen, most=100)
    _legend(picture, axes)
    return picture
