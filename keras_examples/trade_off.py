"""The power of the best attack on one record, at every rate of false alarms.

    python -m keras_examples.trade_off --epsilons=1,3,8

An attack sees everything that a run released, knows all other records, and says whether
one record was in the data. The figure has the largest share of included records that
any attack finds, against its share of errors on excluded records: exactly, from the
run's whole privacy loss, and from one epsilon and delta alone. No data are used.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from driver_kit import programs, settings
from tfdpclip import accounting, pictures, sampling


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    epsilons: tuple[float, ...] = settings.numbers(
        (1, 3, 8), "The budgets; noise is calibrated to each.", good=3, above=0
    )
    delta: float = settings.number(1e-5, "Delta of the budgets.", above=0, below=1)
    examples: int = settings.count(1000, "How many records there are.")
    batch_size: int = settings.count(100, "How many are expected in a step.")
    epochs: int = settings.count(5, "How often to go through them.")
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("trade_off")


def run(used: Settings) -> programs.Outcome:
    """Works out both curves of every epsilon."""
    if used.batch_size > used.examples:
        raise settings.UsageError(
            f"flag --batch_size={used.batch_size}: there are only {used.examples} "
            "records, for example --batch_size=100."
        )
    scheme = sampling.Poisson(used.batch_size / used.examples)
    steps = used.epochs * scheme.steps_per_epoch(used.examples)
    grid = [*np.geomspace(1e-5, 1, 81), *np.linspace(0.05, 0.95, 19), 0.001, 0.01]
    rates = tuple(map(float, np.unique(np.round(grid, 9))))
    curves, rows = [], []
    for epsilon in used.epsilons:
        z = accounting.noise_multiplier(epsilon, used.delta, steps, scheme)
        exact = accounting.attack_bounds(scheme.event(z, steps), rates)
        alone = accounting.attack_bounds_of(epsilon, used.delta, rates)
        curves += [
            {
                "epsilon": epsilon,
                "false_positive_rate": rate,
                "true_positive_rate": power,
                "by_epsilon_and_delta": other,
            }
            for rate, power, other in zip(
                rates,
                exact.true_positive_rates,
                alone.true_positive_rates,
                strict=True,
            )
        ]
        low, high = rates.index(0.001), rates.index(0.01)
        rows += [
            {
                "epsilon": epsilon,
                "noise_multiplier": z,
                "from": name,
                "at_0.1_%": bounds.true_positive_rates[low],
                "at_1_%": bounds.true_positive_rates[high],
                "advantage": bounds.advantage,
            }
            for name, bounds in (
                ("all of the privacy loss", exact),
                ("epsilon and delta alone", alone),
            )
        ]
    return programs.Outcome(
        title="What the best attack on one record finds",
        findings=[
            f"At epsilon {exact['epsilon']:g} no attack with 1 % false alarms finds "
            f"more than {accounting.attacks.percent(exact['at_1_%'])} of the records "
            "that were in the data; epsilon and delta alone would allow "
            f"{accounting.attacks.percent(alone['at_1_%'])}."
            for exact, alone in zip(rows[::2], rows[1::2], strict=True)
        ],
        privacy="no data were used: everything follows from public numbers.",
        caveats=[
            f"Poisson sampling, {steps} steps, {used.batch_size} of {used.examples} "
            f"records expected in each, delta {used.delta:g}.",
            "An upper bound for every attack, not the success of any known one: real "
            "attacks see less than all steps, and know less than all other records.",
        ],
        tables={"trade_off": curves, "attacks": rows},
        figures={"trade_off": _plot(used, curves)},
        shown=("attacks",),
    )


def _plot(used, curves):
    picture, axes = pictures.new(8.6, 4.2, 1, 2)
    for ax, scale in zip(axes[0], ("linear", "log"), strict=True):
        for k, epsilon in enumerate(used.epsilons):
            own = [row for row in curves if row["epsilon"] == epsilon]
            rates = [row["false_positive_rate"] for row in own]
            color = pictures.COLORS[k % len(pictures.COLORS)]
            ax.plot(
                rates,
                [row["true_positive_rate"] for row in own],
                color=color,
                label=f"epsilon {epsilon:g}, exact",
            )
            ax.plot(
                rates,
                [row["by_epsilon_and_delta"] for row in own],
                color=color,
                linestyle="--",
                linewidth=1,
                label=f"epsilon {epsilon:g}, by epsilon and delta alone",
            )
        line = np.geomspace(1e-5, 1, 50)
        ax.plot(line, line, color=pictures.GREY, linestyle=":", label="guessing")
        low = 0.0 if scale == "linear" else 1e-4
        ax.set(xscale=scale, yscale=scale, xlim=(low, 1), ylim=(low, 1))
        ax.set(xlabel="false alarms", ylabel="records found, at most")
    axes[0][0].legend(fontsize=7.5, loc="lower right")
    pictures.title(picture, "The best attack on one record")
    return picture


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
