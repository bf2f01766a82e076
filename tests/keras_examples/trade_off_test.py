"""The trade-off program: its curves equal the library's, and bound every attack."""

from __future__ import annotations

import numpy as np
import pytest

from keras_examples import trade_off
from tests.output_files import rows_of, words_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trade_off")
    trade_off.main(["trade_off", "--epsilons=0.5,3", f"--output_dir={directory}"])
    return directory


def test_exact_curves_are_between_guessing_and_what_epsilon_allows(directory):
    rows = rows_of(directory, "trade_off")
    assert {float(row["epsilon"]) for row in rows} == {0.5, 3}
    for row in rows:
        rate, power, alone = (
            float(row[name])
            for name in (
                "false_positive_rate",
                "true_positive_rate",
                "by_epsilon_and_delta",
            )
        )
        assert rate <= power <= alone * 1.005
    powers = [float(r["true_positive_rate"]) for r in rows if float(r["epsilon"]) == 3]
    assert np.all(np.diff(powers) >= 0) and powers[-1] == 1


def test_the_report_says_what_is_found(directory):
    words = words_of(directory)
    assert (
        "At epsilon 3 no attack with 1 % false alarms finds more than 4.56 %" in words
    )
    assert "no data were used" in words
    assert (directory / "trade_off.png").stat().st_size > 10_000


def test_a_batch_of_more_than_there_are_is_refused():
    with pytest.raises(SystemExit, match="--batch_size=100"):
        trade_off.main(["trade_off", "--batch_size=2000"])
