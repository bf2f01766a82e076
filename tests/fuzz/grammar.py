"""Random specs."""

from __future__ import annotations

import random

from tests.fuzz import (  # noqa: F401  the blocks
    gradient_mixers,
    layers,
    losses,
    mixers,
    ops,
    record_mixers,
    wrappers,
)
from tests.fuzz.registry import BLOCKS
from tests.fuzz.spec import Node, Spec

_FIT_KINDS = [kind for kind in losses.KINDS if kind not in ("raw", "poisson")]


def generate(seed: int, number: int = 0) -> Spec:
    """The spec of a number under a seed."""
    rng = random.Random(f"{seed}/{number}")
    mixed = rng.random() < 0.35
    body = _body(rng, rng.choice([1, 2, 2, 3, 3, 4]), 2)
    loss = _loss(rng)
    mode = _mode(rng)
    spec = Spec(
        seed=rng.randrange(1000),
        batch=rng.choice([3, 4, 4, 5, 6]),
        input=rng.choice(["vector", "sequence", "sequence", "image", "tokens"]),
        body=tuple(body),
        loss=loss,
        mode=mode,
    )
    if mode.get("level") == "fit":
        loss.pop("penalties", None)
        loss["kind"] = rng.choice(_FIT_KINDS)
        loss["reduction"] = rng.choice(["keras", "none", "keras_sum", "keras"])
    if "rows" in mode and rng.random() < 0.5:
        spec = _insert(rng, spec, _node(rng, "within_record", 0), 0.0)
    if mixed:
        mode.pop("poison", None)
        # Without random draws in the spec, every effect found is the mixer's.
        spec = _plant(rng, spec.edited(_without_random))
    return spec


def _choose(rng, wanted):
    names = [name for name, block in BLOCKS.items() if wanted(block)]
    weights = [BLOCKS[name].weight for name in names]
    return rng.choices(names, weights)[0]


def _node(rng, name, depth):
    block = BLOCKS[name]
    args = {key: rng.choice(values) for key, values in block.options.items()}
    children = _body(rng, rng.choice([1, 1, 2]), depth - 1) if block.children else []
    return Node(name, args, tuple(children))


def _body(rng, length, depth):
    body = []
    for _ in range(length):
        name = _choose(rng, lambda b: not b.mixes and (depth > 0 or not b.children))
        if BLOCKS[name].random and rng.random() < 0.5:
            name = "dense"
        body.append(_node(rng, name, depth))
    return body


def _loss(rng):
    loss = {
        "kind": rng.choice(list(losses.KINDS)),
        "reduction": rng.choice(
            (*losses.REDUCTIONS[:-2], rng.choice(losses.REDUCTIONS[-2:]))
        ),
    }
    if rng.random() < 0.3:
        loss["weighted"] = True
    if rng.random() < 0.3:
        loss["head"] = False
    return loss


def _mode(rng):
    mode = {"level": rng.choices(["sum", "minimize", "fit"], [3, 1, 1])[0]}
    mode["dynamic"] = rng.random() < 0.5
    if rng.random() < 0.1:
        mode["jit"] = True
    if rng.random() < 0.12:
        mode["dtype"] = "mixed_bfloat16"
    if mode["level"] != "sum" and rng.random() < 0.4:
        mode["accumulate"] = 2
    mode["rule"] = rng.choices(["fixed", "automatic", "layerwise"], [4, 1, 1])[0]
    if rng.random() < 0.08:
        mode["poison"] = rng.choice(["nan", "inf", "padding"])
    if rng.random() < 0.2:
        mode["rows"] = rng.choice([2, 3])
    return mode


def _without_random(nodes):
    return tuple(
        Node("within")
        if BLOCKS[node.name].random
        else Node(node.name, node.args, _without_random(node.children))
        for node in nodes
    )


def _plant(rng, spec):
    if rng.random() < 0.15 and spec.mode.get("level") != "fit":
        return Spec(
            **(
                vars(spec)
                | {"loss": spec.loss | {"reduction": rng.choice(losses.MIXED)}}
            )
        )
    name = _choose(rng, lambda b: b.mixes)
    if "rows" in spec.mode and rng.random() < 0.5:
        name = "mix_records"
    node = _node(rng, name, 0)
    if node.args.get("how") == "shuffle":
        node = Node("mix", {"how": "roll"})
    return _insert(rng, spec, node, 0.0 if name == "mix_records" else 0.6)


def _insert(rng, spec, node, inside):
    """With a block more, in a block that is there as likely as `inside` says."""

    def insert(nodes):
        place = rng.randrange(len(nodes) + 1)
        if place < len(nodes) and nodes[place].children and rng.random() < inside:
            old = nodes[place]
            new = Node(old.name, old.args, insert(old.children))
            return (*nodes[:place], new, *nodes[place + 1 :])
        return (*nodes[:place], node, *nodes[place:])

    return spec.edited(insert)
