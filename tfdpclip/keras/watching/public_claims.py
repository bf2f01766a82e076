"""What a run takes for public: data of callbacks, and variables of the optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.keras.watching.choosing_callbacks import callbacks_of_fit

#: The attribute of a callback that holds its public data.
DATA = "_tfdpclip_public_data"
# `np.shares_memory` gives up beyond so many candidates: then nothing is known.
_MOST_WORK = 10_000


def assumptions_about(model: Any) -> list[str]:
    """What a statement says of the public data and variables of a call of `fit`."""
    texts = [
        f"the data of {type(callback).__name__} are public"
        for callback in _with_public_data()
    ]
    declared = getattr(model.optimizer, "_public_variables", None)
    names = ", ".join(repr(name) for name in getattr(declared, "names", ()))
    if names:
        texts.append(f"the public_variables {names} hold no private data")
    return texts


def refuse_private_data(arrays: Any) -> None:
    """Raises if a callback measures private arrays without noise.

    Args:
      arrays: the arrays that the batches are drawn from; None if they are not known.
    """
    private = [a for a in tf.nest.flatten(arrays) if isinstance(a, np.ndarray)]
    for callback in _with_public_data():
        given = [
            a
            for a in tf.nest.flatten(getattr(callback, DATA))
            if isinstance(a, np.ndarray)
        ]
        if any(_overlap(one, other) for one in given for other in private):
            name = type(callback).__name__
            raise PrivacyMismatchError(
                f"The data of {name} are in the private batches, too, and {name} "
                "measures them without noise. Give it public data, "
                f"{name}((public_x, public_y)), or keep apart what may be public: "
                "plan.batches((x[1000:], y[1000:])), and x[:1000]."
                + see("clip-norms-from-private-data")
            )


def _with_public_data() -> list[Any]:
    return [c for c in callbacks_of_fit() if getattr(c, DATA, None) is not None]


def _overlap(one: np.ndarray, other: np.ndarray) -> bool:
    try:
        return bool(np.shares_memory(one, other, max_work=_MOST_WORK))
    except RuntimeError:
        return False
