r"""The three steps that the paper concludes with, on any benchmark.

    python -m tff_tasks.recipe --task=digits --run_flags="--engine=local" \
        --population=1000000 --epsilon=5

1. Search learning rates with adaptive clipping to the median, a small cohort and
   little noise.
2. Raise the noise until utility drops by more than 5%; keep the level before.
3. Multiply cohort and noise by the same factor, 1 or more, which keeps the noise on the
   average, until the privacy target is met (`dpc.accounting.cohort_for`). Where the
   trial meets it already, nothing is multiplied, and the report says so.

Andrew et al. (2021), section 4. Steps 1 and 2 are for public proxy data: they are
seeded and not private.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import shlex
from typing import Any

from driver_kit import programs, reports, settings
from tfdpclip import accounting
from tff_tasks import command, records, studies
from tff_tasks.config import RunConfig
from tff_tasks.registry import task_class


@dataclasses.dataclass(frozen=True)
class RecipeConfig:
    """The settings of the search, and the target."""

    task: str = settings.words("digits", "The benchmark.")
    output_dir: str | None = settings.words(
        None, "Where results go. Default: runs/recipe_TASK."
    )
    run_flags: str = settings.words(
        "", "Flags of all runs, as in --run_flags='--rounds=100'."
    )
    client_rate_factors: str = settings.words(
        "0.316,1,3.162", "What the client learning rate is multiplied by."
    )
    server_rate_factors: str = settings.words(
        "0.316,1,3.162", "What the server learning rate is multiplied by."
    )
    trial_noise: float | None = settings.number(
        None,
        "Noise multiplier of step 1. Default: the least of the benchmark's levels.",
        good=0.01,
        above=0,
    )
    noise_factor: float = settings.number(
        10**0.25, "Step 2 multiplies the noise by this.", above=1
    )
    acceptable_loss: float = settings.number(
        studies.ACCEPTABLE_LOSS, "Share of utility that may be lost.", above=0, below=1
    )
    max_steps: int = settings.count(12, "Levels of noise to try, at most.")
    epsilon: float = settings.number(5.0, "The target.", above=0)
    population: int = settings.count(10**6, "Clients of the deployment.")
    delta: float | None = settings.number(
        None, "Default: population^-1.1.", good=1e-6, above=0, below=1
    )
    sampling: str = settings.choice(
        "poisson", ("poisson", "fixed_size"), "Of the deployment."
    )
    seed: int = settings.count(1, "Of all runs.", least=0)

    def __post_init__(self):
        settings.check(self)
        task_class(self.task)
        if not self.output_dir:
            object.__setattr__(self, "output_dir", f"runs/recipe_{self.task}")
        for name in ("client_rate_factors", "server_rate_factors"):
            studies.numbers(getattr(self, name), name)
        self.base()

    def base(self) -> RunConfig:
        """The common settings of all runs."""
        flags = shlex.split(self.run_flags)
        base = command.config_from(self.task, flags)
        return dataclasses.replace(
            base, clipping="adaptive", target_quantile=0.5, quiet=True, seed=self.seed
        )


@dataclasses.dataclass(frozen=True)
class RecipeResult:
    """The results of the recipe.

    Attributes:
      client_learning_rate: of step 1.
      server_learning_rate: of step 1.
      trial: utility at little noise.
      levels: noise multiplier and utility of every level tried, in order.
      noise_multiplier: the largest acceptable one at the trial's cohort.
      plan: the cohort and noise for the target; None if the population is too small.
      problem: why there is no plan.
    """

    client_learning_rate: float
    server_learning_rate: float
    trial: float
    levels: list[tuple[float, float]]
    noise_multiplier: float
    plan: accounting.CohortPlan | None
    problem: str


def measure(config: RunConfig) -> float:
    """A run's summary, from its files if it was run before."""
    # This import comes late, because it takes seconds.
    from tff_tasks import program

    result = studies.finished(config)
    if result is None:
        program.run(config)
        result = studies.finished(config)
    better = task_class(config.task).higher_is_better
    value = studies.score(result["summary"], better)
    print(f"{pathlib.Path(config.output_dir).name}: {value:.4g}", flush=True)
    return value


