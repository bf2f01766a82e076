"""How many rows a step can have within some memory: found by running steps of zeros."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpclip import _arguments, _progress
from tfdpclip.sampling.batches import Batches

# The next size is so much larger at the most, and expected to use half the memory.
_LEAP, _LEAST_LEAP, _NEXT = 8.0, 1.25, 0.5
# From a quarter of it on, a line leads to a size that should use so much, and is tried.
_ENOUGH, _AIM = 0.25, 0.85
# What a step takes differs from step to step, by up to a quarter: the most of seven
# more, of which three (2, 4 and 8) check themselves and take the most, and this of it.
_MORE_STEPS, _SURE = 7, 0.92
_FIRST_ROWS = 8
#: Bytes below which it would count too little of a step.
LEAST = 2**24


def growth(run: Callable[[], Any]) -> int:
    """How many bytes of tensors a device held more at the most, while something ran.

    Of GPUs where there are any: the one that grew most. On CPUs, small tensors are not
    counted, and without oneDNN none are.

    Args:
      run: what runs.

    Raises:
      NotImplementedError: if TensorFlow does not count them.
    """
    gpus = len(tf.config.list_logical_devices("GPU"))
    devices = [f"GPU:{i}" for i in range(gpus)] or ["CPU:0"]
    info = tf.config.experimental.get_memory_info
    gc.collect()
    with tf.device(devices[0]):
        counted = tf.zeros([LEAST])  # float32
    try:
        counts = info(devices[0])["current"] >= LEAST
    except ValueError:  # It has no statistics of this device's allocator.
        counts = False
    if not counts:
        raise NotImplementedError(
            f"TensorFlow does not count the memory of {devices[0]} here. Say "
            "PrivacyPlan(..., physical_batch_size=...), or, on a CPU, have it count: "
            "set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported."
        )
    del counted
    held = {}
    for device in devices:
        tf.config.experimental.reset_memory_stats(device)
        held[device] = info(device)["current"]
    run()
    return max(info(device)["peak"] - before for device, before in held.items())


def of_step(model: Any, batches: Any, pieces: int) -> int:
    """What a compiled model's steps need beyond what is kept between them, in bytes.

    Args:
      model: compiled; it is trained.
      batches: their shape is used, and none is drawn.
      pieces: of how many batches its optimizer makes a step.

    Raises:
      ValueError: if they are something else.
    """
    if not isinstance(model, tf.keras.Model) or not isinstance(batches, Batches):
        raise ValueError(
            "training must return (model, batches), a compiled model and what "
            "plan.batches returns, got "
            f"({_arguments.shown(model)}, {_arguments.shown(batches)})."
        )
    zeros = tf.nest.map_structure(
        lambda spec: tf.zeros(spec.shape, spec.dtype), batches.element_spec
    )
    data = tf.data.Dataset.from_tensors(zeros)
    model.fit(data.repeat(pieces), verbose=0)
    again = data.repeat(_MORE_STEPS * pieces)
    return growth(lambda: model.fit(again, verbose=0))


def most_rows(used_by: Callable[[int], int], memory: int, limit: int) -> int:
    """How many rows stay within the memory: from some sizes, and the line they make.

    Args:
      used_by: how many bytes so many rows use.
      memory: how many they may.
      limit: rows that are not gone beyond.

    Raises:
      ValueError: if one row uses more.

    >>> most_rows(lambda rows: 100 + 7 * rows, 10_000, 10**6)  # 8,500 bytes
    1200
    >>> most_rows(lambda rows: 100 + 7 * rows, 10_000, 500)
    500
    """
    given, memory = memory, int(_SURE * memory)
    fits: dict[int, int] = {}  # what was tried and fits
    slope = math.inf
    with _progress.bar(title="memory of a step", unit="size") as bar:
        rows = min(_FIRST_ROWS, limit)
        while rows not in fits:
            bar.set_postfix_str(f"{rows} rows", refresh=False)
            used = used_by(rows)
            bar.update()
            if used > memory and rows == 1:
                raise ValueError(
                    f"A step of one row takes {used:,} bytes, and memory is "
                    f"{given:,}: give it more, or use a smaller model."
                )
            if used > memory:
                limit = rows - 1
                rows = max(1, int(rows * _NEXT * memory / used))
                continue
            leap = _NEXT * memory / max(used, 1)
            if fits:
                before = max(fits)
                slope = (used - fits[before]) / (rows - before)
                if slope > 0:
                    leap = 1 + (_NEXT * memory - used) / (slope * rows)
            fits[rows] = used
            if len(fits) > 1 and used >= _ENOUGH * memory:
                break
            least = 2.0 if used <= _NEXT * memory else _LEAST_LEAP
            leap = min(max(leap, least), _LEAP)
            rows = min(max(int(rows * leap), rows + 1), limit)
    most = max(fits)
    if slope <= 0:  # what does not grow with the rows hides what does
        slope = fits[most] / most
    more = (_AIM * given - fits[most]) / slope
    rows = min(most + max(int(more), 0), limit)
    while rows > most and (used := used_by(rows)) > memory:
        rows = max(most, min(int(rows * _AIM * given / used), rows - 1))
    return rows
