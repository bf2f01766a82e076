"""The studies of views and of people, in small, and the network of De et al."""

import csv
import json

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from keras_examples import networks, people_study, views_study


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_views(tmp_path):
    flags = [
        "views_study",
        "--dataset=digits",
        "--examples=60",
        "--batch_size=20",
        "--epochs=1",
        "--views=2",
        "--seeds=2",
        "--learning_rates=0.5",
        "--shift=1",
        f"--output_dir={tmp_path}",
    ]
    views_study.main(flags)
    table = rows_of(tmp_path / "results.csv")
    found = [(row["views"], row["weights"], row["runs"]) for row in table]
    assert found == [("2", "last", "2"), ("2", "averaged", "2")]
    assert (tmp_path / "views.png").exists()
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert all(json.loads(line)["epsilon"] <= 3 for line in lines)
    # Known results are not measured again.
    views_study.main(flags)
    assert (tmp_path / "trials.jsonl").read_text().splitlines() == lines


def play(speakers, speeches, seed):
    rng = np.random.default_rng(seed)
    words = "now is the winter of our discontent made glorious summer".split()
    return "\n\n".join(
        f"{name}. {' '.join(rng.choice(words, 6))}."
        for name in speakers
        for _ in range(speeches)
    )


@pytest.mark.slow
def test_people(tmp_path):
    names = [f"Speaker {chr(65 + k)}" for k in range(20)]
    (tmp_path / "public.txt").write_text(play(["Chorus"], 20, 0))
    (tmp_path / "private.txt").write_text("Scene I. A heath.\n\n" + play(names, 3, 1))
    people_study.main(
        [
            "people_study",
            f"--public={tmp_path}/public.txt",
            f"--private={tmp_path}/private.txt",
            "--public_epochs=1",
            "--length=8",
            "--layers=1",
            "--width=8",
            "--per_person=1,2",
            "--batch_size=12",
            "--epochs=1",
            "--delta=0.01",
            "--learning_rates=0.01",
            "--seeds=2",
            f"--output_dir={tmp_path}/out",
        ]
    )
    table = rows_of(tmp_path / "out" / "results.csv")
    assert [(row["way"], row["per_person"]) for row in table] == [
        ("people", "1"),
        ("people", "2"),
        ("examples", "1"),
        ("examples", "2"),
    ]
    noise = [float(row["noise_multiplier"]) for row in table]
    # For people the noise is the same for every number of draws; for examples it grows.
    assert noise[0] == noise[1] and noise[3] > 1.2 * noise[2]
    assert "60 speeches" not in (tmp_path / "out" / "report.txt").read_text()
    assert "51 speeches of 17 speakers" in (tmp_path / "out" / "report.txt").read_text()


def test_texts_without_speakers(tmp_path):
    (tmp_path / "a.txt").write_text("no names here, and nobody speaks.\n\n" * 3)
    with pytest.raises(SystemExit, match="begins with its speaker"):
        people_study.main(
            [
                "people_study",
                f"--public={tmp_path}/a.txt",
                f"--private={tmp_path}/a.txt",
                "--public_epochs=1",
                "--length=8",
                f"--output_dir={tmp_path}/out",
            ]
        )


@pytest.mark.slow
def test_the_wide_residual_network():
    assert networks.wide_resnet().count_params() == 2_751_146
    with pytest.raises(ValueError, match="depth must be 6 n"):
        networks.wide_resnet(depth=12)


@pytest.mark.slow
@pytest.mark.every_check
def test_it_is_exact_by_record():
    model = networks.wide_resnet((8, 8, 3), 10, 1, 8)
    model.compile(
        dpc.keras.DPSGD(
            0.1,
            clip=1.0,
            noise_multiplier=1.0,
            expected_batch_size=4,
            rows_per_record=2,
        ),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    x = np.random.default_rng(0).normal(size=(8, 8, 8, 3)).astype(np.float32)
    assert dpc.testing.assert_exact(model, (x, np.arange(8))).worst < 1e-4


def test_kernels_are_standardised():
    layer = networks.StandardizedConv2D(4, 3, padding="same")
    x = tf.random.normal([2, 5, 5, 6])
    before = layer(x)
    layer.kernel.assign(3 * layer.kernel + 2)
    np.testing.assert_allclose(layer(x), before, rtol=1e-4, atol=1e-4)
