r"""Declares the training history of a network behind features from elsewhere.

    python -m keras_examples.declare_features --features=FILE.npz --frozen \
        --network="ResNet-50, trained on ImageNet-21k"
    python -m keras_examples.declare_features --features=FILE.npz \
        --network="ResNet-50, FiLM trained on these images" --ledger=privacy.json

norms_and_weights and tune_grid train on features, and state the cost together with the
privacy spent on the same images before. transfer_film --write_features writes the
history into its file; for features that a different program computed, this program
writes it into a copy. It cannot check the declaration, which stands in every statement
as an assumption.
"""

from __future__ import annotations

import dataclasses

from driver_kit import programs, settings
from keras_examples import features
from tfdpclip.accounting import Ledger


@dataclasses.dataclass(frozen=True)
class Settings:
    """The file and the declaration."""

    features: str | None = settings.words(None, f"The file: {features.LAYOUT}.")
    network: str | None = settings.words(
        None, "The network, and what it was trained on.", good="ResNet-50, ImageNet"
    )
    frozen: bool = settings.switch(
        False, "Say that the network has seen none of the training images."
    )
    ledger: str | None = settings.words(
        None, "The ledger's file of its private training on these images."
    )
    output_dir: str = settings.output_dir("declare_features")


def run(used: Settings) -> str:
    """Writes the copy; returns the text to print."""
    for name in ("features", "network"):
        if not getattr(used, name):
            raise settings.UsageError(f"flag --{name} is missing. See --help.")
    if used.frozen == (used.ledger is not None):
        raise settings.UsageError(
            "flag --frozen or --ledger=FILE: give one of the two. Frozen means that "
            "the network has seen none of the training images; otherwise the ledger of "
            "its private training says what that has cost."
        )
    arrays = features.read_arrays(used.features)
    if features.has_history(arrays):
        raise settings.UsageError(
            f"flag --features={used.features}: the file has a history, which another "
            "must not replace: that would forget what has been spent."
        )
    ledger = None
    if used.ledger is not None:
        try:
            ledger = Ledger.load(used.ledger)
        except ValueError as error:
            raise settings.UsageError(f"flag --ledger: {error}") from error
        if not ledger.steps:
            raise settings.UsageError(
                f"flag --ledger={used.ledger}: no step is recorded in it. Give that of "
                "the network's training; for a network that has seen none of the "
                "images, --frozen."
            )
    path = programs.make_directory(used.output_dir) / "features.npz"
    features.write(path, arrays, features.History(used.network, ledger))
    cost = "nothing" if ledger is None else str(ledger.statement())
    return f"Written to {path}. Spent on its images before: {cost}"


if __name__ == "__main__":
    programs.run_program(__doc__, Settings, run)
