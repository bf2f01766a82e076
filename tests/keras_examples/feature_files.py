"""Files of features for tests, and their expected privacy cost."""

from __future__ import annotations

import dp_accounting
import numpy as np

import tfdpclip as dpc
from keras_examples import features


def write_features(path, count=120, classes=3, ledger=None):
    rng = np.random.default_rng(0)
    labels = np.arange(count) % classes
    x = rng.normal(size=(count, 4)) + 2 * np.eye(4)[labels]
    split = np.where(np.arange(count) % 4 == 3, "test", "train")
    arrays = {"features": x, "labels": labels, "split": split}
    features.write(path, arrays, features.History("some network", ledger))
    return str(path)


def film_ledger(noise_multiplier=1.0, steps=20, scheme=None, **options):
    """Of a network that was trained on the records before."""
    ledger = dpc.accounting.Ledger(1e-6)
    ledger.begin(
        noise_multiplier=noise_multiplier,
        sampling=scheme or dpc.sampling.Poisson(0.25),
        **options,
    )
    ledger.record(steps)
    return ledger


def together(scheme, z, steps, delta=1e-5):
    """Epsilon of `film_ledger` and a further training, composed by hand."""
    parts = [dpc.sampling.Poisson(0.25).event(1.0, 20), scheme.event(z, steps)]
    return dpc.accounting.event_epsilon(dp_accounting.ComposedDpEvent(parts), delta)
