"""Features carry their network's privacy cost, and are refused without it."""

from __future__ import annotations

import numpy as np
import pytest

import tfdpclip as dpc
from driver_kit import settings
from keras_examples import declare_features, features
from tests.keras_examples.feature_files import film_ledger, together, write_features


def test_features_from_a_file(tmp_path):
    found = features.read(write_features(tmp_path / "f.npz"))
    assert found.train[0].shape == (90, 4)
    assert found.test[0].shape == (30, 4)
    assert found.classes == 3


@pytest.mark.parametrize(
    "content",
    [
        None,
        {"features": np.ones((2, 3))},
        {"features": np.ones((2, 3)), "labels": [0, 1], "split": ["train", "train"]},
        {"features": np.ones(2), "labels": [0, 1], "split": ["train", "test"]},
    ],
)
def test_wrong_files_are_named(tmp_path, content):
    path = tmp_path / "f.npz"
    if content is not None:
        np.savez(path, **content)
    with pytest.raises(settings.UsageError, match="--features=.*`labels`"):
        features.read(str(path))


def test_what_the_network_had_spent_composes_with_a_head(tmp_path):
    path = write_features(tmp_path / "f.npz", ledger=film_ledger())
    found, scheme = features.read(path), dpc.sampling.Poisson(0.5)
    stated = found.statement(1e-5, noise_multiplier=2.0, sampling=scheme, steps=10)
    assert stated.epsilon == pytest.approx(together(scheme, 2.0, 10), rel=1e-9)
    # Not the head alone, and tighter than a sum of epsilons.
    alone = dpc.accounting.epsilon(2.0, 10, scheme, 1e-5)
    before = dpc.accounting.epsilon(1.0, 20, dpc.sampling.Poisson(0.25), 1e-5)
    assert max(alone, before) < stated.epsilon < alone + before
    assert (stated.steps, stated.noise_multipliers) == (30, (1.0, 2.0))
    # Reading does not change the history.
    again = found.statement(1e-5, noise_multiplier=2.0, sampling=scheme, steps=10)
    assert again == stated


def test_a_seed_or_missing_noise_before_is_not_forgotten(tmp_path):
    scheme = dpc.sampling.FullBatch()
    for ledger, words in (
        (film_ledger(seed=1), "a seed was fixed"),
        (film_ledger(noise_multiplier=0.0), "noise_multiplier is 0"),
    ):
        found = features.read(write_features(tmp_path / "f.npz", ledger=ledger))
        told = found.statement(1e-5, noise_multiplier=9.0, sampling=scheme, steps=1)
        assert any(words in reason for reason in told.not_private)


def test_other_neighbours_before_are_refused(tmp_path):
    ledger = film_ledger(scheme=dpc.sampling.FixedSize(10, 90))
    found = features.read(write_features(tmp_path / "f.npz", ledger=ledger))
    with pytest.raises(settings.UsageError, match="--features.*neighbouring"):
        found.statement(
            1e-5, noise_multiplier=9.0, sampling=dpc.sampling.FullBatch(), steps=1
        )


def test_a_frozen_network_costs_nothing_and_is_an_assumption(tmp_path):
    found = features.read(write_features(tmp_path / "f.npz"))
    scheme = dpc.sampling.FullBatch()
    told = found.statement(1e-5, noise_multiplier=5.0, sampling=scheme, steps=1)
    assert told.epsilon == dpc.accounting.epsilon(5.0, 1, scheme, 1e-5)
    assert "some network" in str(told) and not found.spent


def rewritten(path, **changes):
    with np.load(path) as file:
        arrays = {**{name: file[name] for name in file.files}, **changes}
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return str(path)


def test_a_history_that_cannot_be_read_is_refused_and_the_fix_shown(tmp_path):
    path = tmp_path / "f.npz"
    write_features(path, ledger=film_ledger(steps=7))
    with np.load(path) as file:
        told, values = str(file["history"]), file["features"]
    assert '"runs": [7]' in told
    values[0, 0] += 1
    for changes in (
        {"history": None},
        {"history": np.array("")},
        {"history": np.array("[]")},
        {"history": np.array([told])},
        {"history": np.array(told.encode())},
        {"history": np.array(told.replace('"runs": [7]', '"runs": [6]'))},
        {"history": np.array(told.replace('"format": 1', '"format": 2', 1))},
        {"features": values},  # The history belongs to different features.
    ):
        write_features(path, ledger=film_ledger(steps=7))
        rewritten(path, **changes)
        with pytest.raises(settings.UsageError, match="--features=.*--write_features"):
            features.read(str(path))
        assert features.read(write_features(path)).classes == 3


def test_a_ledger_that_is_none_is_refused_whatever_its_checksum(tmp_path, monkeypatch):
    path = tmp_path / "f.npz"
    ledger = film_ledger()
    good = ledger.to_dict()
    for name in good:
        bad = {k: v for k, v in good.items() if k != name}
        monkeypatch.setattr(ledger, "to_dict", lambda bad=bad: bad)
        write_features(path, ledger=ledger)
        with pytest.raises(settings.UsageError, match="cannot be read"):
            features.read(str(path))


def declare(tmp_path, *arguments):
    declare_features.programs.run_program(
        "",
        declare_features.Settings,
        declare_features.run,
        ["declare_features", f"--output_dir={tmp_path / 'out'}", *arguments],
    )
    return features.read(str(tmp_path / "out" / "features.npz"))


def test_features_from_elsewhere_are_declared(tmp_path):
    path = write_features(tmp_path / "f.npz")
    given = f"--features={rewritten(path, history=None)}"
    film_ledger().save(tmp_path / "privacy.json")
    spent = declare(
        tmp_path, given, "--network=net", f"--ledger={tmp_path / 'privacy.json'}"
    )
    assert spent.ledger(1e-5).steps == 20
    frozen = declare(tmp_path, given, "--network=net", "--frozen")
    assert frozen.history == features.History("net")
    for wrong, message in (
        ((given, "--network=net"), "--frozen or --ledger"),
        ((given, "--frozen"), "--network is missing"),
        ((given, "--network=n", "--ledger=/none"), "none"),
        (
            (
                f"--features={write_features(tmp_path / 'known.npz')}",
                "--network=n",
                "--frozen",
            ),
            "has a history",
        ),
    ):
        with pytest.raises(SystemExit, match=message):
            declare(tmp_path, *wrong)
