r"""Clips gradients of examples, of batches or of groups, layer by layer or not.

    python -m keras_examples.batch_clipping --data_dir=DIR
    python -m keras_examples.batch_clipping --dataset=digits --network=bn_lenet5 \
        --sigma=2.5 --epochs=5 --baseline_epochs=5

The experiments of Nguyen, Nguyen, Nguyen and van Dijk (2023), "Batch Clipping and
Adaptive Layerwise Clipping for Differential Private Stochastic Gradient Descent". Their
sigma is relative to the sensitivity 2 C: the noise on layer h has stddev 2 C_h sigma.
Most of their sigmas are far too small for any privacy; the report has their account in
Gaussian differential privacy (f-DP) and this library's, side by side.

The paper counts ResNet-18's layers as its 62 weight tensors and BN-LeNet-5's as 8
modules, as --layers=paper does. Its clip norm for ResNet-18 is 0.095 in places and
0.0095 in others; results agree with 0.095. Its text draws batches with replacement,
which --sampling=with_replacement does, and its analysis without, as the default does.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from driver_kit import programs, settings
from keras_examples import (
    batch_accounts,
    batch_settings,
    batch_signal,
    batch_training,
    training,
)


@dataclasses.dataclass(frozen=True)
class Settings(batch_settings.OneRun):
    """The settings of a run, and of the baseline."""

    baseline_epochs: int = settings.count(
        50, "Epochs of SGD without privacy, to compare; 0: none.", least=0
    )
    record_layer_norms: bool = settings.switch(
        False, "Whether to measure gradient norms by layer at every epoch (Fig. 1)."
    )
    figure_format: tuple[str, ...] = settings.figure_format()
    output_dir: str = settings.output_dir("batch_clipping")


def run(used: Settings) -> programs.Outcome:
    """Trains and reports."""
    data = batch_training.load(used)

    def watch():
        wanted = used.record_layer_norms
        return [batch_signal.LayerNorms(used, data)] if wanted else []

    name, watches = f"{used.unit}, {used.clip}", {}
    watches[name] = watch()
    # Norms by layer and frozen weights are in no backup.
    whole = used.record_layer_norms or used.sparsify is not None
    place = None if whole else training.unfinished(used, data.images)
    private = batch_training.train(used, data, watches[name], unfinished=place)
    unit = private.model.optimizer.unit
    accounts = batch_accounts.account(*private.account, used.delta, unit, used.sampling)
    runs = {name: private.trained.rows}
    if used.baseline_epochs:
        print("SGD without privacy:", flush=True)
        watches["SGD"] = watch()
        runs["SGD"] = batch_training.train_plainly(
            used, used.batch_size, used.baseline_epochs, data, watches["SGD"]
        ).rows
    outcome = _outcome(used, data, private, accounts, runs)
    if place is not None:
        outcome.written = place.remove
    norms = {name: one.rows for name, found in watches.items() for one in found}
    if norms:
        _add_norms(outcome, norms)
    return outcome


def _add_norms(outcome: programs.Outcome, norms) -> None:
    outcome.tables["layer_norms"] = [
        {"run": name, **row} for name, rows in norms.items() for row in rows
    ]
    title = f"Gradient norms by layer. {outcome.title}"
    outcome.figures["layer_norms"] = batch_signal.plot_layer_norms(norms, title)
    for name, rows in norms.items():
        last = [r for r in rows if r["epoch"] == rows[-1]["epoch"]]
        most = max(last, key=lambda row: row["mean_norm"])
        least = min(last, key=lambda row: row["mean_norm"])
        outcome.findings.append(
            f"{name}, epoch {most['epoch']}: the largest mean gradient norm of a layer "
            f"is {most['mean_norm']:.3g} ({most['layer']}), the smallest "
            f"{least['mean_norm']:.3g} ({least['layer']})."
        )


def _outcome(used, data, private, accounts, runs):
    images, trained = data.images, private.trained
    title = f"{used.unit.capitalize()} clipping of {used.network}, {images.name}"
    accuracy = trained.accuracy.micro
    parameters = sum(int(np.prod(v.shape)) for v in private.model.trainable_variables)
    text = (
        f"{used.unit} clipping, {used.clip}, sigma {used.sigma:g}, C "
        f"{used.clip_norm:g}, m {used.batch_size}: test accuracy {accuracy:.2%} after "
        f"{used.epochs} epochs. {parameters:,} parameters in {private.layers} layers "
        f"(counted by {batch_settings.layer_kind(used)})."
    )
    if used.sparsify is not None:
        text += f" {private.frozen:.1%} of the weights are frozen at the end."
    if "SGD" in runs:
        text += f" SGD without privacy: {runs['SGD'][-1]['test_accuracy']:.2%}."
    findings = [
        text,
        "The paper's account and this library's are in accounts.csv and below. The "
        "paper's is a limit, not a bound, and counts an example replaced by another; "
        "state the relation with every epsilon.",
    ]
    if trained.statement.epsilon > 20:
        findings.append(
            f"epsilon is {trained.statement.epsilon:.3g}: this is NO meaningful "
            "privacy. The paper's settings with small sigma are to be read as "
            "optimisation experiments."
        )
    caveats = training.caveats(images, used) + [
        f"{used.public_share:.0%} of the training images are taken as public: batch "
        "normalisation's statistics and gradient norms by layer come from them.",
        "SGD without privacy is outside every guarantee.",
    ]
    return programs.Outcome(
        title=title,
        findings=findings,
        privacy=trained.statement,
        caveats=caveats,
        tables={
            "history": [
                {"run": name, **row} for name, rows in runs.items() for row in rows
            ],
            "accounts": accounts,
        },
        figures={"history": training.curves(runs, title, 1 / images.classes)},
        shown=("accounts",),
        numbers={
            "parameters": parameters,
            "layers": private.layers,
            **training.report_accuracy(trained),
        },
    )


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
