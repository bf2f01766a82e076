"""The program of the most accurate private models, in small."""

import re

import numpy as np
import pytest

from keras_examples import best_accuracy
from tests.keras_examples import image_files as files

LAST = re.compile(
    r"test accuracy (\d+\.\d\d) ± (\d+\.\d\d|nan) of (\d+) seeds, epsilon (\S+)"
)


def _last_line(capsys, *flags):
    best_accuracy.main(["best_accuracy", *flags])
    text = capsys.readouterr().out.splitlines()
    return text, LAST.fullmatch(text[-1])


def test_features_of_an_image_do_not_depend_on_its_neighbours():
    x = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), dtype=np.uint8)
    whole, alone = best_accuracy.features(x), best_accuracy.features(x[1:2])
    assert whole.shape == (3, 7 * 7 * 81)
    np.testing.assert_allclose(whole[1:2], alone, atol=1e-4)


@pytest.mark.slow
def test_digits_end_with_an_interval(capsys):
    text, last = _last_line(capsys, "--dataset=digits", "--seeds=2", "--epsilon=8")
    # Chance is 10 %.
    assert float(last[1]) > 80
    assert last.groups()[2:] == ("2", "8")
    assert any("(8, 1e-05)-differential privacy" in line for line in text)


@pytest.mark.slow
def test_one_seed_has_no_interval(capsys):
    text, last = _last_line(
        capsys, "--dataset=digits", "--seeds=1", "--epochs=1", "--validate"
    )
    assert last.groups()[1:] == ("nan", "1", "3")
    assert any("held out" in line for line in text)


@pytest.mark.slow
def test_cifar10_from_small_files(tmp_path, capsys):
    files.cifar10_pickles(tmp_path, 20, 2)
    text, last = _last_line(
        capsys,
        "--dataset=cifar10",
        f"--data_dir={tmp_path}",
        "--seeds=1",
        "--epochs=1",
        "--batch_size=10",
        "--physical_batch_size=10",
        "--views=2",
        "--depth=10",
        "--width=1",
    )
    assert last[3] == "1"
    assert any("2 views" in line for line in text)


def test_too_large_a_batch_names_its_flag():
    with pytest.raises(SystemExit, match="--batch_size=9000"):
        best_accuracy.main(
            ["best_accuracy", "--dataset=digits", "--batch_size=9000", "--seeds=1"]
        )
