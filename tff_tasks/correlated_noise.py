r"""Does adaptive clipping keep what correlated noise gains? Federated, equal epsilon.

    python -m tff_tasks.correlated_noise --run_flags="--rounds=80 --num_clients=400"

Noise that is independent over the rounds against a tree, a banded Toeplitz matrix and
buffers, each under a fixed clip norm and under the median of the clients' norms, which
is followed privately (Andrew et al. 2021). Clients take part in a fixed order: nothing
is amplified by sampling. Every run has the same epsilon and delta, and following the
median is paid for from that budget.

The server's learning rate is chosen for each noise and clip by equally many runs, which
have a separate seed and are measured on half of the test clients; fresh runs, with new
cohorts, weights and noise, measure the choice on the other half. Every run is kept with
its statement in OUTPUT_DIR/trials.jsonl, and a study that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import shlex
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import tfdpclip as dpc
from driver_kit import intervals, noise_studies, programs, settings
from tff_tasks import command
from tff_tasks.client_files import DataFileError
from tff_tasks.config import CORRELATED, INITIAL_CLIP, RunConfig
from tff_tasks.registry import task_class
from tff_tasks.task import SettingsError

_CHOICE, _TEST = noise_studies.CHOICE, noise_studies.TEST
CLIPS = ("fixed", "adaptive")
_NOISES = (noise_studies.INDEPENDENT, "tree", "toeplitz", "buffered")
# Flags that the study sets, for all runs or for each.
_OWN = (
    *("noise", "clipping", "clip", "count_stddev", "noise_multiplier", "delta"),
    *("server_learning_rate", "sampling", "seed", "eval_split", "output_dir"),
    *("engine", "secure", "layerwise", "epsilon_budget", "log_cohorts"),
)
#: Settings that do not change a measurement.
_FREE = (
    *("noises", "clips", "server_learning_rates", "repeats", "report_only"),
    *("figure_format", "output_dir"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a study.

    Raises:
      ValueError: if a setting is out of range or does not go with the rest.
    """

    task: str = settings.words("digits", "The benchmark.")
    run_flags: str = settings.words(
        "", "Flags of all runs, as in --run_flags='--data_dir=data --rounds=100'."
    )
    noises: tuple[str, ...] = settings.choices(_NOISES, _NOISES, "Which noises.")
    clips: tuple[str, ...] = settings.choices(CLIPS, CLIPS, "Which clip rules.")
    epsilon: float = settings.number(8.0, "Of every run.", above=0)
    delta: float | None = settings.number(
        None, "Of every run. Default: population^-1.1.", good=1e-3, above=0, below=1
    )
    fixed_clip: float | None = settings.number(
        None, "The norm of fixed. Default: the benchmark's.", good=0.3, above=0
    )
    initial_clip: float = settings.number(
        INITIAL_CLIP, "The norm that adaptive starts from.", above=0
    )
    count_share: float = settings.number(
        0.1,
        "Of adaptive's budget (1 / z^2), what goes into counting the clients that are "
        "not clipped; the same for every noise.",
        above=0,
        below=1,
    )
    server_learning_rates: tuple[float, ...] = settings.numbers(
        (0.1, 0.32, 1), "The server's learning rates to choose from.", above=0
    )
    repeats: int = settings.count(5, "Fresh runs of the chosen rate.", least=2)
    seed: int = settings.count(1, "Of the runs that rates are chosen by.", least=0)
    report_only: bool = settings.switch(
        False, "Train nothing: report the noises and clips whose runs are all kept."
    )
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("federated_correlated_noise")

    def __post_init__(self):
        settings.check(self)
        if not task_class(self.task).higher_is_better:
            raise ValueError(
                f"task={self.task} is measured by a loss; gains are of metrics of "
                "which more is better, for example task=digits."
            )
        self.base()

    def base(self) -> RunConfig:
        """The common settings of all runs.

        Raises:
          ValueError: if the flags are unknown, or are the study's own.
        """
        given = shlex.split(self.run_flags)
        names = {part.split("=")[0].lstrip("-").removeprefix("no") for part in given}
        for name in _OWN:
            if {name, name.removeprefix("no")} & names:
                raise ValueError(
                    f"run_flags: the study sets --{name} itself; leave it out."
                )
        base = command.config_from(self.task, given)
        return dataclasses.replace(
            base,
            engine="local",
            sampling="fixed_order",
            eval_split="validation",
            rounds_per_checkpoint=base.rounds,
            tensorboard=False,
            quiet=True,
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """The noise and privacy of the runs of a noise kind.

    Attributes:
      noise_multiplier: z, of the whole budget.
      sensitivity: how far a client moves the sum before noise, in clip norms.
      deviation: root mean square, over the rounds, of the noise in a weight, in clip
        norms over the clients of a round, times the server's learning rate.
      count_stddev: of adaptive's rule: noise on the count, over the sensitivity.
      fraction_stddev: noise of the fraction of clients that adaptive sees in a round.
    """

    noise_multiplier: float
    sensitivity: float
    deviation: float
    count_stddev: float
    fraction_stddev: float


def planned(noise: str, base: RunConfig, population: int, used: Settings) -> Plan:
    """The noise that a budget takes: a function of public numbers.

    *Formal guarantees*: z is the least with which all rounds, in a fixed order of
    clients, stay within (epsilon, delta); each client is replaced by a client that
    contributes nothing. Counting takes `count_share` of it: with noise of deviation z /
    (2 sqrt(share)) on a count that one client moves by 1/2 at most, the sum has z /
    sqrt(1 - share) of the clip norm left, and both together are one release of
    multiplier z (Andrew et al. 2021, section 2.1).

    Args:
      noise: one of the study's.
      base: the common settings.
      population: the number of clients.
      used: the study.
    """
    named = dataclasses.replace(base, noise=_noise_flag(noise))
    scheme, correlated = named.scheme(population), named.correlated(population)
    matrix = None if correlated is None else correlated.matrix
    z = dpc.accounting.noise_multiplier(
        used.epsilon,
        used.delta or population**-1.1,
        named.rounds,
        scheme,
        named.accountant,
        unit="client",
        matrix=matrix,
    )
    sensitivity = 1.0 if correlated is None else correlated.sensitivity
    rows = (matrix or dpc.correlated.Independent()).deviations(
        named.rounds, dpc.correlated.Workload(named.server_momentum)
    )
    count_stddev = z / (2 * math.sqrt(used.count_share))
    return Plan(
        z,
        sensitivity,
        float(z * sensitivity * math.sqrt(np.mean(rows**2))),
        count_stddev,
        count_stddev * sensitivity / named.clients_per_round,
    )


def _noise_flag(noise: str) -> str:
    return noise if noise in CORRELATED else "central"


def _fixed_clip(used: Settings) -> float:
    return used.fixed_clip or task_class(used.task).paper.fixed_clip


def config_of(
    used: Settings, noise: str, plan: Plan, clip: str, rate: float, seed: int | None
) -> RunConfig:
    """The settings of a run.

    Args:
      used: the study.
      noise: one of the study's.
      plan: of this noise.
      clip: one of the study's.
      rate: of the server.
      seed: of a run that chooses a rate; None for a fresh run.
    """
    adaptive = clip == "adaptive"
    return dataclasses.replace(
        used.base(),
        noise=_noise_flag(noise),
        noise_multiplier=plan.noise_multiplier,
        delta=used.delta,
        clipping=clip,
        clip=used.initial_clip if adaptive else _fixed_clip(used),
        count_stddev=plan.count_stddev if adaptive else None,
        server_learning_rate=rate,
        seed=seed,
    )


def trained(config: RunConfig, test: bool) -> dict[str, Any]:
    """Runs a benchmark; returns its metric and privacy cost.

    Args:
      config: the settings.
      test: whether to measure on the clients that chose nothing; otherwise on the
        choosing clients, as the mean over the last fifth of the rounds.
    """
    import tensorflow as tf

    # This import comes late, because it takes seconds.
    from tff_tasks import program

    began = time.monotonic()
    # Graphs of runs that are over.
    tf.keras.backend.clear_session()
    metric = task_class(config.task).metric
    # A stopped run begins anew: a second matrix within it would cost more.
    with tempfile.TemporaryDirectory() as directory:
        result = program.run(dataclasses.replace(config, output_dir=directory))
    return {
        metric: result.final[metric] if test else result.summary,
        "spent": result.epsilon,
        "private": result.private,
        "last_clip_norm": result.rows[-1].get("next_clip_norm"),
        "statement": result.statement,
        "seconds": round(time.monotonic() - began, 1),
    }


class Study:
    """Measures the runs that are missing.

    Args:
      used: the settings.
    """

    def __init__(self, used: Settings):
        self.used, self.base = used, used.base()
        task = task_class(used.task)
        self.metric = task.metric
        loaded = task(self.base.options, synthetic=self.base.synthetic)
        train = loaded.load(self.base.data_dir)["train"]
        self.population = len(train.counts)
        unchanged = {k: v for k, v in vars(used).items() if k not in _FREE}
        self.runs = noise_studies.Runs(
            used.output_dir, unchanged, self.metric, used.report_only
        )
        self.plan = functools.cache(
            lambda noise: planned(noise, self.base, self.population, used)
        )

    def score(self, noise: str, clip: str, rate: float, part: str, repeat: int):
        """The metric of a run, from the files or measured now."""
        place = {
            "noise": noise,
            "epsilon": self.used.epsilon,
            "clip": clip,
            "learning_rate": rate,
            "part": part,
            "repeat": repeat,
        }
        test = part == _TEST

        def measure():
            seed = None if test else self.used.seed + repeat
            plan = self.plan(noise)
            return trained(config_of(self.used, noise, plan, clip, rate, seed), test)

        return self.runs.score(place, measure)

    def result(self, noise: str, clip: str) -> dict[str, Any]:
        """Chooses the rate on some test clients; measures it on the rest."""
        rates = self.used.server_learning_rates
        chosen = max(rates, key=lambda rate: self.score(noise, clip, rate, _CHOICE, 0))
        scores = [
            self.score(noise, clip, chosen, _TEST, repeat)
            for repeat in range(self.used.repeats)
        ]
        return {
            "epsilon": self.used.epsilon,
            "noise": noise,
            "rule": clip,
            "learning_rate": chosen,
            **intervals.of_mean(scores, self.metric),
            "end_of_grid": chosen in (min(rates), max(rates)),
        }

    def noises(self, names: Iterable[str]) -> Iterator[dict[str, Any]]:
        """The accounting of each noise, before any training."""
        for name in names:
            facts = dataclasses.asdict(self.plan(name))
            yield {"epsilon": self.used.epsilon, "noise": name, **facts}


def run(used: Settings) -> programs.Outcome:
    """Measures the missing runs, and reports."""
    study = Study(used)
    cells = list(itertools.product(used.noises, used.clips))
    results = study.runs.results(cells, study.result, study.metric)
    gained = list(noise_studies.gains(results, study.metric))
    figures = noise_studies.Figures(
        study.metric,
        study.metric,
        (used.epsilon,),
        used.noises,
        used.clips,
        used.repeats,
        "test clients",
        "Other test clients",
    )
    base, title = study.base, task_class(used.task).title
    return programs.Outcome(
        title=f"Correlated noise under a clip that adapts: {title}",
        findings=[
            f"{base.rounds} rounds, {base.clients_per_round} of {study.population} "
            "clients in each, in a fixed order; server momentum "
            f"{base.server_momentum:g}, which toeplitz and buffered are made for.",
            *noise_studies.findings(gained, (used.epsilon,), used.clips),
        ],
        privacy=study.runs.told(),
        caveats=[
            "The statements are for one fresh run each, of the first clip. The runs "
            "that chose learning rates have a seed, are not private, and are not "
            "counted: choose on public data.",
            f"Intervals are of 95 %, of the mean of {used.repeats} runs (t), over new "
            "orders of clients, weights and noise. Clients and examples are the same.",
            "Learning rates were chosen by one run each, by the mean over its last "
            "fifth of rounds, on the half of the test clients that results leave out.",
            "end_of_grid: the best learning rate was the least or the greatest of all "
            "that were tried, and another might have been better.",
            f"The norm of fixed, {_fixed_clip(used):g}, was given, not searched.",
        ],
        tables={
            "gains": gained,
            "results": results,
            "noises": list(study.noises(dict.fromkeys(r["noise"] for r in results))),
            "runs": study.runs.rows,
        },
        figures=figures.both(results, study.runs.rows),
        texts={"results.md": noise_studies.markdown(results, study.metric)},
        shown=("results", "gains", "noises"),
        numbers={"runs": len(study.runs.rows)},
    )


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv, (DataFileError, SettingsError))


if __name__ == "__main__":
    main()
