"""State dicts of timm give the same models as AugReg's files of the same weights."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from driver_kit import settings
from keras_examples import checkpoints, safetensor_files, transfer_models
from tests.faults.damage import damaged
from tests.keras_examples.checkpoints import micro_checkpoint

TYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "int64": "I64"}


def timm_arrays(ours):
    """The arrays of `micro_checkpoint` by timm's names and shapes, written out here."""
    found = {
        "patch_embed.proj.weight": np.einsum("hwio->oihw", ours["embedding/kernel"]),
        "patch_embed.proj.bias": ours["embedding/bias"],
        "cls_token": ours["cls"],
        "pos_embed": ours["Transformer/posembed_input/pos_embedding"],
        "norm.weight": ours["Transformer/encoder_norm/scale"],
        "norm.bias": ours["Transformer/encoder_norm/bias"],
        "head.weight": ours["head/kernel"].T,
        "head.bias": ours["head/bias"],
    }
    for k in range(2):
        theirs, block = f"blocks.{k}", f"Transformer/encoderblock_{k}"
        a = f"{block}/MultiHeadDotProductAttention_1"
        rows, biases = [], []
        for part in ("query", "key", "value"):
            # Row by row: an output of a head, and its weights for the input.
            kernel = ours[f"{a}/{part}/kernel"]
            rows += [kernel[:, h, e] for h in range(4) for e in range(8)]
            biases += list(ours[f"{a}/{part}/bias"].ravel())
        out = ours[f"{a}/out/kernel"]
        found |= {
            f"{theirs}.attn.qkv.weight": np.stack(rows),
            f"{theirs}.attn.qkv.bias": np.array(biases, np.float32),
            f"{theirs}.attn.proj.weight": np.stack(
                [out[h, e] for h in range(4) for e in range(8)], axis=1
            ),
            f"{theirs}.attn.proj.bias": ours[f"{a}/out/bias"],
        }
        for j, norm in ((1, "LayerNorm_0"), (2, "LayerNorm_2")):
            found[f"{theirs}.norm{j}.weight"] = ours[f"{block}/{norm}/scale"]
            found[f"{theirs}.norm{j}.bias"] = ours[f"{block}/{norm}/bias"]
        for j in (1, 2):
            dense = f"{block}/MlpBlock_3/Dense_{j - 1}"
            found[f"{theirs}.mlp.fc{j}.weight"] = ours[f"{dense}/kernel"].T
            found[f"{theirs}.mlp.fc{j}.bias"] = ours[f"{dense}/bias"]
    return found


def safetensors(arrays, metadata=None):
    """A file in the format, as its description says."""
    header = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, value in arrays.items():
        content = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": TYPES[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    return of_header(header, data)


def of_header(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def logits(path):
    model = transfer_models.build("vit_micro", 5)
    checkpoints.load(model, "vit_micro", str(path))
    head = np.random.default_rng(2).normal(size=(32, 5)).astype(np.float32)
    model.get_layer("head").kernel.assign(head)
    images = np.random.default_rng(1).integers(0, 256, (3, 8, 8, 3))
    return model(images.astype(np.float32)).numpy()


@pytest.mark.slow
def test_files_of_both_namings_give_the_same_logits(tmp_path):
    arrays = timm_arrays(micro_checkpoint(tmp_path / "ours.npz"))
    expected = logits(tmp_path / "ours.npz")
    assert np.abs(expected).max() > 1
    np.savez(tmp_path / "timm.npz", **arrays)
    content = safetensors(arrays, {"format": "pt"})
    (tmp_path / "model.safetensors").write_bytes(content)
    for name in ("timm.npz", "model.safetensors"):
        np.testing.assert_allclose(logits(tmp_path / name), expected, atol=1e-5)


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks.1.attn.qkv.bias": None}, "missing blocks.1.attn.qkv.bias; unknown"),
        ({"fc_norm.weight": np.zeros(32, np.float32)}, "unknown fc_norm.weight"),
        ({"blocks.0.ls1.gamma": np.zeros(32, np.float32)}, "unknown blocks.0.ls1"),
        (
            {"blocks.0.attn.qkv.weight": np.zeros((32, 96), np.float32)},
            r"blocks.0.attn.qkv.weight must be \(96, 32\)",
        ),
        (
            {"blocks.0.mlp.fc1.weight": np.zeros((32, 64), np.float32)},
            r"blocks.0.mlp.fc1.weight must be \(64, 32\)",
        ),
        ({"norm.bias": np.full(32, np.nan, np.float32)}, "norm.bias must be"),
        ({"head.bias": np.zeros(1000, np.float32)}, "fine-tuned on ImageNet-1k"),
        ({"pre_logits.fc.bias": np.zeros(3, np.float32)}, "older ImageNet-21k"),
    ],
)
def test_other_networks_of_timm_are_named_and_change_nothing(
    tmp_path, changes, message
):
    arrays = timm_arrays(micro_checkpoint(tmp_path / "ours.npz")) | changes
    arrays = {name: value for name, value in arrays.items() if value is not None}
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(arrays))
    model = transfer_models.build("vit_micro", 5)
    before = [v.numpy() for v in model.weights]
    with pytest.raises(settings.UsageError, match=message):
        checkpoints.load(model, "vit_micro", str(path))
    for variable, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_types_are_read_as_they_are():
    arrays = {
        "a": np.array([1.5, -2], np.float16),
        "b": np.array([[3]], np.int64),
        "c": np.zeros((0, 2), np.float32),
        "d": np.array(2.5),
    }
    found = safetensor_files.parse(safetensors(arrays))
    for name, value in arrays.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)
    # The upper half of float32's bits: 1, -2 and 3.140625.
    header = {"x": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}
    content = of_header(header, struct.pack("<3H", 0x3F80, 0xC000, 0x4049))
    (values,) = safetensor_files.parse(content).values()
    np.testing.assert_array_equal(values, np.array([1, -2, 3.140625], np.float32))


