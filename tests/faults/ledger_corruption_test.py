"""A damaged ledger is refused; it never states less than was spent."""

from __future__ import annotations

import os

import pytest

from tests.faults.damage import damaged, every_bit, refused_or
from tests.faults.disk_test import ledger_in
from tests.stand_in_aggregator import Aggregator
from tfdpclip import sampling
from tfdpclip.accounting import Ledger, RoundBudget
from tfdpclip.keras import PrivacyBudget

DELTA = 1e-5


@pytest.mark.slow
def test_a_ledger_with_any_bit_changed_is_refused(tmp_path):
    """A changed white space may leave the same ledger."""
    ledger = ledger_in(tmp_path)
    ledger.begin(noise_multiplier=2.0, sampling=sampling.Poisson(0.02), change=True)
    ledger.reserve(3)
    path, content = ledger.path, ledger.path.read_bytes()
    right = Ledger.load(path).to_dict()
    refused = total = 0
    for changed in every_bit(content):
        path.write_bytes(changed)
        found = refused_or(lambda: Ledger.load(path), path, needed="backup")
        total += 1
        refused += found is None
        assert found is None or found.to_dict() == right
    # Indentation and line ends are a third of the file.
    assert total == 8 * len(content) and refused > 0.6 * total


def test_a_damaged_ledger_is_refused_wherever_it_is_used(tmp_path):
    path = ledger_in(tmp_path, steps=300).path
    content = path.read_bytes()
    cohorts = sampling.Poisson(0.5).cohorts(list(range(20)))
    for changed in [*damaged(content, 20), content.replace(b"300", b"3")]:
        if changed.strip() == content.strip():
            continue
        path.write_bytes(changed)
        for use in (
            lambda: Ledger.open(path, DELTA, "rdp"),
            lambda: RoundBudget(1.0, DELTA, cohorts, Aggregator(1.0), ledger=path),
            lambda: PrivacyBudget(1.0, DELTA, sampling.Poisson(0.1), ledger=path),
        ):
            with pytest.raises(
                ValueError, match="privacy.json is not a privacy ledger"
            ):
                use()
        assert path.read_bytes() == changed


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[]",
        "1",
        "null",
        '"x"',
        '{"format": 2}',
        '{"format": 2, "checksum": {}}',
        '{"format": 1, "delta": 1e-5, "accountant": "pld", "phases": [], '
        '"reserved": 0, "notes": []}',
        '{"format": 2, "delta": NaN}',
        '{"format": 2, "delta": 1' + "0" * 5000 + "}",
    ],
    ids=lambda text: text[:20],
)
def test_other_json_is_no_ledger(text, tmp_path):
    path = tmp_path / "privacy.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="privacy.json is not a privacy ledger"):
        Ledger.load(path)


def test_what_is_no_file_is_no_ledger(tmp_path):
    path = tmp_path / "privacy.json"
    path.mkdir()
    with pytest.raises(ValueError, match="privacy.json is a directory"):
        Ledger.open(path, DELTA)
    path.rmdir()
    os.mkfifo(path)  # No process writes to the pipe.
    with pytest.raises(ValueError, match="privacy.json is not a regular file"):
        Ledger.open(path, DELTA)
    path.unlink()
    path.symlink_to(tmp_path / "a disk that is not there")
    with pytest.raises(FileNotFoundError, match="privacy.json"):
        Ledger.open(path, DELTA)
    with pytest.raises(FileExistsError, match="privacy.json"):
        Ledger(DELTA, path=path)
