"""Wall time from arrays in memory to a stated epsilon and an accuracy, by library.

    python -m benchmarks.to_accuracy --data=data/mnist

MNIST, the network of the other benchmarks, stochastic gradient descent at one rate and
one clip norm, Poisson batches of 256 on average, the same epochs and the same epsilon
and delta; each library with its own sampler, its own accountant and its fastest way to
clip, in a separate process. The seconds cover all that a user waits for after the
import of the libraries: noise, model, compilation, training, epsilon.
"""

from __future__ import annotations

import gzip
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from driver_kit import command_line

ROOT = pathlib.Path(__file__).resolve().parents[1]
COLUMNS = (
    "library",
    "epochs",
    "epsilon",
    "turn",
    "seconds",
    "accuracy",
    "spent",
)
_KEY = ("library", "epochs", "epsilon", "turn")
SIZE, RATE, CLIP = 256, 0.25, 1.0

Found = dict[str, float]


def keras(data: Any, epochs: int, epsilon: float, delta: float) -> Found:
    """Keras without privacy, and shuffled batches."""
    del epsilon, delta
    import tensorflow as tf

    from benchmarks import models

    begun = time.perf_counter()
    model = models.make("mnist_cnn").build()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(RATE), loss, jit_compile=False)
    model.fit(data["x"], data["y"], SIZE, epochs, verbose=0)
    seconds = time.perf_counter() - begun
    return _found(seconds, model.predict(data["test_x"], verbose=0), data, math.inf)


def tfdpclip(data: Any, epochs: int, epsilon: float, delta: float) -> Found:
    """A plan of this library, with the common clip norm."""
    import tensorflow as tf

    import tfdpclip as dpc
    from benchmarks import models

    begun = time.perf_counter()
    plan = dpc.keras.PrivacyPlan(
        epsilon, delta, examples=len(data["y"]), batch_size=SIZE, epochs=epochs
    )
    model = models.make("mnist_cnn").build()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = plan.optimizer(dpc.keras.DPSGD, RATE, clip=CLIP)
    model.compile(optimizer, loss, jit_compile=False)
    batches = plan.batches((data["x"], data["y"]))
    model.fit(batches, epochs=plan.epochs, verbose=0, callbacks=plan.callbacks)
    spent = plan.statement().epsilon
    seconds = time.perf_counter() - begun
    return _found(seconds, model.predict(data["test_x"], verbose=0), data, spent)


def opacus(
    data: Any, epochs: int, epsilon: float, delta: float, mode: str = "hooks"
) -> Found:
    """Opacus, whose engine finds the noise and makes the loader."""
    import torch
    from opacus import PrivacyEngine

    from benchmarks.peers import torch_models

    def images(name):
        return torch.tensor(data[name]).permute(0, 3, 1, 2).contiguous()

    begun = time.perf_counter()
    model = torch_models.make("mnist_cnn", {})
    optimizer, loss = (
        torch.optim.SGD(model.parameters(), RATE),
        torch.nn.CrossEntropyLoss(),
    )
    records = torch.utils.data.TensorDataset(images("x"), torch.tensor(data["y"]))
    engine = PrivacyEngine()
    made = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        criterion=loss,
        data_loader=torch.utils.data.DataLoader(records, SIZE),
        epochs=epochs,
        target_epsilon=epsilon,
        target_delta=delta,
        max_grad_norm=CLIP,
        grad_sample_mode=mode,
    )
    model, optimizer, loader = made[0], made[1], made[-1]
    loss = made[2] if len(made) == 4 else loss
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    spent = engine.get_epsilon(delta)
    seconds = time.perf_counter() - begun
    with torch.no_grad():
        logits = model.eval()(images("test_x")).numpy()
    return _found(seconds, logits, data, spent)


def opacus_ghost(data: Any, epochs: int, epsilon: float, delta: float) -> Found:
    """The same by ghost clipping."""
    return opacus(data, epochs, epsilon, delta, "ghost")


