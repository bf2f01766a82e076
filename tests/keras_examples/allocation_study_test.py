"""The study of ways to draw: equal budgets, and noise in the expected order."""

import pytest

from keras_examples import allocation_study
from tests.output_files import rows_of, words_of


@pytest.mark.slow
def test_every_way_to_draw_has_the_same_budget(tmp_path):
    arguments = ["--examples=300", "--batch_size=100", "--epochs=2", "--repeats=2"]
    allocation_study.main(["study", f"--output_dir={tmp_path}", *arguments])
    trials = rows_of(tmp_path, "trials")
    assert len(trials) == 6
    assert all(2.99 < float(trial["epsilon"]) <= 3 for trial in trials)
    assert all(trial["steps"] == "6" for trial in trials)
    rows = rows_of(tmp_path, "sampling")
    noise = {row["sampling"]: float(row["noise_multiplier"]) for row in rows}
    assert noise["random_allocation"] < noise["poisson"] < noise["shuffled"]
    words = words_of(tmp_path)
    assert "Random allocation against poisson" in words
    assert "the comparison of all of them is not accounted for" in words
