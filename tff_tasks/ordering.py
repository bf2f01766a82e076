"""Which of a client's examples a round uses, and in which order."""

from __future__ import annotations

import numpy as np


def buffered_shuffle(
    size: int, buffer_size: int, rng: np.random.Generator
) -> np.ndarray:
    """An order of `size` items, shuffled as `tf.data.Dataset.shuffle` does it.

    Items pass through a buffer; each place is taken by a random item of the buffer. A
    buffer of `size` or more gives a uniformly random order; in a smaller buffer, an
    item cannot come much earlier than it was.

    Args:
      size: how many items.
      buffer_size: how many the buffer holds; 1 or less does not shuffle.
      rng: makes the choices.

    >>> buffered_shuffle(4, 1, np.random.default_rng(0)).tolist()
    [0, 1, 2, 3]
    """
    if buffer_size <= 1:
        return np.arange(size)
    if buffer_size >= size:
        return rng.permutation(size)
    buffer = list(range(buffer_size))
    order = np.empty(size, np.int64)
    for place in range(size):
        chosen = int(rng.integers(len(buffer)))
        order[place] = buffer[chosen]
        upcoming = place + buffer_size
        if upcoming < size:
            buffer[chosen] = upcoming
        else:
            buffer[chosen] = buffer[-1]
            buffer.pop()
    return order


def example_order(
    size: int,
    rng: np.random.Generator,
    *,
    shuffle_buffer: int,
    epochs: int,
    max_elements: int | None,
    cap: str,
) -> np.ndarray:
    """The indices of the examples that a client uses in a round, in order.

    Args:
      size: how many examples the client has.
      rng: shuffles, each epoch anew.
      shuffle_buffer: the size of the buffer that shuffles.
      epochs: how often to go through the examples.
      max_elements: how many examples to use at most; None for all.
      cap: "before" takes the first `max_elements` in file order, shuffles and repeats
        them (the code of the paper's time); "after" shuffles and repeats all and takes
        `max_elements` in total (TensorFlow Federated's tasks of today).

    >>> rng = np.random.default_rng(0)
    >>> options = dict(shuffle_buffer=1, epochs=2, max_elements=3)
    >>> example_order(4, rng, cap="before", **options).tolist()
    [0, 1, 2, 0, 1, 2]
    >>> example_order(4, rng, cap="after", **options).tolist()
    [0, 1, 2]
    """
    if cap == "before" and max_elements is not None:
        size = min(size, max_elements)
    order = np.concatenate(
        [buffered_shuffle(size, shuffle_buffer, rng) for _ in range(epochs)]
    )
    if cap == "after" and max_elements is not None:
        order = order[:max_elements]
    return order
