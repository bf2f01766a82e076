r"""Ways to clip batches, at several batch sizes, sigmas and clip norms, side by side.

    python -m keras_examples.batch_clipping_sweep --data_dir=DIR
    python -m keras_examples.batch_clipping_sweep --dataset=digits --epochs=3 \
        --batch_sizes=32,64 --sigmas=0.5,2.5 --clip_norms=0.05,0.2

The comparisons of Nguyen, Nguyen, Nguyen and van Dijk (2023), "Batch Clipping and
Adaptive Layerwise Clipping for Differential Private Stochastic Gradient Descent". Its
sigma is relative to the sensitivity 2 C. A method is a unit and a way to clip its
gradient, as in keras_examples.batch_clipping: "batch:adaptive"; "sgd" is plain SGD.

With L layers, layerwise clipping with sigma is as private as one flat clip with sigma /
sqrt(L). So there are two comparisons: all methods at the same sigma, and "full" and
"scaled" at the privacy that the layerwise methods have.

Finished runs are kept in OUTPUT_DIR/runs.jsonl, and a sweep that was stopped goes on;
more methods, sigmas and so on may be added there.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from driver_kit import kept, programs, progress, settings
from keras_examples import (
    batch_accounts,
    batch_comparison,
    batch_settings,
    batch_signal,
    batch_training,
    training,
)
from keras_examples.batch_comparison import SGD, Run

METHODS = (
    SGD,
    *(f"{u}:{c}" for u in batch_settings.UNITS for c in batch_settings.CLIPS),
)
_DEFAULT = (SGD, "batch:adaptive", "batch:layerwise", "batch:full", "batch:scaled")
_NOISE = ("equal_sigma", "equal_privacy")
_KEPT = "runs.jsonl"
#: Settings that do not change a single run.
_FREE = (
    "data_dir",
    "methods",
    "batch_sizes",
    "sigmas",
    "clip_norms",
    "noise",
    "repeats",
    "figure_format",
    "output_dir",
)


@dataclasses.dataclass(frozen=True)
class Settings(batch_settings.Common):
    """The settings of a sweep."""

    network: str = settings.choice(
        "bn_lenet5", batch_settings.NETWORKS, "Which network."
    )
    dataset: str = settings.choice(
        "mnist", batch_settings.DATASETS, "Which images; the last two offline."
    )
    epochs: int = settings.count(10, "Epochs.")
    methods: tuple[str, ...] = settings.choices(
        _DEFAULT, METHODS, "Whose gradient is clipped, and how; or plain SGD."
    )
    batch_sizes: tuple[int, ...] = settings.numbers(
        (64,), "Images per step, m.", integer=True, least=1
    )
    sigmas: tuple[float, ...] = settings.numbers(
        (0.5,), "The paper's sigma: noise stddev over 2 C_h.", above=0
    )
    clip_norms: tuple[float, ...] = settings.numbers(
        (0.2,), "The (master) clip norm C.", above=0
    )
    noise: tuple[str, ...] = settings.choices(
        _NOISE,
        _NOISE,
        "At the same sigma, or full and scaled clipping at sigma / sqrt(L).",
    )
    repeats: int = settings.count(
        2, "Runs of each, with new weights, batches and noise."
    )
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("batch_clipping_sweep")


def runs(used: Settings) -> Iterator[Run]:
    """All runs, each once; settings that a method does not use are None."""
    seen = set()
    for repeat in range(used.repeats):
        for m in used.batch_sizes:
            for sigma in used.sigmas:
                for norm in used.clip_norms:
                    for run in _at(used, m, sigma, norm, repeat):
                        if run not in seen:
                            seen.add(run)
                            yield run


def _at(used: Settings, m, sigma, norm, repeat) -> Iterator[Run]:
    for method in used.methods:
        if method == SGD:
            yield Run(SGD, m, None, None, False, repeat)
            continue
        clip = method.split(":")[1]
        known = None if clip == "adaptive_zhang" else norm
        for noise in used.noise:
            # By layer, the same sigma is the same privacy.
            lower = noise == "equal_privacy" and not batch_settings.by_layer(clip)
            yield Run(method, m, sigma, known, lower, repeat)


def one_run(used: Settings, run: Run) -> batch_settings.OneRun:
    """The settings of a run."""
    names = [field.name for field in dataclasses.fields(batch_settings.Common)]
    common = {name: getattr(used, name) for name in names}
    if used.seed is not None:
        common["seed"] = used.seed + run.repeat
    common["batch_size"] = run.batch_size
    if run.method == SGD:
        return batch_settings.OneRun(**common)
    unit, clip = run.method.split(":")
    return batch_settings.OneRun(
        **common,
        unit=unit,
        clip=clip,
        # The remaining methods do not use the clip norm.
        clip_norm=run.clip_norm or 1.0,
        sigma=run.sigma,
        equal_privacy=run.equal_privacy,
    )


def _measure(
    used: batch_settings.OneRun, run: Run, data: batch_training.Data
) -> dict[str, Any]:
    if run.method == SGD:
        found = batch_training.train_plainly(used, used.batch_size, used.epochs, data)
        return {"rows": found.rows}
    watch = [] if used.unit == "individual" else [batch_signal.Signal(used, data)]
    private = batch_training.train(used, data, watch)
    statement = private.trained.statement
    return {
        "rows": private.trained.rows,
        "signal": [row for one in watch for row in one.rows],
        "layers": private.layers,
        "epsilon": statement.epsilon,
        "relation": statement.relation,
        "mu": batch_accounts.paper_mu(*private.account),
        "statement": str(statement),
    }


def run(used: Settings) -> programs.Outcome:
    """Makes the runs that are missing, and reports on all."""
    wanted = list(runs(used))
    for one in wanted:
        if one.method != SGD:
            batch_settings.check(one_run(used, one))
    data = batch_training.load(used)
    training.check_batch_size(max(used.batch_sizes), len(data.private[1]))
    fixed = dataclasses.asdict(used)
    for name in _FREE:
        del fixed[name]
    fixed["images"] = [data.images.name, len(data.private[1]), len(data.test[1])]
    known = kept.Kept(pathlib.Path(used.output_dir) / _KEPT, fixed)
    missing = [one for one in wanted if one not in known]
    bar = progress.Progress("sweep", len(wanted), len(wanted) - len(missing), "run")
    found: dict[Run, dict[str, Any]] = {}
    for one in [*(r for r in wanted if r in known), *missing]:
        found[one] = known.get(
            one, lambda one=one: _measure(one_run(used, one), one, data)
        )
        if one in missing:
            accuracy = f"{found[one]['rows'][-1]['test_accuracy']:.1%}"
            bar.show(len(found), [f"{one.name} {accuracy}"])
    bar.close()
    return _outcome(used, data, {one: found[one] for one in wanted})


def _outcome(used, data, found) -> programs.Outcome:
    title = f"Ways to clip batches: {used.network}, {data.images.name}"
    results = batch_comparison.results(found)
    statements = {
        one.setting: entry["statement"]
        for one, entry in found.items()
        if "statement" in entry
    }
    most = max((entry.get("epsilon", 0.0) for entry in found.values()), default=0.0)
    ratios = batch_comparison.ratios(found)
    findings = batch_comparison.findings(results, used.noise, ratios)
    if most > 20:
        findings.append(
            f"epsilon is up to {most:.3g}: this is NO meaningful privacy. The paper's "
            "settings with small sigma are to be read as optimisation experiments."
        )
    measured = {}
    if ratios:
        signals = batch_comparison.signals(found)
        measured = {"signal_to_noise": ratios, "signal": signals}
    return programs.Outcome(
        title=title,
        findings=findings,
        privacy="\n".join(
            ["for one run of each setting; runs without privacy have none."]
            + [f"{setting}: {text}" for setting, text in statements.items()]
        ),
        caveats=[
            *training.caveats(data.images, used, "curves"),
            f"{used.public_share:.0%} of the training images are taken as public: "
            "batch normalisation's statistics, gradient norms by layer and signals "
            "come from them.",
            "epsilon is this library's upper bound, under the relation beside it; mu "
            "is the paper's limit for one example replaced, which is no bound.",
            f"low and high are the least and most of {used.repeats} runs' last "
            "epochs, no interval of confidence. 'best' is the mean of the best epochs, "
            "chosen by test accuracy.",
            "A signal, the clipped gradient, is a root mean square over public batches "
            "(not augmented), in the first run, at its first and its last weights. * "
            "marks sigma / sqrt(L).",
        ],
        tables={
            "results": results,
            "curves": batch_comparison.curves(found),
            **measured,
        },
        figures=batch_comparison.figures(found, results, used.noise, title),
        shown=("results", *(["signal_to_noise"] if ratios else [])),
        numbers={"runs": len(found)},
    )


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
