"""Makes a failing spec as small as possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tests.fuzz.registry import BLOCKS
from tests.fuzz.spec import Node, Spec

_INPUTS = ("vector", "sequence", "image", "tokens")


def shrink(spec: Spec, fails: Callable[[Spec], bool], attempts: int = 60) -> Spec:
    """The smallest spec found that still fails.

    Args:
      spec: a spec that fails.
      fails: whether a given spec fails in the same way.
      attempts: how often to call `fails`.
    """
    tried = {spec.to_json()}
    progress = True
    while progress and attempts > 0:
        progress = False
        for smaller in candidates(spec):
            if smaller.to_json() in tried:
                continue
            tried.add(smaller.to_json())
            attempts -= 1
            if fails(smaller):
                spec, progress = smaller, True
                break
            if attempts <= 0:
                break
    return spec


def candidates(spec: Spec) -> Iterator[Spec]:
    """Specs that are a little simpler, the boldest first."""
    if len(spec.body) > 1:
        half = len(spec.body) // 2
        yield dataclasses.replace(spec, body=spec.body[:half])
        yield dataclasses.replace(spec, body=spec.body[half:])
    for body in _without(spec.body):
        yield dataclasses.replace(spec, body=body)
    if spec.mode:
        yield dataclasses.replace(spec, mode={})
    if set(spec.loss) - {"kind"}:
        kept = {k: v for k, v in spec.loss.items() if k == "kind"}
        yield dataclasses.replace(spec, loss=kept)
    for part in ("mode", "loss"):
        settings = getattr(spec, part)
        for name in settings:
            kept = {k: v for k, v in settings.items() if k != name}
            yield dataclasses.replace(spec, **{part: kept})
    for body in _simpler(spec.body):
        yield dataclasses.replace(spec, body=body)
    for name in _INPUTS[: _INPUTS.index(spec.input)]:
        yield dataclasses.replace(spec, input=name)
    for batch in range(2, spec.batch):
        yield dataclasses.replace(spec, batch=batch)
    if spec.seed:
        yield dataclasses.replace(spec, seed=0)


def _without(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    for i, node in enumerate(nodes):
        before, after = nodes[:i], nodes[i + 1 :]
        yield (*before, *after)
        if node.children:
            yield (*before, *node.children, *after)
            for inner in _without(node.children):
                if inner:
                    changed = dataclasses.replace(node, children=inner)
                    yield (*before, changed, *after)


def _simpler(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    for i, node in enumerate(nodes):
        before, after = nodes[:i], nodes[i + 1 :]
        if node.args:
            yield (*before, dataclasses.replace(node, args={}), *after)
        for name, value in node.args.items():
            kept = {k: v for k, v in node.args.items() if k != name}
            if value == BLOCKS[node.name].options[name][0]:
                # The same thing, said in fewer words.
                yield (*before, dataclasses.replace(node, args=kept), *after)
                continue
            yield (*before, dataclasses.replace(node, args=kept), *after)
        for inner in _simpler(node.children):
            yield (*before, dataclasses.replace(node, children=inner), *after)
