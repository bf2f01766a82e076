"""Finds the most rows of a step that fit into some memory, by steps on zeros."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpclip import _arguments, _progress
from tfdpclip.sampling.batches import Batches

# The factor to the next size: at most `_LEAP`, and aimed at `_NEXT` of the memory; at
# more than that, at most `_SURE` of the memory if the memory grows with the rows.
_LEAP, _LEAST_LEAP, _NEXT = 8.0, 1.05, 0.5
# From `_ENOUGH` of the memory on, a line leads to a size that should use `_AIM` of it.
# The line goes through sizes that are `_APART` of the memory apart: most of a step's
# memory may not depend on the rows (the comparison of the first step, of all weights).
_ENOUGH, _APART, _AIM = 0.25, 0.1, 0.85
# The memory of a step varies by up to a quarter. So the most of `_STEPS` steps counts,
# and must stay below `_SURE` of the memory. The first step compares its gradients.
_STEPS, _SURE = 8, 0.92
_FIRST_ROWS = 8
#: Below this number of bytes, too little of a step's memory would be counted.
LEAST = 2**24


def growth(run: Callable[[], Any]) -> int:
    """The peak of a device's tensor memory during a call, above its end, in bytes.

    With GPUs, the GPU with the largest growth counts. On CPUs, small tensors are not
    counted, and without oneDNN no tensors are.

    Args:
      run: the function.

    Raises:
      NotImplementedError: if TensorFlow does not count the memory.
    """
    gpus = len(tf.config.list_logical_devices("GPU"))
    devices = [f"GPU:{i}" for i in range(gpus)] or ["CPU:0"]
    info = tf.config.experimental.get_memory_info
    gc.collect()
    with tf.device(devices[0]):
        counted = tf.zeros([LEAST])  # float32
    try:
        counts = info(devices[0])["current"] >= LEAST
    except ValueError:  # There are no statistics for this device's allocator.
        counts = False
    if not counts:
        raise NotImplementedError(
            f"TensorFlow does not count the memory of {devices[0]} here. Say "
            "PrivacyPlan(..., physical_batch_size=...), or, on a CPU, have it count: "
            "set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported."
        )
    del counted
    for device in devices:
        tf.config.experimental.reset_memory_stats(device)
    run()
    gc.collect()
    found = map(info, devices)
    return max(counts["peak"] - counts["current"] for counts in found)


def measure_step(model: Any, batches: Any, pieces: int) -> int:
    """The memory of a compiled model's steps, beyond the state between them, in bytes.

    Args:
      model: a compiled model, which is trained.
      batches: batches, for their shape only; no batch is drawn.
      pieces: the number of batches in a step of the model's optimizer.

    Raises:
      ValueError: if an argument is something else.
    """
    if not isinstance(model, tf.keras.Model) or not isinstance(batches, Batches):
        raise ValueError(
            "training must return (model, batches), a compiled model and the result "
            "of plan.batches, got "
            f"({_arguments.shown(model)}, {_arguments.shown(batches)})."
        )
    *data, weights = batches.element_spec
    zeros = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), data)
    # With weights of 0, no step would have anything to compare.
    ones = tf.nest.map_structure(lambda spec: tf.ones(spec.shape, spec.dtype), weights)
    steps = tf.data.Dataset.from_tensors((*zeros, ones)).repeat(_STEPS * pieces)
    return growth(lambda: model.fit(steps, verbose=0))


def find_most_rows(used_by: Callable[[int], int], memory: int, limit: int) -> int:
    """The largest number of rows within the memory, from a line through tried sizes.

    Args:
      used_by: gives the bytes that a number of rows uses.
      memory: the allowed bytes.
      limit: the largest number of rows to try.

    Raises:
      ValueError: if a single row uses too much.

    >>> find_most_rows(lambda rows: 100 + 7 * rows, 10_000, 10**6)  # 8,500 bytes
    1200
    >>> find_most_rows(lambda rows: 100 + 7 * rows, 10_000, 500)
    500
    """
    given, memory = memory, int(_SURE * memory)
    fits: dict[int, int] = {}  # bytes by rows, for the sizes that fit
    slope = math.inf
    with _progress.bar(title="memory of a step", unit="size") as bar:
        rows = min(_FIRST_ROWS, limit)
        while rows not in fits:
            bar.set_postfix_str(f"{rows} rows", refresh=False)
            used = used_by(rows)
            bar.update()
            if used > memory and rows == 1:
                raise ValueError(
                    f"A step of one row takes {used:,} bytes, but memory is "
                    f"{given:,}: allow more memory, or use a smaller model."
                )
            if used > memory:
                limit = rows - 1
                rows = max(1, int(rows * _NEXT * memory / used))
                continue
            leap, least = _NEXT * memory / max(used, 1), 2.0
            if fits:
                slope, apart = _line(fits, rows, used, _APART * memory)
                seen = apart and used >= _ENOUGH * memory
                if seen or used >= (1 - _APART) * memory:
                    fits[rows] = used
                    break
                if slope > 0:
                    leap = 1 + (_NEXT * memory - used) / (slope * rows)
            fits[rows] = used
            if used > _NEXT * memory:
                leap, least = memory / used, _LEAST_LEAP
            leap = min(max(leap, least), _LEAP)
            rows = min(max(int(rows * leap), rows + 1), limit)
    most = max(fits)
    if slope <= 0:  # memory that does not grow with the rows hides the growth
        slope = max(fits[most], 1) / most
    more = (_AIM * given - fits[most]) / slope
    rows = min(most + max(int(more), 0), limit)
    while rows > most and (used := used_by(rows)) > memory:
        rows = max(most, min(int(rows * _AIM * given / used), rows - 1))
    return rows


def _line(
    fits: dict[int, int], rows: int, used: int, apart: float
) -> tuple[float, bool]:
    """The bytes of a row, by a line to a smaller size; and whether it uses far less.

    Args:
      fits: bytes by rows, for smaller sizes.
      rows: the number of rows.
      used: their bytes.
      apart: the difference of bytes that the largest smaller size should have.
    """
    far = [size for size in fits if size < rows and used - fits[size] >= apart]
    before = max(far) if far else min(fits)
    return (used - fits[before]) / (rows - before), bool(far)
