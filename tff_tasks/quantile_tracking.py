"""Figures 1 and 2 of the paper: how a private estimate follows a quantile.

    python -m tff_tasks.quantile_tracking

Figure 1 shows the loss whose minimum is a quantile. Figure 2 shows `QuantileClip`
following quantiles of three distributions, a hundred values a round, with noise. No
federated learning takes place: only norms are clipped. Seconds.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from typing import Any

import numpy as np

import tfdpclip as dpc
from driver_kit import plotting, programs, reports, settings
from driver_kit.lazy import tf
from tfdpclip import accounting, files, pictures, sampling

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
#: The values whose loss Figure 1 draws.
VALUES = (15, 25, 28, 40, 45, 48)
FIGURE_1_QUANTILES = (0.01, 0.5, 0.75, 0.99)


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
    """The settings; defaults are the paper's."""

    output_dir: str = settings.words("runs/quantile_tracking", "Where results go.")
    rounds: int = settings.count(200, "Rounds.")
    clients_per_round: int = settings.count(100, "Values in a round.")
    initial_clip: float = settings.number(0.1, "Where estimates start.", above=0)
    clip_learning_rate: float = settings.number(0.2, "The step.", above=0)
    count_stddev: float | None = settings.number(
        None,
        "Noise on counts; 0 for none. Default: clients_per_round / 20.",
        good=5.0,
        least=0,
    )
    narrow_stddev: float = settings.number(
        0.1,
        "Deviation of the logarithm in the second distribution. The paper's 0.1 may be "
        "a variance: then it is 0.316.",
        above=0,
    )
    population: int = settings.count(10**6, "Clients, for the privacy statement.")
    delta: float | None = settings.number(
        None, "Default: population^-1.1.", good=1e-6, above=0, below=1
    )
    seed: int | None = settings.count(None, "Repeats the run.", good=1, least=0)
    figure_format: tuple[str, ...] = settings.figure_format()

    def __post_init__(self):
        settings.check(self)
        if self.clients_per_round > self.population:
            raise ValueError(
                "population must be at least clients_per_round, got "
                f"{self.population}; for example population=1000000."
            )


def distributions(config: TrackingConfig) -> list[tuple[str, float, float]]:
    """Name, mean and deviation of the logarithm of each distribution."""
    return [
        ("exp(N(0, 1))", 0.0, 1.0),
        (f"exp(N(0, {config.narrow_stddev:g}))", 0.0, config.narrow_stddev),
        ("exp(N(log 10, 1))", float(np.log(10)), 1.0),
    ]


def true_quantile(mean: float, stddev: float, quantile: float) -> float:
    """The quantile of a log-normal distribution."""
    normal = statistics.NormalDist(mean, stddev)
    return float(np.exp(normal.inv_cdf(quantile)))


def pinball_loss(clip: np.ndarray, values: np.ndarray, quantile: float) -> np.ndarray:
    """The average loss of each clip norm; its minimum is at the quantile.

    ``(1 - q) (C - x)`` for x at most C, ``q (x - C)`` for larger x.

    >>> pinball_loss(np.array([28.0, 34.0, 40.0]), np.array(VALUES), 0.5).round(6)
    array([5.416667, 5.416667, 5.416667])
    """
    gap = np.subtract.outer(clip, values)
    return np.where(gap >= 0, (1 - quantile) * gap, -quantile * gap).mean(axis=-1)


def track(
    config: TrackingConfig, mean: float, stddev: float, quantile: float, rng
) -> np.ndarray:
    """The estimate before every round and after the last: `[rounds + 1]`."""
    # These imports come late, because they take seconds.
    from tfdpclip.mechanism import Mechanism
    from tfdpclip.noise import GaussianNoise

    m = config.clients_per_round
    rule = dpc.QuantileClip(
        target_quantile=quantile,
        initial_norm=config.initial_clip,
        learning_rate=config.clip_learning_rate,
        count_stddev=count_stddev(config),
    )
    # Nothing is released but the count, whose noise is given.
    mechanism = Mechanism(rule, noise_multiplier=0.0, records=m)
    noise = GaussianNoise(None if config.seed is None else int(rng.integers(2**31)))

    @tf.function
    def follow(state, norms):
        _, bits = mechanism.clip(norms, state)
        counts = tf.reduce_sum(bits, axis=0)
        return mechanism.release(state, [], counts, noise).next_state

    state = rule.initial_state()
    path = [float(rule.clip_norm(state))]
    for _ in range(config.rounds):
        norms = np.exp(rng.normal(mean, stddev, m)).astype(np.float32)
        state = follow(state, tf.constant(norms))
        path.append(float(rule.clip_norm(state)))
    return np.array(path)


def count_stddev(config: TrackingConfig) -> float:
    """The noise on the count; by default a twentieth of the values."""
    if config.count_stddev is None:
        return config.clients_per_round / 20
    return config.count_stddev


