r"""Asks how to train privately on people who have several examples each.

    python -m keras_examples.people_study --public=DIR --private=DIR

The decoder over bytes of keras_examples.fine_tune learns --public, and then, with LoRA,
speeches of --private, plays in which a person is a speaker. Neighbours differ in one
speaker. Two ways have the same budget, the same number of steps, and as many rows in a
step (Charles et al. 2024): speakers are drawn, and k speeches of each, whose mean
gradient is clipped once; or speeches are drawn, each is clipped, and k speeches of a
speaker at most are in the data. The measure is the loss of the speeches of speakers
that were left out, in nats per byte less than the public model's. The measurements are
kept in OUTPUT_DIR/trials.jsonl, and a run that was stopped goes on.
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
from tfdpclip import accounting, pictures, sampling

#: The drawn unit.
WAYS = ("people", "examples")
# Settings that do not change a kept line.
_FREE = ("ways", "per_person", "learning_rates", "seeds", "figure_format", "output_dir")
_TUNING_SEED = 1000


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    public: str | None = settings.words(None, "Public texts, or directories of them.")
    private: str | None = settings.words(None, "Plays whose speakers are the people.")
    public_epochs: int = settings.count(3, "How often to go through the public texts.")
    length: int = settings.count(48, "Tokens of a speech; the rest is cut.", least=4)
    layers: int = settings.count(2, "Blocks of the decoder.")
    width: int = settings.count(48, "Its width, a multiple of 4.")
    rank: int = settings.count(4, "Of the update that is trained, LoRA.")
    ways: tuple[str, ...] = settings.choices(WAYS, WAYS, "What is drawn.")
    per_person: tuple[int, ...] = settings.numbers(
        (1, 2, 4, 8, 16, 32), "Speeches of a speaker.", integer=True, least=1
    )
    batch_size: int = settings.count(32, "Expected number of speakers per step.")
    epochs: int = settings.count(20, "How often to draw each speaker, on average.")
    epsilon: float = settings.number(8.0, "The budget for a speaker.", above=0)
    delta: float = settings.number(
        1e-3, "Below 1 / number of speakers.", above=0, below=1
    )
    learning_rates: tuple[float, ...] = settings.numbers(
        (1e-3, 3e-3, 1e-2), "Among which each way chooses.", above=0
    )
    seeds: int = settings.count(3, "Runs of each kind.", least=2)
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("people_study")


class Study:
    """The public model, the speeches, and their measurements."""

    def __init__(self, used: Settings):
        if not used.public or not used.private:
            raise settings.UsageError(
                "flags --public and --private: say which texts, --public=DIR "
                "--private=DIR."
            )
        self.used = used
        records, people = text_records.speeches(used.private, "--private")
        directory = pathlib.Path(used.output_dir)
        shape = tiny_language.Shape(used.length, used.layers, used.width)
        asked = dataclasses.asdict(used)
        asked = {k: v for k, v in asked.items() if k not in _FREE}
        self.known = kept.Kept(directory / "trials.jsonl", asked)
        values = fine_tuning.pretrained(
            directory / "public.npz", shape, used.public, used.public_epochs
        )
        self.network = fine_tuning.Tiny(shape, values)
        names = np.unique(people)
        # Speakers, and not speeches, are left out.
        left_out = np.random.default_rng(0).permutation(names)[: len(names) * 15 // 100]
        test = np.isin(people, left_out)
        self.people = people[~test]
        self.rows, self.test = (
            self.network.rows([r for r, own in zip(records, part, strict=True) if own])
            for part in (~test, test)
        )
        self.before = fine_tuning.score(self.network.model("full", 1), self.test)

    @functools.cached_property
    def speakers(self) -> int:
        """How many people there are."""
        return len(np.unique(self.people))

    def plan(self, per_person: int) -> dpc.keras.PrivacyPlan:
        """A new plan that draws speakers."""
        return dpc.keras.PrivacyPlan(
            self.used.epsilon,
            self.used.delta,
            examples=self.speakers,
            batch_size=self.used.batch_size,
            epochs=self.used.epochs,
            per_person=per_person,
        )

    def scheme(self, per_person: int) -> sampling.CappedPoisson:
        """Draws as many rows in a step as `plan` does, of speeches."""
        _, counts = np.unique(self.people, return_counts=True)
        there = np.minimum(counts, per_person).sum()
        rows = self.used.batch_size * there / self.speakers
        return sampling.CappedPoisson(float(rows / there), per_person)

    def noise(self, way: str, per_person: int) -> float:
        """The noise multiplier of a way."""
        plan = self.plan(per_person)
        if way == "people":
            return plan.noise_multiplier
        return accounting.noise_multiplier(
            self.used.epsilon,
            self.used.delta,
            plan.steps,
            self._batches(per_person, None).scheme,
            unit="person",
        )

    def _batches(self, per_person, seed) -> sampling.Batches:
        scheme = self.scheme(per_person)
        return scheme.batches(self.rows.data, people=self.people, seed=seed)

    def trial(self, way, per_person, learning_rate, seed) -> dict[str, Any]:
        """The results of a run, measured or known."""
        place = (way, per_person, learning_rate, seed)
        return self.known.get(place, functools.partial(self._measure, *place))

    def _measure(self, way, per_person, learning_rate, seed) -> dict[str, Any]:
        started = time.monotonic()
        tf.keras.utils.set_random_seed(seed)
        model = self.network.model("lora", self.used.rank)
        plan = self.plan(per_person)
        # Each way checks itself in its first run; a check costs as much as a run.
        first = seed == _TUNING_SEED and learning_rate == self.used.learning_rates[0]
        options: dict[str, Any] = {"seed": seed}
        if not first:
            options |= {"check_gradients": "never"}
        if way == "people":
            optimizer = plan.optimizer(dpc.keras.DPAdam, learning_rate, **options)
            batches = plan.batches(self.rows.data, people=self.people, seed=seed)
            callbacks, epochs = plan.callbacks, plan.epochs
        else:
            batches = self._batches(per_person, seed)
            optimizer = dpc.keras.DPAdam(
                learning_rate,
                noise_multiplier=self.noise(way, per_person),
                expected_batch_size=batches.expected_batch_size,
                unit="person",
                **options,
            )
            budget = dpc.keras.PrivacyBudget(
                1.001 * self.used.epsilon, self.used.delta, batches
            )
            callbacks, epochs = [budget], 1
            batches = batches.repeat()
        model.compile(optimizer, fine_tuning.LOSS)
        model.fit(
            batches,
            epochs=epochs,
            steps_per_epoch=plan.steps // epochs,
            callbacks=callbacks,
            shuffle=False,
            verbose=0,
        )
        gain, half = fine_tuning.score(model, self.test).gain(self.before)
        tf.keras.backend.clear_session()
        return {
            "gain": gain,
            "half_width": half,
            "seconds": time.monotonic() - started,
        }


def run(used: Settings) -> programs.Outcome:
    """Runs the study."""
    study = Study(used)
    kinds = list(itertools.product(used.ways, used.per_person))
    total = len(kinds) * (len(used.learning_rates) + used.seeds)
    bar, count = progress.Progress("measuring", total, unit="run"), itertools.count(1)
    table, tuning = [], []
    for way, k in kinds:
        tried = []
        for rate in used.learning_rates:
            gain = study.trial(way, k, rate, _TUNING_SEED)["gain"]
            tried.append(dict(way=way, per_person=k, learning_rate=rate, gain=gain))
            bar.show(next(count), [f"{way}, {k}, rate {rate:g}: {gain:.4f}"])
        tuning += tried
        rate = max(tried, key=lambda row: row["gain"])["learning_rate"]
        found = []
        for seed in range(used.seeds):
            found.append(study.trial(way, k, rate, seed))
            bar.show(next(count), [f"{way}, {k}: {found[-1]['gain']:.4f}"])
        z = study.noise(way, k)
        records = used.batch_size
        if way == "examples":
            records = study._batches(k, None).expected_batch_size
        table.append(
            {
                "way": way,
                "per_person": k,
                "noise_multiplier": z,
                "noise_of_the_mean": z / records,
                "learning_rate": rate,
                **intervals.of_mean([f["gain"] for f in found], "gain"),
                "test_half_width": float(np.mean([f["half_width"] for f in found])),
                "seconds": float(np.median([f["seconds"] for f in found])),
            }
        )
    plan = study.plan(1)
    return programs.Outcome(
        title="Private training on people with several examples, two ways",
        findings=[
            f"{len(study.people)} speeches of {study.speakers} speakers; {plan.steps} "
            f"steps. The public model has perplexity {study.before.perplexity:.4g} per "
            f"byte on {len(study.test.y)} speeches of other speakers.",
            *_findings(used, table),
        ],
        privacy=f"of one run each, for a speaker: ({used.epsilon:g}, {used.delta:g})-"
        f"differential privacy in {plan.steps} steps.",
        caveats=[
            "Seeds make runs repeatable and not private; the plays are public. The "
            "runs that chose learning rates are not counted.",
            "Learning rates were chosen by the loss of the test speeches, for each way "
            "and k in one run for each rate with a seed of its own.",
            f"low and high: a 95 % interval of the mean of {used.seeds} runs (t). "
            "test_half_width: half a 95 % interval over test speeches, of one run.",
            "noise_of_the_mean: in clip norms; of a speaker's clipped mean, or of "
            "clipped speeches.",
        ],
        tables={"results": table, "tuning": tuning},
        figures={"gains": _plot(used, table)},
        shown=("results", "tuning"),
        numbers={"public_perplexity": study.before.perplexity},
    )


def _findings(used, table) -> list[str]:
    best = {}
    for way in used.ways:
        mine = [row for row in table if row["way"] == way]
        best[way] = max(mine, key=lambda row: row["gain"])
    texts = [
        f"{way} drawn: k = {row['per_person']} is best, {row['gain']:.4f} nats per "
        f"byte ({row['low']:.4f} to {row['high']:.4f})."
        for way, row in best.items()
    ]
    if len(best) == 2:
        gap, half, words = intervals.verdict(best["people"], best["examples"], "gain")
        texts.append(
            f"The best of people less the best of examples: {gap:+.4f} +- {half:.4f}, "
            f"{words}."
        )
    return texts


def _plot(used, table):
    picture, axes = pictures.new(10.5, 3.8, 1, 2)
    for k, way in enumerate(used.ways):
        mine = [row for row in table if row["way"] == way]
        places = [row["per_person"] * (1 + 0.03 * (k - 0.5)) for row in mine]
        axes[0, 0].errorbar(
            places,
            [row["gain"] for row in mine],
            yerr=[row["high"] - row["gain"] for row in mine],
            capsize=2,
            label=f"{way} are drawn",
            **pictures.style(k),
        )
        noises = [row["noise_of_the_mean"] for row in mine]
        axes[0, 1].plot(places, noises, **pictures.style(k))
    for axis in axes[0]:
        axis.set_xscale("log", base=2)
        axis.set_xticks(used.per_person, [str(k) for k in used.per_person])
        axis.minorticks_off()
        axis.set_xlabel("speeches of a speaker, k")
    axes[0, 0].axhline(0, color=pictures.GREY, lw=1)
    axes[0, 0].set_ylabel("nats per byte better than the public model")
    axes[0, 0].legend(fontsize=8)
    axes[0, 1].set_yscale("log")
    axes[0, 1].set_ylabel("noise of the mean, in clip norms")
    pictures.title(picture, f"Speakers of plays, epsilon {used.epsilon:g} for each")
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
