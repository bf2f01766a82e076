"""Times what a user waits for: a whole private `fit`, against plain `fit`.

    python -m benchmarks.whole_fit --output_dir=runs/benchmarks

The same model, as many examples and epochs, in one process and in turn: `fit` on
arrays; the private step alone (the same `fit` with a plan's optimizer: full batches,
nothing accounted); the same on Poisson batches, without callbacks; and the whole of a
`PrivacyPlan`: its callbacks, epsilon. So each adds one part to what is before it. Of
all epochs after the first the shortest counts: other programs only add.
"""

from __future__ import annotations

import math
import pathlib
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from tqdm import tqdm

import tfdpclip as dpc
from benchmarks import cells, models, sections
from benchmarks.peers import installed
from driver_kit import command_line

COLUMNS = (
    "model",
    "batch_size",
    "examples",
    "xla",
    "variant",
    "epoch_s",
    "first_epoch_s",
    "ratio",
    "epsilon",
)
_KEY = ("model", "batch_size", "examples", "xla", "variant")
VARIANTS = ("plain", "step", "batches", "plan")
_SEVEN = "mlp,mnist_cnn,convnet,embedding,lstm,gru,transformer"
_EPSILON = 3.0


class _Clock(tf.keras.callbacks.Callback):
    """The seconds of each epoch, from the end of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        del epoch, logs
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        self._began = now


def _fit(
    variant: str, task, data, size: int, epochs: int, xla: bool
) -> tuple[list[float], float]:
    """Trains a model of its own; the seconds of each epoch, and epsilon or NaN."""
    model = task.build()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if variant == "plain":
        optimizer = tf.keras.optimizers.SGD(0.1)
    else:
        plan = dpc.keras.PrivacyPlan(
            epsilon=_EPSILON,
            delta=0.1 / len(data[1]),
            examples=len(data[1]),
            batch_size=size,
            epochs=epochs,
        )
        optimizer = plan.optimizer(dpc.keras.DPSGD, 0.1)
    # Keras 3 would compile one of them by XLA, and not another.
    model.compile(optimizer, loss, jit_compile=xla)
    clock = _Clock()
    told = {"epochs": epochs, "verbose": 0}
    if variant in ("plain", "step"):
        model.fit(*data, batch_size=size, callbacks=[clock], **told)
        return clock.seconds, math.nan
    batches = plan.batches(data)
    if variant == "batches":
        batches.take_as_drawn(not xla)
        model.fit(batches, callbacks=[clock], **told)
        return clock.seconds, math.nan
    model.fit(batches, callbacks=[*plan.callbacks, clock], **told)
    return clock.seconds, plan.statement().epsilon


def measure(
    name: str,
    size: int,
    examples: int,
    epochs: int = 4,
    turns: int = 2,
    xla: bool = False,
    fit: Callable[..., tuple[list[float], float]] = _fit,
) -> list[dict]:
    """The rows of one model, batch size and number of examples.

    Args:
      name: of `benchmarks.models`.
      size: examples of a batch, expected ones where they are drawn.
      examples: how many there are.
      epochs: of each call of `fit`, at least 2.
      turns: how many calls of each variant, one after the other.
      xla: whether XLA compiles the steps, for which batches are filled up.
      fit: trains once.

    >>> rows = measure("mlp", 32, 64, fit=lambda kind, *_: (
    ...     [5.0, {"plain": 1.0, "step": 1.5}.get(kind, 2.0)], 3.0))
    >>> [row["ratio"] for row in rows]
    [1.0, 1.5, 2.0, 2.0]
    """
    task = models.make(name)
    data = task.batch(np.random.default_rng(0), examples)
    best = dict.fromkeys(VARIANTS, math.inf)
    first = dict(best)
    epsilon = {}
    for _ in range(turns):
        for variant in VARIANTS:
            tf.keras.backend.clear_session()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seconds, epsilon[variant] = fit(variant, task, data, size, epochs, xla)
            best[variant] = min(best[variant], *seconds[1:])
            first[variant] = min(first[variant], seconds[0])
    place = {"model": name, "batch_size": size, "examples": examples, "xla": xla}
    return [
        {
            **place,
            "variant": variant,
            "epoch_s": best[variant],
            "first_epoch_s": first[variant],
            "ratio": best[variant] / best["plain"],
            "epsilon": epsilon[variant],
        }
        for variant in VARIANTS
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the table lacks, and prints the geometric mean of it all."""
    parser = command_line.argument_parser(__doc__)
    add = parser.add_argument
    add("--models", default=_SEVEN)
    add("--batch_sizes", default="64,256")
    add("--examples", default="12000,60000")
    add("--epochs", type=int, default=4, help="Of each call of fit; 2 or more.")
    add("--turns", type=int, default=2)
    add("--xla", action="store_true", help="Compile all steps by XLA.")
    add("--output_dir", type=pathlib.Path, default=pathlib.Path("runs/benchmarks"))
    options = parser.parse_args(argv)
    if options.epochs < 2 or options.turns < 1:
        parser.error("--epochs must be 2 or more and --turns 1 or more")
    chosen = options.models.split(",")
    unknown = [name for name in chosen if name not in models.NAMES]
    if unknown:
        parser.error(f"--models: no {unknown[0]} among {', '.join(models.NAMES)}")
    sizes = [int(text) for text in options.batch_sizes.split(",")]
    counts = [int(text) for text in options.examples.split(",")]
    installed.record(options.output_dir, ["tensorflow"])
    table = cells.Table(options.output_dir / "whole_fit.csv", COLUMNS, _KEY)
    cases = [(n, b, e, options.xla) for e in counts for n in chosen for b in sizes]
    for case in tqdm(cases, unit="cell"):
        keys = [dict(zip(_KEY, (*case, variant), strict=True)) for variant in VARIANTS]
        if not all(table.find(key) for key in keys):
            told = {"epochs": options.epochs, "turns": options.turns}
            table.add(measure(*case[:3], xla=options.xla, **told))
    for path in sections.write(options.output_dir):
        print(path.name)


if __name__ == "__main__":
    main()