def run(config: TrackingConfig) -> dict[str, np.ndarray]:
    """All paths, by distribution and quantile, as in ``exp(N(0, 1)) q=0.5``."""
    rng = np.random.default_rng(config.seed)
    return {
        f"{name} q={quantile:g}": track(config, mean, stddev, quantile, rng)
        for name, mean, stddev in distributions(config)
        for quantile in QUANTILES
    }


def statement(config: TrackingConfig) -> str:
    """The privacy cost of following a quantile, in two conventions."""
    m, stddev = config.clients_per_round, count_stddev(config)
    if stddev == 0:
        return "Without noise nothing is private."
    delta = config.delta or config.population**-1.1
    fixed = sampling.FixedSize(m, config.population)
    paper = accounting.event_epsilon(
        fixed.event(stddev, config.rounds, unit="client", sensitivity=1.0), delta, "rdp"
    )
    ours = accounting.epsilon(
        2 * stddev, config.rounds, sampling.Poisson(m / config.population), delta
    )
    return (
        f"Following one quantile for {config.rounds} rounds, {m} of "
        f"{config.population} clients in each, noise {stddev:g} on the count, delta "
        f"{delta:.4g}: epsilon {ours:.3g} (Poisson cohorts, add or remove one client: "
        f"a bit of +-1/2 moves the sum by 1/2), or {paper:.3g} as the paper has it "
        "(fixed-size cohorts, replace one, a bit of 0 or 1, Renyi accounting)."
        + (" NOT private: a seed was fixed." if config.seed is not None else "")
    )


def plot_losses() -> Any:
    """Figure 1."""
    picture, axes = pictures.new(6.5, 4)
    one = axes[0, 0]
    clips = np.linspace(10, 55, 451)
    for colour, quantile in zip(pictures.COLORS, FIGURE_1_QUANTILES, strict=False):
        losses = pinball_loss(clips, np.array(VALUES, float), quantile)
        one.plot(clips, losses, color=colour, label=f"quantile {quantile:g}")
        least = losses <= losses.min() + 1e-9
        one.plot(clips[least], losses[least], color=colour, linewidth=5, alpha=0.4)
        one.plot(clips[least][0], losses[least][0], "o", color=colour, markersize=6)
    one.plot(VALUES, np.zeros(6), "|", color="black", markersize=14, clip_on=False)
    one.set_xlabel(f"clip norm (ticks: the values {', '.join(map(str, VALUES))})")
    one.set_ylabel("average loss")
    one.set_ylim(0, None)
    one.legend(fontsize=9)
    pictures.title(picture, "The loss is least at the quantile (thick)")
    return picture


def plot_paths(config: TrackingConfig, paths: dict[str, np.ndarray]) -> Any:
    """Figure 2."""
    picture, axes = pictures.new(13.8, 4.2, 1, 3)
    for one, (name, mean, stddev) in zip(axes[0], distributions(config), strict=True):
        for colour, quantile in zip(pictures.COLORS, QUANTILES, strict=False):
            one.plot(
                paths[f"{name} q={quantile:g}"],
                color=colour,
                linewidth=1.3,
                label=f"{quantile:g}",
            )
            true = true_quantile(mean, stddev, quantile)
            one.axhline(true, color=colour, linestyle=":", linewidth=1)
        one.set_yscale("log")
        one.set_title(f"values {name}", fontsize=11)
        one.set_xlabel("round")
    axes[0, 0].set_ylabel("estimate (dotted: the true quantile)")
    axes[0, 1].legend(title="quantile", fontsize=8, title_fontsize=8, loc="lower right")
    m, stddev = config.clients_per_round, count_stddev(config)
    pictures.title(
        picture,
        f"Estimates of five quantiles: {m} values a round, noise {stddev:g} on the "
        "count",
        fontsize=12,
    )
    return picture


def write(config: TrackingConfig) -> str:
    """Runs, writes the table and both figures, and returns the report."""
    directory = pathlib.Path(config.output_dir)
    files.prepare_directory(directory)
    paths = run(config)
    rows = [
        {"round": k, **{name: f"{v:.6g}" for name, v in zip(paths, row, strict=True)}}
        for k, row in enumerate(zip(*paths.values(), strict=True))
    ]
    files.write_atomically(directory / "tracking.csv", reports.table_text(rows))
    for number, picture in ((1, plot_losses()), (2, plot_paths(config, paths))):
        plotting.save_as(picture, directory / f"figure_{number}", config.figure_format)
    lines = [
        "True quantiles, and the average of the last quarter of the estimates:",
        "",
    ]
    quarter = max(1, config.rounds // 4)
    for name, mean, stddev in distributions(config):
        pairs = [
            f"{true_quantile(mean, stddev, q):.3g} ({np.mean(p[-quarter:]):.3g})"
            for q in QUANTILES
            for p in [paths[f"{name} q={q:g}"]]
        ]
        lines.append(f"  {name:<18} " + "  ".join(pairs))
    lines += ["", statement(config), "", f"Written to {directory}"]
    text = "\n".join(lines) + "\n"
    files.write_atomically(directory / "report.txt", text)
    return text


if __name__ == "__main__":
    programs.run_program(__doc__, TrackingConfig, write, errors=(ValueError,))