def run(config: RecipeConfig) -> RecipeResult:
    r"""The three steps; a recipe that was stopped continues."""
    task = task_class(config.task)
    directory = pathlib.Path(config.output_dir)
    better = max if task.higher_is_better else min
    z = config.trial_noise or min(n for n in task.paper.noise_grid if n > 0)
    base = dataclasses.replace(config.base(), noise_multiplier=z)
    found = []
    factors = itertools.product(
        studies.numbers(config.client_rate_factors, "client_rate_factors"),
        studies.numbers(config.server_rate_factors, "server_rate_factors"),
    )
    for client, server in factors:
        changed = dataclasses.replace(
            base,
            client_learning_rate=base.client_learning_rate * client,
            server_learning_rate=base.server_learning_rate * server,
            output_dir=str(directory / f"rates_{client:g}_{server:g}"),
        )
        found.append((changed, measure(changed)))
    chosen, trial = better(found, key=lambda pair: pair[1])

    levels, kept = [(z, trial)], z
    for step in range(1, config.max_steps):
        level = z * config.noise_factor**step
        try:
            noisier = dataclasses.replace(
                chosen,
                noise_multiplier=level,
                output_dir=str(directory / f"noise_{level:.4g}"),
            )
        except ValueError:
            break  # More noise than this cohort's count allows.
        levels.append((level, measure(noisier)))
        loss = studies.relative_loss(trial, levels[-1][1], task.higher_is_better)
        if loss > config.acceptable_loss:
            break
        kept = level
    plan, problem = None, ""
    try:
        plan = accounting.cohort_for(
            config.epsilon,
            config.delta or config.population**-1.1,
            config.population,
            base.rounds,
            kept,
            base.clients_per_round,
            sampling=config.sampling,
        )
    except ValueError as error:
        problem = str(error)
    return RecipeResult(
        chosen.client_learning_rate,
        chosen.server_learning_rate,
        trial,
        levels,
        kept,
        plan,
        problem,
    )


def report(config: RecipeConfig, result: RecipeResult) -> str:
    """The result in words."""
    task = task_class(config.task)
    base = config.base()
    lines = [
        f"1. Rates: clients {result.client_learning_rate:.4g}, server "
        f"{result.server_learning_rate:.4g}; {task.metric} {result.trial:.4g} with "
        f"{base.clients_per_round} clients a round, {base.rounds} rounds.",
        "2. Noise multiplier and "
        + task.metric
        + ": "
        + ", ".join(f"{z:.3g}: {value:.4g}" for z, value in result.levels)
        + f". The largest that loses at most {config.acceptable_loss:.0%}: "
        f"{result.noise_multiplier:.4g}.",
    ]
    if result.plan is None:
        lines.append(f"3. No plan: {result.problem}")
    else:
        plan = result.plan
        lines.append(
            f"3. For epsilon {config.epsilon:g} at delta {plan.delta:.4g} with "
            f"{plan.population} clients ({plan.sampling.describe()}, {plan.accountant})"
            f": {plan.clients_per_round} clients a round, noise multiplier "
            f"{plan.noise_multiplier:.4g}, of which the sum gets "
            f"{plan.gradient_noise_multiplier:.4g}; noise {plan.count_stddev:g} on the "
            f"count. {_scaled(config.epsilon, plan)}"
        )
    lines.append("The search itself is not private; use public proxy data for it.")
    return "\n".join(lines)


def _scaled(target: float, plan: accounting.CohortPlan) -> str:
    if plan.scale > 1:
        return (
            f"That is {plan.scale:.4g} times the trial, and epsilon {plan.epsilon:.4g}."
        )
    return (
        f"That is the trial itself, which spends epsilon {plan.epsilon:.4g} of "
        f"{target:g}: nothing is scaled, since a cohort below the trial's was not "
        "tried. A trial with fewer clients a round (--run_flags='--clients_per_round="
        "...') shows whether fewer would do."
    )


def write(config: RecipeConfig) -> str:
    """Runs the recipe, writes its result and returns the report."""
    result = run(config)
    text = report(config, result)
    directory = pathlib.Path(config.output_dir)
    content: dict[str, Any] = dataclasses.asdict(dataclasses.replace(result, plan=None))
    if result.plan is not None:
        plan = dataclasses.replace(
            result.plan, sampling=result.plan.sampling.describe()
        )
        content["plan"] = dataclasses.asdict(plan)
    content["settings"] = dataclasses.asdict(config)
    records.write_atomically(directory / "recipe.json", reports.to_json(content))
    records.write_atomically(directory / "report.txt", text + "\n")
    return f"{text}\nWritten to {directory}"


if __name__ == "__main__":
    programs.run_program(__doc__, RecipeConfig, write, errors=(ValueError,))