def test_damaged_files_are_refused_or_arrays():
    arrays = {"a.b": np.ones((3, 2), np.float32), "c": np.zeros(2, np.float16)}
    outcomes = []
    for content in damaged(safetensors(arrays, {"format": "pt"}), 400):
        try:
            found = safetensor_files.parse(content)
        except ValueError:
            outcomes.append(False)
            continue
        assert all(isinstance(value, np.ndarray) for value in found.values())
        outcomes.append(True)
    # A flip in an array's values cannot be found; cuts and most flips elsewhere can.
    assert outcomes.count(False) > len(outcomes) / 2


def entry(shape=(1,), offsets=(0, 4), kind="F32", **more):
    return {"dtype": kind, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.thinned(10)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut off"),
        (b"\x05\0\0\0\0\0\0\0{}", "cut off"),
        (b"\xff" * 16, "cut off"),
        (of_header(b"[]", b""), "no JSON object"),
        (of_header(b"{", b""), "no JSON"),
        (of_header(b"\xff", b""), "no JSON"),
        (of_header(b'{"a":1,"a":1}', b""), "a name twice"),
        (of_header({"a": 1}, b""), "'a' lacks a type"),
        (of_header({"a": entry(more=1)}, bytes(4)), "'a' lacks a type"),
        (of_header({"a": entry((-1,))}, bytes(4)), "'a' lacks a type"),
        (of_header({"a": entry((1.0,))}, bytes(4)), "'a' lacks a type"),
        (of_header({"a": entry((0, 10**30), (0, 0))}, b""), "'a' lacks a type"),
        (of_header({"a": entry(offsets=(0, 4, 8))}, bytes(4)), "'a' lacks a type"),
        (of_header({"a": entry(kind="F8")}, bytes(4)), "of type 'F8'"),
        (of_header({"a": entry((2,))}, bytes(4)), "takes 8 bytes, not 0 to 4"),
        (of_header({"a": entry(offsets=(0, 4))}, bytes(3)), "takes 4 bytes, not 0"),
        (of_header({"a": entry(offsets=(4, 0))}, bytes(4)), "takes 4 bytes, not 4"),
        (of_header({"a": entry(), "b": entry()}, bytes(4)), "'b' begins at byte 0"),
        (of_header({"a": entry(offsets=(4, 8))}, bytes(8)), "'a' begins at byte 4"),
        (of_header({"a": entry()}, bytes(5)), "1 bytes at its end"),
    ],
)
def test_files_that_are_not_what_their_header_says_are_refused(
    tmp_path, content, message
):
    with pytest.raises(ValueError, match=message):
        safetensor_files.parse(content)
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    model = transfer_models.build("vit_micro", 5)
    with pytest.raises(settings.UsageError, match="--checkpoint=.*a safetensors file"):
        checkpoints.load(model, "vit_micro", str(path))