def jax_privacy(data: Any, epochs: int, epsilon: float, delta: float) -> Found:
    """jax_privacy: its calibration, its sampler padded to few sizes, its noise."""
    import jax
    import jax_privacy as private
    import optax
    from jax_privacy import accounting, batch_selection

    from benchmarks.peers import jax_models

    begun = time.perf_counter()
    count = len(data["y"])
    steps = math.ceil(count / SIZE) * epochs
    accountant = accounting.analysis.DpsgdTrainingAccountant(
        accounting.accountants.PldAccountantConfig()
    )
    z = accounting.calibrate.calibrate_noise_multiplier(
        target_epsilon=epsilon,
        accountant=accountant,
        batch_sizes=SIZE,
        num_updates=steps,
        num_samples=count,
        target_delta=delta,
    )
    apply, parameters = jax_models.make("mnist_cnn")
    optimizer = optax.sgd(RATE)

    def loss(p, x, y):
        logits = apply(p, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    gradient = private.clipped_grad(
        loss, l2_clip_norm=CLIP, normalize_by=float(SIZE), batch_argnums=(1, 2)
    )
    noise = private.noise_addition.gaussian_privatizer(
        stddev=z * gradient.sensitivity(), prng_key=jax.random.key(0)
    )

    @jax.jit
    def update(p, inner, noise_state, x, y, padding):
        found = gradient(p, x, y, is_padding_example=padding)
        found, noise_state = noise.update(found, noise_state)
        change, inner = optimizer.update(found, inner, p)
        return optax.apply_updates(p, change), inner, noise_state

    state = parameters, optimizer.init(parameters), noise.init(parameters)
    sampler = batch_selection.CyclicPoissonSampling(SIZE / count, steps)
    for drawn in sampler.batch_iterator(count, 0):
        indices = batch_selection.pad_to_multiple_of(drawn, 64)
        x, y = data["x"][indices], data["y"][indices]
        state = update(*state, x, y, indices < 0)
    jax.block_until_ready(state)
    params = accounting.analysis.DpParams(
        noise_multipliers=z, num_samples=count, delta=delta, batch_size=SIZE
    )
    spent = float(accountant.compute_epsilon(steps, params))
    seconds = time.perf_counter() - begun
    parts = np.array_split(data["test_x"], 10)
    logits = np.concatenate([np.asarray(apply(state[0], part)) for part in parts])
    return _found(seconds, logits, data, spent)


def _found(seconds: float, logits: np.ndarray, data: Any, spent: float) -> Found:
    accuracy = float(np.mean(np.argmax(logits, -1) == data["test_y"]))
    return {"seconds": seconds, "accuracy": accuracy, "spent": spent}


LIBRARIES = {
    "keras": ("tensorflow", keras),
    "tfdpclip": ("tensorflow", tfdpclip),
    "opacus": ("opacus", opacus),
    "opacus_ghost": ("opacus", opacus_ghost),
    "jax_privacy": ("jax", jax_privacy),
}


def _arrays(where: str) -> dict[str, np.ndarray]:
    """Images of [0, 1] and labels, for training and to test; "synthetic" is noise."""
    if where == "synthetic":
        rng = np.random.default_rng(0)
        found = {
            name: rng.random((512, 28, 28, 1), np.float32) for name in ("x", "test_x")
        }
        return found | {name: rng.integers(10, size=512) for name in ("y", "test_y")}
    found = {}
    for part, prefix in (("train", ""), ("t10k", "test_")):
        names = (f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz")
        pixels, labels = (
            np.frombuffer(
                gzip.decompress(pathlib.Path(where, n).read_bytes()), np.uint8
            )
            for n in names
        )
        images = pixels[16:].reshape(-1, 28, 28, 1)
        found[f"{prefix}x"] = images.astype(np.float32) / 255
        found[f"{prefix}y"] = labels[8:].astype(np.int64)
    return found


def _worker(told: Sequence[str]) -> None:
    """Trains once, as its parent says."""
    name, arrays, epochs, epsilon, delta, result = told
    data = dict(np.load(arrays))
    found = LIBRARIES[name][1](data, int(epochs), float(epsilon), float(delta))
    pathlib.Path(result).write_text(json.dumps(found))


def main(argv: Sequence[str] | None = None) -> None:
    """Trains by each library that is installed, in turn, and writes a table."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--worker"]:
        return _worker(arguments[1:])
    # The environments of the peers lack these modules.
    from benchmarks import cells, sections
    from benchmarks.peers import installed

    parser = command_line.argument_parser(__doc__)
    add = parser.add_argument
    add("--data", required=True, help="A directory with MNIST's four .gz files.")
    add("--libraries", default=",".join(LIBRARIES))
    add("--epochs", type=int, default=5)
    add("--epsilon", type=float, default=3.0)
    add("--turns", type=int, default=2)
    add("--output_dir", type=pathlib.Path, default=pathlib.Path("runs/benchmarks"))
    options = parser.parse_args(arguments)
    names = options.libraries.split(",")
    unknown = [name for name in names if name not in LIBRARIES]
    if unknown:
        parser.error(f"--libraries: no {unknown[0]} among {', '.join(LIBRARIES)}")
    if options.data != "synthetic" and not pathlib.Path(options.data).is_dir():
        parser.error(f"--data: no directory {options.data}")
    data = _arrays(options.data)
    frameworks = list(dict.fromkeys(LIBRARIES[name][0] for name in names))
    installed.record(options.output_dir, frameworks)
    table = cells.Table(options.output_dir / "to_accuracy.csv", COLUMNS, _KEY)
    with tempfile.TemporaryDirectory() as folder:
        arrays = pathlib.Path(folder, "arrays.npz")
        np.savez(arrays, **data)
        delta = 0.1 / len(data["y"])
        for turn in range(options.turns):
            for name in names:
                case = name, options.epochs, options.epsilon, turn
                key = dict(zip(_KEY, case, strict=True))
                python = installed.python_of(LIBRARIES[name][0])
                if python is None:
                    print(installed.how_to_create(LIBRARIES[name][0]))
                    continue
                if table.find(key):
                    continue
                result = pathlib.Path(folder, "result")
                numbers = map(str, (options.epochs, options.epsilon, delta))
                command = [python, "-m", "benchmarks.to_accuracy", "--worker", name]
                subprocess.run(
                    [*command, arrays, *numbers, result], check=True, cwd=ROOT
                )
                found = json.loads(result.read_text())
                table.add([{**key, **found}])
                print(name, *(f"{key} {value:.4g}" for key, value in found.items()))
    sections.write(options.output_dir)


if __name__ == "__main__":
    main()
