"""Checkpoints of a tiny vision transformer, in the published form."""

from __future__ import annotations

import numpy as np

from keras_examples import transfer_models

MICRO = transfer_models.MODELS["vit_micro"]


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
