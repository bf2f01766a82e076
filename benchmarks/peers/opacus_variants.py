"""Steps of Opacus and of PyTorch; needs an environment with Opacus."""

from __future__ import annotations

from collections.abc import Callable

import torch
from opacus import PrivacyEngine
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from torch import nn

from benchmarks.peers import torch_models
from benchmarks.timing import Spec, UnsupportedError


class _Attention(DPMultiheadAttention):
    """With the class's `batch_first`, and the name of the argument like PyTorch's."""

    def __init__(self, width: int, heads: int, batch_first: bool):
        super().__init__(width, heads, batch_first=batch_first)


PLAIN = {"lstm": nn.LSTM, "gru": nn.GRU, "attention": nn.MultiheadAttention}
PRIVATE = {"lstm": DPLSTM, "gru": DPGRU, "attention": _Attention}
# Opacus's names of the ways to get per-example gradients or norms.
WAYS = {
    "opacus_hooks": "hooks",
    "opacus_functorch": "functorch",
    "opacus_ghost": "ghost",
}


def step_of(spec: Spec, variant: str) -> Callable[[], None]:
    """Makes a model, and a training step of it on one batch."""
    if spec.options or spec.jit:
        raise UnsupportedError("no options and no compilation here")
    if variant != "plain" and variant not in WAYS:
        raise ValueError(f"variants must be of plain, {', '.join(WAYS)}: {variant!r}.")
    model = torch_models.make(spec.model, PLAIN if variant == "plain" else PRIVATE)
    x, y = torch_models.batch(spec.model, spec.batch_size)
    parameters = [part for part in model.parameters() if part.requires_grad]
    optimizer = (
        torch.optim.Adam(parameters, 1e-3)
        if spec.adam
        else torch.optim.SGD(parameters, 0.1)
    )
    loss = nn.CrossEntropyLoss()
    model.train()
    if variant != "plain":
        # The loader gives the engine the batch size; nothing iterates over it.
        data = torch.utils.data.TensorDataset(x, y)
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=loss,
            data_loader=torch.utils.data.DataLoader(data, spec.batch_size),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=WAYS[variant],
        )
        if len(made) == 4:
            model, optimizer, loss, _ = made
        else:
            model, optimizer, _ = made

    def step():
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        value.item()

    return step


def makers(spec: Spec) -> tuple[dict[str, Callable], int]:
    """The makers of steps, by variant, and the number of trained parameters."""
    model = torch_models.make(spec.model, PLAIN)
    count = sum(part.numel() for part in model.parameters() if part.requires_grad)
    made = {name: lambda name=name: step_of(spec, name) for name in spec.variants}
    return made, count
