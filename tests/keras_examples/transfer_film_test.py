"""Transfer learning: sizes, checkpoints in the published format, and private runs."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import tensorflow as tf
from scipy import special

import tfdpclip as dpc
from driver_kit import settings
from keras_examples import transfer_data, transfer_film, transfer_models
from tests.keras_examples import image_files as files

MICRO = transfer_models.MODELS["vit_micro"]


def count(variables) -> int:
    return sum(int(np.prod(v.shape)) for v in variables)


def micro_checkpoint(path, newer=False, seed=0, **changes):
    """An AugReg file for vit_micro; the keys and shapes are written out by hand."""
    rng = np.random.default_rng(seed)
    d, heads, mlp, patch = 32, 4, 64, 2
    head = d // heads
    attention, norm2, block = (
        "MultiHeadDotProductAttention_1",
        "LayerNorm_2",
        "MlpBlock_3",
    )
    if newer:
        attention, norm2, block = (
            "MultiHeadDotProductAttention_0",
            "LayerNorm_1",
            "MlpBlock_0",
        )
    shapes = {
        "embedding/kernel": (patch, patch, 3, d),
        "embedding/bias": (d,),
        "cls": (1, 1, d),
        "Transformer/posembed_input/pos_embedding": (1, 17, d),
        "Transformer/encoder_norm/scale": (d,),
        "Transformer/encoder_norm/bias": (d,),
        "head/kernel": (d, 11),
        "head/bias": (11,),
    }
    for k in range(2):
        prefix = f"Transformer/encoderblock_{k}"
        for norm in ("LayerNorm_0", norm2):
            shapes[f"{prefix}/{norm}/scale"] = shapes[f"{prefix}/{norm}/bias"] = (d,)
        for part in ("query", "key", "value"):
            shapes[f"{prefix}/{attention}/{part}/kernel"] = (d, heads, head)
            shapes[f"{prefix}/{attention}/{part}/bias"] = (heads, head)
        shapes[f"{prefix}/{attention}/out/kernel"] = (heads, head, d)
        shapes[f"{prefix}/{attention}/out/bias"] = (d,)
        for j, (a, b) in enumerate(((d, mlp), (mlp, d))):
            shapes[f"{prefix}/{block}/Dense_{j}/kernel"] = (a, b)
            shapes[f"{prefix}/{block}/Dense_{j}/bias"] = (b,)
    arrays = {k: rng.normal(0, 0.2, s).astype(np.float32) for k, s in shapes.items()}
    for key, value in changes.items():
        key = key.replace("__", "/")
        if value is None:
            del arrays[key]
        else:
            arrays[key] = value
    np.savez(path, **arrays)
    return arrays


def numpy_features(arrays, images):
    """The forward pass of vit_micro, in numpy alone."""

    def norm(x, name):
        mean = x.mean(-1, keepdims=True)
        variance = x.var(-1, keepdims=True)
        scaled = (x - mean) / np.sqrt(variance + 1e-6)
        return scaled * arrays[f"{name}/scale"] + arrays[f"{name}/bias"]

    x = images / 127.5 - 1
    n = len(x)
    patches = x.reshape(n, 4, 2, 4, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(n, 16, 12)
    x = patches @ arrays["embedding/kernel"].reshape(12, 32) + arrays["embedding/bias"]
    x = np.concatenate([np.repeat(arrays["cls"], n, axis=0), x], axis=1)
    x = x + arrays["Transformer/posembed_input/pos_embedding"]
    for k in range(2):
        block = f"Transformer/encoderblock_{k}"
        a = f"{block}/MultiHeadDotProductAttention_1"
        y = norm(x, f"{block}/LayerNorm_0")
        q, key, v = (
            np.einsum("ntd,dhe->nhte", y, arrays[f"{a}/{p}/kernel"])
            + arrays[f"{a}/{p}/bias"][None, :, None]
            for p in ("query", "key", "value")
        )
        scores = special.softmax(q @ key.transpose(0, 1, 3, 2) / np.sqrt(8), axis=-1)
        mixed = np.einsum("nhte,hed->ntd", scores @ v, arrays[f"{a}/out/kernel"])
        x = x + mixed + arrays[f"{a}/out/bias"]
        y = norm(x, f"{block}/LayerNorm_2")
        m = f"{block}/MlpBlock_3"
        y = y @ arrays[f"{m}/Dense_0/kernel"] + arrays[f"{m}/Dense_0/bias"]
        y = y * special.ndtr(y)
        x = x + y @ arrays[f"{m}/Dense_1/kernel"] + arrays[f"{m}/Dense_1/bias"]
    return norm(x, "Transformer/encoder_norm")[:, 0]


def features_of(model):
    return tf.keras.Model(model.input, model.get_layer("features").output)


@pytest.mark.parametrize("newer", [False, True])
def test_checkpoint_gives_the_features_of_an_independent_forward_pass(tmp_path, newer):
    images = np.random.default_rng(1).integers(0, 256, (3, 8, 8, 3)).astype(np.float32)
    arrays = micro_checkpoint(tmp_path / "old.npz")
    expected = numpy_features({k: v.astype(float) for k, v in arrays.items()}, images)
    model = transfer_models.build("vit_micro", 5)
    path = tmp_path / "file.npz"
    micro_checkpoint(path, newer)
    transfer_models.load_checkpoint(model, "vit_micro", str(path))
    np.testing.assert_allclose(features_of(model)(images), expected, atol=1e-4)
    np.testing.assert_array_equal(model.get_layer("head").kernel, 0)


def test_checkpoint_of_another_image_size_is_resized(tmp_path):
    path = tmp_path / "file.npz"
    grid = np.arange(4, dtype=np.float32).reshape(1, 4, 1) * np.ones(32, np.float32)
    value = np.concatenate([np.full((1, 1, 32), 9, np.float32), grid], axis=1)
    micro_checkpoint(path, Transformer__posembed_input__pos_embedding=value)
    model = transfer_models.build("vit_micro", 5)
    transfer_models.load_checkpoint(model, "vit_micro", str(path))
    positions = model.get_layer("tokens").positions.numpy()[0, :, 0]
    assert positions[0] == 9
    square = positions[1:].reshape(4, 4)
    assert square[0, 0] == 0 and square[3, 3] == 3
    assert np.all(np.diff(square, axis=0) >= 0) and np.all(np.diff(square, axis=1) >= 0)
    assert square.mean() == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cls": None}, "missing cls"),
        ({"other": np.zeros(1)}, "unknown other"),
        ({"embedding__bias": np.zeros(3)}, r"embedding/bias must be \(32,\)"),
        ({"embedding__bias": np.full(32, np.nan)}, "embedding/bias must be"),
        ({"pre_logits__kernel": np.zeros(1)}, "older ImageNet-21k"),
        (
            {"Transformer__posembed_input__pos_embedding": np.zeros((1, 7, 32))},
            "pos_embedding must be",
        ),
    ],
)
def test_wrong_checkpoints_are_named_and_change_nothing(tmp_path, changes, message):
    path = tmp_path / "file.npz"
    micro_checkpoint(path, **changes)
    model = transfer_models.build("vit_micro", 5)
    before = [v.numpy() for v in model.weights]
    with pytest.raises(settings.UsageError, match=message):
        transfer_models.load_checkpoint(model, "vit_micro", str(path))
    for variable, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_fine_tuned_pickled_and_missing_files_are_refused(tmp_path):
    model = transfer_models.build("vit_micro", 5)
    path = tmp_path / "Ti_16--imagenet2012-steps_20k.npz"
    micro_checkpoint(path)
    with pytest.raises(settings.UsageError, match="--fine_tuned accepts it"):
        transfer_models.load_checkpoint(model, "vit_micro", str(path))
    transfer_models.load_checkpoint(model, "vit_micro", str(path), fine_tuned=True)
    np.savez(tmp_path / "objects.npz", cls=np.array([{}], object))
    for name in ("objects.npz", "missing.npz"):
        with pytest.raises(settings.UsageError, match="--checkpoint=.*cannot be read"):
            transfer_models.load_checkpoint(model, "vit_micro", str(tmp_path / name))


# Spec 2.4: model, classes, which norms: FiLM scalars, trainable, total.
@pytest.mark.parametrize(
    ("name", "classes", "which", "film", "trainable", "total"),
    [
        pytest.param(
            *("vit_tiny", 5, "dp_film", 9_600, 10_565, 5_525_381),
            marks=pytest.mark.slow,
        ),
        ("vit_tiny", 100, "dp_film", 9_600, 28_900, 5_543_716),
        pytest.param(
            *("vit_tiny", 397, "dp_film", 9_600, 86_221, 5_601_037),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("resnet50_bit", 5, "dp_film", 11_648, 21_893, 23_510_597),
            marks=pytest.mark.slow,
        ),
        ("resnet50_bit", 100, "dp_film", 11_648, 216_548, 23_705_252),
        pytest.param(
            *("resnet50_bit", 100, "framework", 41_344, 246_244, 23_705_252),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("resnet50_bit", 100, "all", 45_440, 250_340, 23_705_252),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_parameters_are_those_of_the_table(
    name, classes, which, film, trainable, total
):
    model = transfer_models.build(name, classes)
    used = transfer_film.Settings(model=name, bit_film=which)
    counts = transfer_film.select(model, used)
    assert counts.normalization == film
    assert counts.trainable == count(model.trainable_variables) == trainable
    assert counts.total == total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "trainable", "total"),
    [(5, 42_245, 85_802_501), (100, 115_300, 85_875_556), (397, 343_693, 86_103_949)],
)
def test_parameters_of_vit_base(classes, trainable, total):
    model = transfer_models.build("vit_base", classes)
    counts = transfer_film.select(model, transfer_film.Settings(model="vit_base"))
    assert (counts.trainable, counts.total) == (trainable, total)


def test_vit_tiny_has_200_keys_of_the_published_shapes():
    model = transfer_models.build("vit_tiny", 3)
    keys = transfer_models.vit_keys(model, transfer_models.MODELS["vit_tiny"])
    # 4 + 12 * 16 + 2; the head's two are not loaded.
    assert len(keys) == 198
    block = "Transformer/encoderblock_11"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    assert keys[f"{attention}/query/kernel"].shape == (192, 3, 64)
    assert keys[f"{attention}/out/kernel"].shape == (3, 64, 192)
    assert keys[f"{block}/MlpBlock_3/Dense_1/kernel"].shape == (768, 192)
    assert keys["Transformer/posembed_input/pos_embedding"].shape == (1, 197, 192)


TINY_BIT = transfer_models.BiT(16, (1, 2), 8, 4)


def bit_checkpoint(path):
    """A BiT file for TINY_BIT; gammas are 4-d, as in some published files."""
    rng = np.random.default_rng(0)
    arrays = {"resnet/root_block/standardized_conv2d/kernel": (7, 7, 3, 8)}
    cin = 8
    for stage, units in enumerate((1, 2), 1):
        mid = 8 * 2 ** (stage - 1)
        for unit in range(1, units + 1):
            prefix = f"resnet/block{stage}/unit{unit:02d}"
            conv = "standardized_conv2d/kernel"
            arrays[f"{prefix}/a/{conv}"] = (1, 1, cin, mid)
            arrays[f"{prefix}/b/{conv}"] = (3, 3, mid, mid)
            arrays[f"{prefix}/c/{conv}"] = (1, 1, mid, 4 * mid)
            if unit == 1:
                arrays[f"{prefix}/a/proj/{conv}"] = (1, 1, cin, 4 * mid)
            for part, width in (("a", cin), ("b", mid), ("c", mid)):
                for kind in ("gamma", "beta"):
                    arrays[f"{prefix}/{part}/group_norm/{kind}"] = (1, 1, 1, width)
            cin = 4 * mid
    for kind in ("gamma", "beta"):
        arrays[f"resnet/group_norm/{kind}"] = (1, 1, 1, cin)
    arrays["resnet/head/conv2d/kernel"] = (1, 1, cin, 21)
    arrays["resnet/head/conv2d/bias"] = (21,)
    made = {k: rng.normal(size=s).astype(np.float32) for k, s in arrays.items()}
    np.savez(path, **made)
    return made


def test_bit_checkpoint_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(transfer_models.MODELS, "resnet50_bit", TINY_BIT)
    arrays = bit_checkpoint(tmp_path / "bit.npz")
    model = transfer_models.build("resnet50_bit", 3)
    transfer_models.load_checkpoint(model, "resnet50_bit", str(tmp_path / "bit.npz"))
    np.testing.assert_array_equal(
        model.get_layer("block2_unit02_c_norm").gamma,
        arrays["resnet/block2/unit02/c/group_norm/gamma"].ravel(),
    )
    np.testing.assert_array_equal(
        model.get_layer("block2_unit01_a_proj").kernel,
        arrays["resnet/block2/unit01/a/proj/standardized_conv2d/kernel"],
    )
    # 16 -> 8 (root) -> 4 (pool) -> 4 -> 2, 64 channels.
    assert model.get_layer("final_norm").output.shape == (None, 2, 2, 64)
    found = features_of(model)(np.zeros((2, 16, 16, 3), np.float32))
    assert found.shape == (2, 64) and np.all(np.isfinite(found))


def test_weight_standardisation():
    layer = transfer_models.StdConv2D(2, 1, use_bias=False)
    layer.build((None, 1, 1, 3))
    layer.kernel.assign(
        tf.reshape([1.0, 10.0, 2.0, 10.0, 3.0, 40.0], layer.kernel.shape)
    )
    x = np.eye(3, dtype=np.float32).reshape(3, 1, 1, 3)
    found = layer(x).numpy().reshape(3, 2)
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(found.std(axis=0), 1, atol=1e-5)
    assert found[2, 0] == pytest.approx(math.sqrt(1.5), rel=1e-5)


def launch(tmp_path, *arguments):
    out = tmp_path / "out"
    transfer_film.main(["transfer_film", f"--output_dir={out}", *arguments])

    def read(name):
        with open(out / f"{name}.csv", newline="") as file:
            return list(csv.DictReader(file))

    return read, " ".join((out / "report.txt").read_text().split()), out


def test_film_on_cifar100_files_with_a_checkpoint(tmp_path):
    files.cifar100_pickles(tmp_path, 200)
    micro_checkpoint(tmp_path / "ti.npz")
    read, report, out = launch(
        tmp_path,
        f"--data_dir={tmp_path}",
        f"--checkpoint={tmp_path / 'ti.npz'}",
        "--model=vit_micro",
        "--batch_size=50",
        "--physical_batch_size=40",
        "--epochs=1",
        "--write_features",
    )
    (row,) = read("run")
    assert (row["N"], row["K"], row["T"], row["B"]) == ("200", "100", "4", "50")
    # 5 norms of width 32 and a head for 100 classes.
    assert row["d"] == str(2 * 5 * 32 + 33 * 100)
    spent = dpc.accounting.epsilon(
        float(row["sigma"]), 4, dpc.sampling.Poisson(0.25), 1e-5
    )
    assert float(row["epsilon"]) == pytest.approx(spent, rel=1e-3)
    assert 7.9 < float(row["epsilon"]) <= 8
    for words in ("steps: 4", "normalize=True", "add or remove one", "not covered"):
        assert words in report, words
    with np.load(out / "features.npz") as file:
        assert file["features"].shape == (400, 32)
        assert (file["split"] == "train").sum() == 200
    assert "it is private data" in report
    assert (out / "per_class.png").stat().st_size > 10_000


@pytest.mark.slow
def test_film_learns_new_digits(tmp_path):
    read, report, _ = launch(
        tmp_path,
        "--dataset=digits",
        "--model=vit_micro",
        "--pretraining_epochs=8",
        "--batch_size=128",
        "--physical_batch_size=256",
        "--learning_rate=0.03",
        "--seed=1",
    )
    (row,) = read("run")
    assert row["T"] == "45"
    # Guessing gets 20 % of five digits.
    assert float(row["macro"]) > 0.4
    assert "not private: " in report  # It had a seed.


def test_full_batch_head_only(tmp_path):
    read, report, _ = launch(
        tmp_path,
        "--dataset=digits",
        "--model=vit_micro",
        "--pretraining_epochs=1",
        "--trainable=head",
        "--batch_size=full",
        "--physical_batch_size=1000",
        "--epochs=3",
        "--clip=auto_s",
        "--subset=0.5",
    )
    (row,) = read("run")
    assert row["q"] == "1.0" and row["T"] == "3"
    assert int(row["N"]) < 400
    assert "full batch" in report
    assert "165 of" in report


def test_first_step_moves_the_head_alone():
    # With a zero head nothing reaches the norms; noise would.
    model = transfer_models.build("vit_micro", 5)
    transfer_film.select(model, transfer_film.Settings(model="vit_micro"))
    optimizer = dpc.keras.DPAdam(
        0.1, clip=1.0, noise_multiplier=0.0, expected_batch_size=8, epsilon=1e-10
    )
    model.compile(optimizer, transfer_film.training.LOSS)
    before = {v.name: v.numpy() for v in model.trainable_variables}
    x = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3)).astype(np.float32)
    model.fit(x, np.arange(8) % 5, batch_size=8, verbose=0)
    for variable in model.trainable_variables:
        moved = not np.array_equal(before[variable.name], variable.numpy())
        assert moved == variable.name.startswith("head/"), variable.name


def write_folder(root, size=(10, 12)):
    rng = np.random.default_rng(0)
    for part, number in (("train", 3), ("validation", 2), ("test", 1)):
        for label in ("cbb", "healthy"):
            folder = root / part / label
            folder.mkdir(parents=True)
            for k in range(number):
                image = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
                # One file is of another kind than its name says.
                encode = tf.io.encode_png if k == 1 else tf.io.encode_jpeg
                (folder / f"{k}.jpg").write_bytes(encode(image).numpy())


def test_image_folders(tmp_path):
    write_folder(tmp_path)
    data = transfer_data.load("folder", str(tmp_path), 8)
    assert (data.size, len(data.test), data.classes) == (10, 2, 2)
    assert np.bincount(data.train.labels).tolist() == [5, 5]
    image, label = data.train[1]
    assert image.shape == (8, 8, 3) and image.dtype == np.uint8 and label == 0
    alone = transfer_data.load("folder", str(tmp_path), 8, merge_validation=False)
    assert alone.size == 6
    part = transfer_data.load("folder", str(tmp_path), 8, subset=0.4)
    assert np.bincount(part.train.labels).tolist() == [2, 2]


@pytest.mark.slow
def test_film_on_an_image_folder(tmp_path):
    write_folder(tmp_path)
    micro_checkpoint(tmp_path / "ti.npz")
    read, _, _ = launch(
        tmp_path,
        "--dataset=folder",
        f"--data_dir={tmp_path}",
        f"--checkpoint={tmp_path / 'ti.npz'}",
        "--model=vit_micro",
        "--batch_size=5",
        "--epochs=1",
        "--preprocess=timm",
    )
    assert read("run")[0]["N"] == "10"
    assert len(read("per_class")) == 2


def test_sun397_lists(tmp_path):
    base = tmp_path / "SUN397"
    for name in ("a/abbey", "a/airport/inside"):
        folder = base / name
        folder.mkdir(parents=True)
        image = np.zeros((9, 9, 3), np.uint8)
        (folder / "x.jpg").write_bytes(tf.io.encode_jpeg(image).numpy())
    (base / "ClassName.txt").write_text("/a/abbey\n/a/airport/inside\n")
    lines = "/a/abbey/x.jpg\n/a/airport/inside/x.jpg\n"
    for part in ("train", "validation", "test"):
        (base / f"{part}.txt").write_text(lines)
    data = transfer_data.load("sun397", str(tmp_path), 8)
    assert (data.size, data.classes) == (4, 2)
    assert data.train.labels.tolist() == [0, 1, 0, 1]
    assert data.train[3][0].shape == (8, 8, 3)
    (base / "test.txt").write_text("/b/unknown/x.jpg\n")
    with pytest.raises(settings.UsageError, match="of no class in ClassName"):
        transfer_data.load("sun397", str(tmp_path), 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--checkpoint is missing"),
        (("--dataset=digits", "--batch_size=5000"), "there are only 716"),
        (("--dataset=digits", "--batch_size=half"), "--batch_size=half must be"),
        (("--dataset=folder", "--checkpoint=x"), "--data_dir is missing"),
        (("--dataset=sun397", "--checkpoint=x"), "--data_dir is missing"),
        (("--dataset=folder", "--checkpoint=x", "--data_dir=/none"), "There is no"),
    ],
)
def test_wrong_flags_are_named(tmp_path, arguments, message):
    arguments = ("--model=vit_micro", "--pretraining_epochs=0", *arguments)
    with pytest.raises(SystemExit, match=message):
        launch(tmp_path, *arguments)
