r"""Asks what to train of a public model on private texts, and with which clip.

    python -m keras_examples.fine_tune_study --public=DIR --private=a.txt,b.txt

The decoder over bytes of keras_examples.fine_tune learns --public, and then each
--private record by itself: all weights, LoRA of several ranks, biases, or the last
layer; and LoRA of rank 4 with fixed clip norms beside the default rule. Every way has
its own learning rate, chosen at --tuning_epsilon in runs that are not reported. The
measure is the loss of test records, in nats per byte less than the public model's. The
measurements are kept in OUTPUT_DIR/trials.jsonl, and a run that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import time
from typing import Any

import numpy as np

import tfdpclip as dpc
from driver_kit import intervals, kept, programs, progress, settings
from driver_kit.lazy import tf
from keras_examples import fine_tuning, text_records, tiny_language
from tfdpclip import pictures

#: The trained weights, by name: one of `text_records.TRAINED`, and the rank.
WAYS = {
    "full": ("full", 4),
    "LoRA 1": ("lora", 1),
    "LoRA 4": ("lora", 4),
    "LoRA 16": ("lora", 16),
    "bias": ("bias", 4),
    "head": ("head", 4),
}
_CLIPPED = "LoRA 4"
_DEFAULT = "default"
_TUNING_SEED = 1000
# Settings that do not change a kept line.
_FREE = ("epsilons", "ways", "clip_norms", "clip_epsilon", "seeds", "learning_rates")
_FREE += ("figure_format", "output_dir", "tuning_epsilon")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    public: str | None = settings.words(None, "Public texts, or directories of them.")
    private: str | None = settings.words(None, "Files of private records.")
    public_epochs: int = settings.count(3, "How often to go through the public texts.")
    length: int = settings.count(64, "Tokens of a record; the rest is cut.", least=4)
    layers: int = settings.count(2, "Blocks of the decoder.")
    width: int = settings.count(64, "Its width, a multiple of 4.")
    batch_size: int = settings.count(256, "Expected number of records per step.")
    epochs: int = settings.count(5, "How often to go through the private records.")
    delta: float = settings.delta()
    epsilons: tuple[float, ...] = settings.numbers(
        (1.0, 3.0, 8.0), "Privacy budgets.", above=0
    )
    ways: tuple[str, ...] = settings.choices(tuple(WAYS), tuple(WAYS), "What trains.")
    learning_rates: tuple[float, ...] = settings.numbers(
        (1e-3, 3e-3, 1e-2), "Among which each way chooses.", above=0
    )
    tuning_epsilon: float = settings.number(3.0, "With which it chooses.", above=0)
    clip_norms: tuple[float, ...] = settings.numbers(
        (0.01, 0.1, 1.0), f"Fixed clip norms for {_CLIPPED}.", above=0
    )
    clip_epsilon: float = settings.number(3.0, "The budget of those.", above=0)
    seeds: int = settings.count(3, "Runs of each kind.", least=2)
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("fine_tune_study")


class Study:
    """The public model, the records, and their measurements."""

    def __init__(self, used: Settings):
        if not used.public or not used.private:
            raise settings.UsageError(
                "flags --public and --private: say which texts, --public=a.txt "
                "--private=b.txt."
            )
        self.used = used
        directory = pathlib.Path(used.output_dir)
        shape = tiny_language.Shape(used.length, used.layers, used.width)
        asked = dataclasses.asdict(used)
        asked = {k: v for k, v in asked.items() if k not in _FREE}
        self.known = kept.Kept(directory / "trials.jsonl", asked)
        values = fine_tuning.pretrained(
            directory / "public.npz", shape, used.public, used.public_epochs
        )
        self.network = fine_tuning.Tiny(shape, values)
        private = text_records.split(text_records.read(used.private), 0.15)
        self.rows, self.test = (self.network.rows(part) for part in private)
        self.before = fine_tuning.score(self.network.model("full", 1), self.test)

    def plan(self, epsilon: float) -> dpc.keras.PrivacyPlan:
        """A new plan, of which nothing is spent."""
        return dpc.keras.PrivacyPlan(
            epsilon,
            self.used.delta,
            examples=len(self.rows.y),
            batch_size=self.used.batch_size,
            epochs=self.used.epochs,
        )

    def trial(self, way, epsilon, clip, learning_rate, seed) -> dict[str, Any]:
        """The results of a run, measured or known."""
        place = (way, epsilon, clip, learning_rate, seed)
        return self.known.get(place, functools.partial(self._measure, *place))

    def _measure(self, way, epsilon, clip, learning_rate, seed) -> dict[str, Any]:
        started = time.monotonic()
        tf.keras.utils.set_random_seed(seed)
        model = self.network.model(*WAYS[way])
        rule = None
        if clip != _DEFAULT:
            rule = dpc.FixedClip(float(clip), normalize=True)
        plan = self.plan(epsilon)
        # Each way checks itself in its first run; a check costs as much as a run.
        first = seed == _TUNING_SEED and learning_rate == self.used.learning_rates[0]
        checks = {"check_gradients": "never"}
        options = {} if first else checks
        fine_tuning.tune(model, self.rows, plan, learning_rate, rule, seed, **options)
        after = fine_tuning.score(model, self.test)
        gain, half = after.gain(self.before)
        tf.keras.backend.clear_session()
        return {
            "gain": gain,
            "half_width": half,
            "perplexity": after.perplexity,
            "accuracy": after.accuracy,
            "trained": int(sum(np.prod(v.shape) for v in model.trainable_variables)),
            "seconds": time.monotonic() - started,
        }


def run(used: Settings) -> programs.Outcome:
    """Runs the study."""
    study = Study(used)
    clips = [(_CLIPPED, used.clip_epsilon, f"{norm:g}") for norm in used.clip_norms]
    budgets = [(w, e, _DEFAULT) for e in used.epsilons for w in used.ways]
    total = len(used.ways) * len(used.learning_rates)
    total += used.seeds * len({*budgets, *clips})
    bar, count = progress.Progress("measuring", total, unit="run"), itertools.count(1)
    tuning, rates = [], {}
    for way in used.ways:
        for rate in used.learning_rates:
            place = (way, used.tuning_epsilon, _DEFAULT, rate, _TUNING_SEED)
            found = study.trial(*place)
            tuning.append({"way": way, "learning_rate": rate, "gain": found["gain"]})
            bar.show(next(count), [f"{way}, rate {rate:g}: {found['gain']:.4f}"])
        mine = [row for row in tuning if row["way"] == way]
        rates[way] = max(mine, key=lambda row: row["gain"])["learning_rate"]
    results: dict[tuple, list] = {}
    # Seed by seed, so that a stopped study has some runs of everything.
    for seed in range(used.seeds):
        for place in dict.fromkeys([*budgets, *clips]):
            found = study.trial(*place, rates[place[0]], seed)
            results.setdefault(place, []).append(found)
            text = f"{place[0]}, epsilon {place[1]:g}, {place[2]}: {found['gain']:.4f}"
            bar.show(next(count), [text])
    table = [_row(place, found, rates) for place, found in results.items()]
    by_place = {(r["way"], r["epsilon"], r["clip"]): r for r in table}
    return programs.Outcome(
        title="What to fine-tune privately, and with which clip",
        findings=[
            f"The public model has perplexity {study.before.perplexity:.4g} per byte "
            f"on {len(study.test.y)} test records, accuracy "
            f"{study.before.accuracy:.1%}.",
            *_findings(used, by_place, clips),
        ],
        privacy="of one run each: "
        + " ".join(
            f"({e:g}, {used.delta:g})-differential privacy with noise multiplier "
            f"{study.plan(e).noise_multiplier:.4g} in {study.plan(e).steps} steps."
            for e in used.epsilons
        ),
        caveats=[
            "Seeds make runs repeatable and not private; the texts are public. The "
            "runs that chose learning rates are not counted.",
            "Learning rates were chosen by the loss of the test records, in one run "
            f"for each rate at epsilon {used.tuning_epsilon:g} with a seed of its own.",
            f"low and high: a 95 % interval of the mean of {used.seeds} runs (t), over "
            "batches, noise and LoRA's first weights; the public model and the test "
            "records are the same. test_half_width: half a 95 % interval over test "
            "records, of one run.",
        ],
        tables={"results": table, "tuning": tuning},
        figures={"gains": _plot(used, by_place, clips)},
        shown=("results", "tuning"),
        numbers={"public_perplexity": study.before.perplexity},
    )


def _row(place, found, rates) -> dict[str, Any]:
    way, epsilon, clip = place
    mean = intervals.of_mean([f["gain"] for f in found], "gain")
    perplexity = float(np.exp(np.mean([np.log(f["perplexity"]) for f in found])))
    return {
        "way": way,
        "epsilon": epsilon,
        "clip": clip,
        "trained": found[0]["trained"],
        "learning_rate": rates[way],
        **mean,
        "test_half_width": float(np.mean([f["half_width"] for f in found])),
        "perplexity": perplexity,
        "accuracy": float(np.mean([f["accuracy"] for f in found])),
    }


def _findings(used, rows, clips) -> list[str]:
    texts = []
    for epsilon in used.epsilons:
        mine = [rows[way, epsilon, _DEFAULT] for way in used.ways]
        best = max(mine, key=lambda row: row["gain"])
        words = "a gain" if best["low"] > 0 else "no gain that its error shows"
        texts.append(
            f"epsilon {epsilon:g}: {best['way']} is best, {best['gain']:.4f} nats per "
            f"byte ({best['low']:.4f} to {best['high']:.4f}): {words} over the public "
            "model."
        )
    default = rows.get((_CLIPPED, used.clip_epsilon, _DEFAULT))
    if default and clips:
        best = max((rows[place] for place in clips), key=lambda row: row["gain"])
        gap, half, words = intervals.verdict(default, best, "gain")
        texts.append(
            f"{_CLIPPED} at epsilon {used.clip_epsilon:g}: the default clip less the "
            f"best fixed norm ({best['clip']}): {gap:+.4f} +- {half:.4f}, {words}."
        )
    return texts


def _plot(used, rows, clips):
    picture, axes = pictures.new(10.5, 3.8, 1, 2)
    for k, way in enumerate(used.ways):
        mine = [rows[way, epsilon, _DEFAULT] for epsilon in used.epsilons]
        shift = 1 + 0.02 * (k - len(used.ways) / 2)
        axes[0, 0].errorbar(
            [row["epsilon"] * shift for row in mine],
            [row["gain"] for row in mine],
            yerr=[row["high"] - row["gain"] for row in mine],
            capsize=2,
            label=f"{way} ({mine[0]['trained']:,})",
            **pictures.style(k),
        )
    axes[0, 0].set_xscale("log")
    axes[0, 0].set_xticks(used.epsilons, [f"{e:g}" for e in used.epsilons])
    axes[0, 0].minorticks_off()
    axes[0, 0].axhline(0, color=pictures.GREY, lw=1)
    axes[0, 0].set_xlabel("epsilon")
    axes[0, 0].set_ylabel("nats per byte better than the public model")
    shown = [place for place in clips if place in rows]
    default = (_CLIPPED, used.clip_epsilon, _DEFAULT)
    shown += [default] if default in rows else []
    found = [rows[place] for place in shown]
    axes[0, 1].errorbar(
        range(len(found)),
        [row["gain"] for row in found],
        yerr=[row["high"] - row["gain"] for row in found],
        fmt="o",
        capsize=2,
        color=pictures.COLORS[0],
    )
    axes[0, 1].set_xticks(range(len(found)), [row["clip"] for row in found])
    axes[0, 1].legend(
        *axes[0, 0].get_legend_handles_labels(),
        fontsize=8,
        title="what trains\n(parameters)",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )
    axes[0, 1].set_xlabel(f"clip norm, {_CLIPPED} at epsilon {used.clip_epsilon:g}")
    pictures.title(picture, "Private fine-tuning of a public model of plays")
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
