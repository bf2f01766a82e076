"""Wall time from arrays in memory to a stated epsilon and an accuracy, by library.

    python -m benchmarks.to_accuracy --data=data/mnist
    python -m benchmarks.to_accuracy --task=plays --data=data/shakespeare

MNIST and the network mnist_cnn of the other benchmarks, or passages of plays, which are
of a comedy or of a tragedy, and the network embedding. Stochastic gradient descent at
one rate and one clip norm, Poisson batches of 256 on average, the same epochs and the
same epsilon and delta; each library with its own sampler, its own accountant and its
fastest way to clip, in a separate process, in turn. The seconds cover all that a user
waits for after the import of the libraries: noise, model, compilation, training,
epsilon. The first weights come from the distributions of Keras everywhere, and each
turn draws weights, batches and noise anew.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from driver_kit import command_line

ROOT = pathlib.Path(__file__).resolve().parents[1]
COLUMNS = (
    "task",
    "library",
    "epochs",
    "epsilon",
    "turn",
    "seconds",
    "accuracy",
    "spent",
)
_KEY = ("task", "library", "epochs", "epsilon", "turn")
SIZE = 256
# Words of a passage, and public buckets to which the words are hashed.
_WORDS, _BUCKETS = 32, 10_000
# Keras draws an embedding's first weights from [-0.05, 0.05].
_TABLE = 0.05
_TRAGEDIES = (
    *("antony", "coriolanus", "hamlet", "julius", "lear", "macbeth", "othello"),
    *("romeo", "timon", "tragedy"),
)
_COMEDIES = (
    *("alls", "as_you", "comedy", "loves", "measure", "merchant", "merry", "midsummer"),
    *("much", "taming", "tempest", "twelfth", "two_gentlemen", "winters"),
)

Found = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Task:
    """A network of the benchmarks, its learning rate and its clip norm.

    Attributes:
      sizes: of the Keras network, where they are not the benchmarks' own.
      plain_rate: the learning rate without privacy; without clipping, the rate of the
        private runs may diverge.
    """

    network: str
    sizes: dict[str, int]
    rate: float
    plain_rate: float
    clip: float
    epochs: int


TASKS = {
    "mnist": Task("mnist_cnn", {}, 0.25, 0.25, 1.0, 3),
    "plays": Task("embedding", {"length": _WORDS}, 4.0, 1.0, 0.5, 10),
}


def keras(task: Task, data: Any, epsilon: float, delta: float, seed: int) -> Found:
    """Keras without privacy, and shuffled batches."""
    del epsilon, delta
    import tensorflow as tf

    from benchmarks import models

    tf.keras.utils.set_random_seed(seed)

    begun = time.perf_counter()
    model = models.make(task.network, **task.sizes).build()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(task.plain_rate), loss, jit_compile=False)
    model.fit(data["x"], data["y"], SIZE, task.epochs, verbose=0)
    seconds = time.perf_counter() - begun
    return _found(seconds, model.predict(data["test_x"], verbose=0), data, math.inf)


def tfdpclip(task: Task, data: Any, epsilon: float, delta: float, seed: int) -> Found:
    """A plan of this library, with the common clip norm."""
    import tensorflow as tf

    import tfdpclip as dpc
    from benchmarks import models

    tf.keras.utils.set_random_seed(seed)

    begun = time.perf_counter()
    plan = dpc.keras.PrivacyPlan(
        epsilon, delta, examples=len(data["y"]), batch_size=SIZE, epochs=task.epochs
    )
    model = models.make(task.network, **task.sizes).build()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = plan.optimizer(dpc.keras.DPSGD, task.rate, clip=task.clip)
    executions = plan.steps_per_execution
    model.compile(optimizer, loss, jit_compile=False, steps_per_execution=executions)
    batches = plan.batches((data["x"], data["y"]))
    model.fit(batches, epochs=plan.epochs, verbose=0, callbacks=plan.callbacks)
    spent = plan.statement().epsilon
    seconds = time.perf_counter() - begun
    return _found(seconds, model.predict(data["test_x"], verbose=0), data, spent)


def opacus(
    task: Task, data: Any, epsilon: float, delta: float, seed: int, mode: str = "hooks"
) -> Found:
    """Opacus, whose engine finds the noise and makes the loader."""
    import torch
    from opacus import PrivacyEngine

    from benchmarks.peers import torch_models

    def inputs(name):
        found = torch.tensor(data[name])
        return found.permute(0, 3, 1, 2).contiguous() if found.ndim == 4 else found

    begun = time.perf_counter()
    torch.manual_seed(seed)
    model = torch_models.make(task.network, {})
    for part in model.modules():
        if isinstance(part, torch.nn.Embedding):
            torch.nn.init.uniform_(part.weight, -_TABLE, _TABLE)
        elif isinstance(part, (torch.nn.Linear, torch.nn.Conv2d)):
            torch.nn.init.xavier_uniform_(part.weight)
            torch.nn.init.zeros_(part.bias)
    optimizer, loss = (
        torch.optim.SGD(model.parameters(), task.rate),
        torch.nn.CrossEntropyLoss(),
    )
    records = torch.utils.data.TensorDataset(inputs("x"), torch.tensor(data["y"]))
    engine = PrivacyEngine()
    made = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        criterion=loss,
        data_loader=torch.utils.data.DataLoader(records, SIZE),
        epochs=task.epochs,
        target_epsilon=epsilon,
        target_delta=delta,
        max_grad_norm=task.clip,
        grad_sample_mode=mode,
    )
    model, optimizer, loader = made[0], made[1], made[-1]
    loss = made[2] if len(made) == 4 else loss
    for _ in range(task.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    spent = engine.get_epsilon(delta)
    seconds = time.perf_counter() - begun
    with torch.no_grad():
        logits = model.eval()(inputs("test_x")).numpy()
    return _found(seconds, logits, data, spent)


def opacus_ghost(
    task: Task, data: Any, epsilon: float, delta: float, seed: int
) -> Found:
    """The same by ghost clipping."""
    return opacus(task, data, epsilon, delta, seed, "ghost")


def jax_privacy(
    task: Task, data: Any, epsilon: float, delta: float, seed: int
) -> Found:
    """jax_privacy: its calibration, its sampler padded to few sizes, its noise."""
    import jax
    import jax_privacy as private
    import optax
    from jax_privacy import accounting, batch_selection

    from benchmarks.peers import jax_models

    begun = time.perf_counter()
    count = len(data["y"])
    steps = math.ceil(count / SIZE) * task.epochs
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
    apply, parameters = jax_models.make(task.network)
    parameters = _as_keras_begins(task, parameters, seed)
    optimizer = optax.sgd(task.rate)

    def loss(p, x, y):
        logits = apply(p, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    gradient = private.clipped_grad(
        loss, l2_clip_norm=task.clip, normalize_by=float(SIZE), batch_argnums=(1, 2)
    )
    noise = private.noise_addition.gaussian_privatizer(
        stddev=z * gradient.sensitivity(), prng_key=jax.random.key(seed)
    )

    @jax.jit
    def update(p, inner, noise_state, x, y, padding):
        found = gradient(p, x, y, is_padding_example=padding)
        found, noise_state = noise.update(found, noise_state)
        change, inner = optimizer.update(found, inner, p)
        return optax.apply_updates(p, change), inner, noise_state

    state = parameters, optimizer.init(parameters), noise.init(parameters)
    sampler = batch_selection.CyclicPoissonSampling(SIZE / count, steps)
    for drawn in sampler.batch_iterator(count, seed):
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


def _as_keras_begins(task: Task, parameters: Any, seed: int) -> list[np.ndarray]:
    """Fresh weights from the distributions of Keras: tables come first."""
    rng, made = np.random.default_rng(seed), []
    for place, shape in enumerate(value.shape for value in parameters):
        if len(shape) == 1:
            made.append(np.zeros(shape, np.float32))
            continue
        field = math.prod(shape[:-2])
        bound = math.sqrt(6 / (field * (shape[-2] + shape[-1])))
        if task.network == "embedding" and place == 0:
            bound = _TABLE
        made.append(rng.uniform(-bound, bound, shape).astype(np.float32))
    return made


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


def _synthetic(task: str) -> dict[str, np.ndarray]:
    """Noise of the shapes of a task."""
    rng, found = np.random.default_rng(0), {}
    for prefix in ("", "test_"):
        if task == "mnist":
            found[f"{prefix}x"] = rng.random((512, 28, 28, 1), np.float32)
        else:
            found[f"{prefix}x"] = rng.integers(_BUCKETS, size=(512, _WORDS))
        found[f"{prefix}y"] = rng.integers(2, size=512)
    return found


def passages(where: pathlib.Path) -> dict[str, np.ndarray]:
    """Passages of plays as buckets of words; 1 for tragedies, 0 for comedies."""
    rows, labels = [], []
    for path in sorted(where.glob("*.txt")):
        if not path.name.startswith(_COMEDIES + _TRAGEDIES):
            continue
        words = re.findall("[a-z']+", path.read_text("utf-8").lower())
        buckets = [zlib.crc32(word.encode()) % _BUCKETS for word in words]
        count = len(buckets) // _WORDS
        rows.append(np.array(buckets[: count * _WORDS]).reshape(count, _WORDS))
        labels.append(np.full(count, int(path.name.startswith(_TRAGEDIES))))
    if len({label for part in labels for label in part}) < 2:
        raise ValueError(f"no comedies and tragedies as .txt files in {where}")
    x, y = np.concatenate(rows), np.concatenate(labels)
    order = np.random.default_rng(0).permutation(len(x))
    test, train = np.split(order, [len(x) // 5])
    return {"x": x[train], "y": y[train], "test_x": x[test], "test_y": y[test]}


def _images(where: pathlib.Path) -> dict[str, np.ndarray]:
    """MNIST's images, scaled to [0, 1], and its labels."""
    found = {}
    for part, prefix in (("train", ""), ("t10k", "test_")):
        names = (f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz")
        pixels, labels = (
            np.frombuffer(gzip.decompress((where / n).read_bytes()), np.uint8)
            for n in names
        )
        images = pixels[16:].reshape(-1, 28, 28, 1)
        found[f"{prefix}x"] = images.astype(np.float32) / 255
        found[f"{prefix}y"] = labels[8:].astype(np.int64)
    return found


def _worker(told: Sequence[str]) -> None:
    """Trains once, as its parent says."""
    name, task, arrays, epochs, epsilon, delta, turn, result = told
    data = dict(np.load(arrays))
    chosen = dataclasses.replace(TASKS[task], epochs=int(epochs))
    found = LIBRARIES[name][1](chosen, data, float(epsilon), float(delta), int(turn))
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
    add("--task", choices=list(TASKS), default="mnist")
    add("--data", required=True, help="MNIST's four .gz files, or plays as .txt files.")
    add("--libraries", default=",".join(LIBRARIES))
    add("--epochs", type=int, help="3 for mnist and 10 for plays where it is left out.")
    add("--epsilon", type=float, default=3.0)
    add("--turns", type=int, default=5)
    add(
        "--output_dir",
        type=command_line.named_path,
        default=pathlib.Path("runs/benchmarks"),
    )
    options = parser.parse_args(arguments)
    names = options.libraries.split(",")
    unknown = [name for name in names if name not in LIBRARIES]
    if unknown:
        parser.error(f"--libraries: no {unknown[0]} among {', '.join(LIBRARIES)}")
    if options.data != "synthetic" and not pathlib.Path(options.data).is_dir():
        parser.error(f"--data: no directory {options.data}")
    read = {"mnist": _images, "plays": passages}[options.task]
    try:
        made = options.data == "synthetic"
        data = _synthetic(options.task) if made else read(pathlib.Path(options.data))
    except (OSError, ValueError) as error:
        parser.error(f"--data: {error}")
    epochs = options.epochs or TASKS[options.task].epochs
    frameworks = list(dict.fromkeys(LIBRARIES[name][0] for name in names))
    installed.record(options.output_dir, frameworks)
    table = cells.Table(options.output_dir / "to_accuracy.csv", COLUMNS, _KEY)
    with tempfile.TemporaryDirectory() as folder:
        arrays = pathlib.Path(folder, "arrays.npz")
        np.savez(arrays, **data)
        delta = 0.1 / len(data["y"])
        for turn in range(options.turns):
            for name in names:
                case = options.task, name, epochs, options.epsilon, turn
                key = dict(zip(_KEY, case, strict=True))
                python = installed.python_of(LIBRARIES[name][0])
                if python is None:
                    print(installed.how_to_create(LIBRARIES[name][0]))
                    continue
                if table.find(key):
                    continue
                result = pathlib.Path(folder, "result")
                numbers = map(str, (epochs, options.epsilon, delta, turn))
                command = [python, "-m", "benchmarks.to_accuracy", "--worker", name]
                command += [options.task, arrays, *numbers, result]
                subprocess.run(command, check=True, cwd=ROOT)
                found = json.loads(result.read_text())
                table.add([{**key, **found}])
                print(name, *(f"{key} {value:.4g}" for key, value in found.items()))
    sections.write(options.output_dir)


if __name__ == "__main__":
    main()
