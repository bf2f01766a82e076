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


@pytest.mark.slow
def test_paragraphs_of_texts_are_told_apart_at_the_best_rate(tmp_path):
    texts = tmp_path / "texts"
    for name, word in (("sea", "waves"), ("hill", "stones")):
        part = f"Of {word} and {word} and still more {word} " + "we speak today. " * 6
        (texts / name).mkdir(parents=True)
        (texts / name / "all.txt").write_text("\n\n".join([part] * 200))
    arguments = [
        *("--dataset=texts", f"--data_dir={texts}", "--learning_rates=0.0001,0.5"),
        *("--batch_size=80", "--epochs=12", "--epsilon=20", "--repeats=2"),
    ]
    allocation_study.main(["study", f"--output_dir={tmp_path}", *arguments])
    assert len(rows_of(tmp_path, "trials")) == 12
    for row in rows_of(tmp_path, "sampling")[:2]:
        assert float(row["learning_rate"]) == 0.5
        assert float(row["accuracy"]) > 0.95


def test_texts_without_a_directory_are_named(tmp_path):
    with pytest.raises(SystemExit, match="--data_dir=DIR"):
        allocation_study.main(["study", f"--output_dir={tmp_path}", "--dataset=texts"])
