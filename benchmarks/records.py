"""Times records from disk: drawn batches of JPEG files, against plain tf.data.

    python -m benchmarks.records --cores=1,2 --output_dir=runs/benchmarks

The given number of files is written to a temporary folder, and decoded at a given size
by the same pipeline (`map` with AUTOTUNE): shuffled, batched and prefetched by
`tf.data` alone; drawn by `Poisson` as `fit` does; and, for a row per file, by a class
with `__getitem__`, with one worker and with eight. They run in turn, `--turns` times;
the best turn counts. The count is of images, without the rows that fill batches up. For
each of `--cores` all is repeated in a process that has so many cores.
"""

from __future__ import annotations

import contextlib
import csv
import gc
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np

import tfdpclip as dpc
from driver_kit import command_line
from driver_kit.lazy import tf

COLUMNS = (
    "cores",
    "variant",
    "files",
    "side",
    "batch_size",
    "images_per_s",
    "images_per_cpu_s",
    "ratio",
    "cpu_ratio",
)
VARIANTS = ("plain", "pipeline", "getitem", "workers")


def write_files(folder: pathlib.Path, count: int, side: int) -> list[str]:
    """Smooth random images, of twice as many pixels on a side as they are read at."""
    paths = []
    for index in range(count):
        small = tf.random.stateless_uniform([8, 8, 3], [index, 0], 0.0, 255.0)
        image = tf.image.resize(small, [2 * side, 2 * side], "bicubic")
        pixels = tf.cast(tf.clip_by_value(image, 0.0, 255.0), tf.uint8)
        paths.append(str(folder / f"{index}.jpg"))
        tf.io.write_file(paths[-1], tf.io.encode_jpeg(pixels))
    return paths


def _image(path: tf.Tensor, side: int) -> tf.Tensor:
    pixels = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
    return tf.image.resize(pixels, [side, side]) / 255.0


class _Files:
    """The same records by random access."""

    def __init__(self, paths: list[str], side: int):
        self._paths, self._side = paths, side

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int):
        return _image(tf.constant(self._paths[index]), self._side).numpy(), index


def _elements(variant: str, paths: list[str], side: int, size: int) -> Iterator[int]:
    """How many images each batch has, without end."""
    slices = tf.data.Dataset.from_tensor_slices((paths, np.arange(len(paths))))

    def read(path, label):
        return _image(path, side), label

    if variant == "plain":
        shuffled = slices.shuffle(len(paths)).repeat()
        images = shuffled.map(read, num_parallel_calls=tf.data.AUTOTUNE)
        for _, labels in images.batch(size).prefetch(tf.data.AUTOTUNE):
            yield len(labels)
        return
    scheme = dpc.sampling.Poisson(size / len(paths))
    if variant == "pipeline":
        batches = scheme.batches(slices.map(read, num_parallel_calls=tf.data.AUTOTUNE))
    else:
        workers = 8 if variant == "workers" else 1
        batches = scheme.batches(_Files(paths, side), workers=workers)
    batches.take_as_drawn(True)
    for *_, weights in batches.repeat():
        yield int(np.sum(weights))


def measure(
    paths: list[str],
    side: int,
    size: int,
    seconds: float,
    turns: int,
    elements: Callable[..., Iterator[int]] = _elements,
) -> list[dict]:
    """The rows of this process.

    Args:
      paths: of the files.
      side: of the images, in pixels.
      size: images of a batch, expected ones where they are drawn.
      seconds: of each turn.
      turns: how many of each variant.
      elements: iterates a variant.

    >>> rows = measure(["a"], 8, 4, 0.01, 1, elements=lambda *_: iter(int, 1))
    >>> [row["variant"] for row in rows]
    ['plain', 'pipeline', 'getitem', 'workers']
    """
    best = {name: [0.0, 0.0] for name in VARIANTS}
    for _ in range(turns):
        for name in VARIANTS:
            stream = elements(name, paths, side, size)
            for _ in range(8):  # Skips the elements fetched before the clock began.
                next(stream)
            images, began, cpu = 0, time.perf_counter(), time.process_time()
            while time.perf_counter() - began < seconds:
                images += next(stream)
            rates = (
                images / (time.perf_counter() - began),
                images / max(1e-9, time.process_time() - cpu),
            )
            best[name] = [max(pair) for pair in zip(best[name], rates, strict=True)]
            del stream
            gc.collect()
    plain = best["plain"]
    return [
        {
            "cores": len(os.sched_getaffinity(0)),
            "variant": name,
            "files": len(paths),
            "side": side,
            "batch_size": size,
            "images_per_s": found[0],
            "images_per_cpu_s": found[1],
            "ratio": found[0] / plain[0] if plain[0] else 1.0,
            "cpu_ratio": found[1] / plain[1] if plain[1] else 1.0,
        }
        for name, found in best.items()
    ]


@contextlib.contextmanager
def _only(cores: int) -> Iterator[None]:
    """Processes that are started within have so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all variants, prints the results and writes records.csv."""
    parser = command_line.argument_parser(__doc__)
    add = parser.add_argument
    add("--files", type=int, default=4000)
    add("--side", type=int, default=96, help="Of decoded images, in pixels.")
    add("--batch_size", type=int, default=64)
    add("--seconds", type=float, default=3.0, help="Of each turn.")
    add("--turns", type=int, default=3)
    add("--cores", help="Numbers of them, by commas; all by default.")
    add(
        "--output_dir",
        type=command_line.named_path,
        default=pathlib.Path("runs/benchmarks"),
    )
    options = parser.parse_args(argv)
    there = len(os.sched_getaffinity(0))
    cores = [int(text) for text in (options.cores or str(there)).split(",")]
    if not 1 <= min(cores) <= max(cores) <= there:
        parser.error(f"--cores: there are {there}")
    if not 1 <= options.batch_size <= options.files:
        parser.error("--batch_size must be from 1 to --files")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    how = options.side, options.batch_size, options.seconds, options.turns
    with (
        tempfile.TemporaryDirectory() as folder,
        (options.output_dir / "records.csv").open("w", newline="") as file,
    ):
        paths = write_files(pathlib.Path(folder), options.files, options.side)
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        print("cores variant   images/s  / plain  of a CPU second  / plain")
        for count in cores:
            # TensorFlow counts cores once.
            spawn = multiprocessing.get_context("spawn")
            with _only(count), ProcessPoolExecutor(1, spawn) as pool:
                rows = pool.submit(measure, paths, *how).result()
            table.writerows(rows)
            for row in rows:
                print(
                    f"{row['cores']:5} {row['variant']:9} {row['images_per_s']:8.0f}"
                    f" {row['ratio']:8.2f} {row['images_per_cpu_s']:16.0f}"
                    f" {row['cpu_ratio']:8.2f}"
                )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
