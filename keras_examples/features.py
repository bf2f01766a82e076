"""Features of a network, in files that record the network's privacy cost.

A head that trains on features of the same records composes with the earlier training of
the network. So a file of features states that training, and a file without a statement
is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from driver_kit import npz_files, settings
from keras_examples.digits_data import load_data
from tfdpclip import files
from tfdpclip.accounting import Ledger, PrivacyMismatchError, PrivacyStatement

ARRAYS = ("features", "labels", "split")
_HISTORY, _FORMAT = "history", 1
LAYOUT = (
    "a .npz file with `features` [n, D], `labels` [n] and `split` [n], which is "
    "'train' or 'test'"
)
_FIX = (
    "Write the file again with `python -m keras_examples.transfer_film "
    "--write_features`; or, if the features come from elsewhere, say what their "
    "network has seen: `python -m keras_examples.declare_features --features={name} "
    '--network="which one, trained on what"` with `--frozen`, if it has seen none of '
    "these images, or with `--ledger=FILE` of its private training."
)


@dataclasses.dataclass(frozen=True)
class History:
    """The training history of a network that computes features of records.

    Attributes:
      network: the network and its public training, in words.
      ledger: of its private training on these very records; None if it was not trained
        on them.
    """

    network: str
    ledger: Ledger | None = None


@dataclasses.dataclass(frozen=True)
class Features:
    """Features and labels for training and testing.

    *Formal guarantees*

    * `ledger` starts with all events that the history spent on these records; events
      recorded later compose with them.

    Attributes:
      train: features `[n, D]` and labels `[n]`.
      test: the same.
      classes: number of classes.
      name: of the data, for reports.
      public: whether the records are public.
      history: of their network; None for raw pixels, which have none.
    """

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classes: int
    name: str
    public: bool = False
    history: History | None = None

    @property
    def spent(self) -> bool:
        """Whether anything was spent on the records before."""
        return self.history is not None and self.history.ledger is not None

    @property
    def digest(self) -> str:
        """A SHA-256 of the arrays, by which to know them again."""
        digest = hashlib.sha256()
        for array in (*self.train, *self.test):
            digest.update(f"{array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def ledger(self, delta: float) -> Ledger:
        """A new ledger, in memory, with the phases of the history."""
        if self.history is None or self.history.ledger is None:
            return Ledger(delta)
        content = self.history.ledger.to_dict()
        # The events of the phases do not depend on the delta and the accountant.
        return Ledger.from_dict({**content, "delta": delta, "accountant": "pld"})

    def statement(
        self,
        delta: float,
        *,
        noise_multiplier: float,
        sampling: Any,
        steps: int,
        clip: str = "",
    ) -> PrivacyStatement:
        """The cost of a training run on the features, with the history's cost.

        Raises:
          UsageError: if the two cannot add up.
        """
        ledger = self.ledger(delta)
        try:
            ledger.begin(
                noise_multiplier=noise_multiplier,
                sampling=sampling,
                clip=clip,
                change=True,
            )
        except PrivacyMismatchError as error:
            raise settings.UsageError(f"flag --features={self.name}: {error}") from None
        ledger.record(steps)
        if self.history is not None and self.history.ledger is None:
            ledger.assume(
                f"the network of the features ({self.history.network}) has seen none "
                "of these records"
            )
        return ledger.statement()

    def caveats(self) -> list[str]:
        """The caveats of a report on heads that train on the features."""
        if self.history is None:
            return []
        if self.history.ledger is None:
            return [
                f"Features of {self.history.network}, which is said to have seen none "
                "of these records."
            ]
        return [
            f"Features of {self.history.network}, which was trained on these very "
            "records. Budgets in tables and figures are those of the heads alone; the "
            "privacy statement adds what was spent before."
        ]


def digits(variant: str = "plain") -> Features:
    """scikit-learn's digits, pixels as features; variants as in `digits_data`."""
    data = load_data(variant)
    x, y = (np.concatenate(part) for part in zip(data.train, data.public, strict=True))
    if variant == "imbalanced":  # The public part is balanced.
        x, y = data.train
    # From [-1, 1] to [0, 1].
    train, test = ((x + 1) / 2, y), ((data.test[0] + 1) / 2, data.test[1])
    return Features(train, test, 10, f"digits ({variant})", public=True)


def write(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], history: History
) -> None:
    """Writes a file that `read` accepts.

    *Formal guarantees*

    * A SHA-256 checksum binds the history to the arrays: `read` finds damage to either,
      and the history of other features. (A checksum does not stop a deliberate forger,
      who could compute a new checksum.)

    Args:
      path: the .npz file.
      arrays: `features`, `labels` and `split`.
      history: of their network.
    """
    kept = {name: np.asarray(arrays[name]) for name in ARRAYS}
    about: dict[str, Any] = {
        "format": _FORMAT,
        "network": history.network,
        "ledger": None if history.ledger is None else history.ledger.to_dict(),
    }
    about["checksum"] = _checksum(about, kept)
    content = io.BytesIO()
    np.savez(content, **kept, history=np.array(json.dumps(about)))
    files.write_atomically(path, content.getvalue())


def read(name: str) -> Features:
    """Cached features of a network: features `[n, D]`, labels, split, history.

    Raises:
      UsageError: if the file is not that, or its history is missing or damaged.
    """
    arrays = read_arrays(name)
    history = _history(name, arrays)
    x = arrays["features"].astype(np.float32)
    y = arrays["labels"].astype(np.int64)
    split = arrays["split"].astype(str)
    training, testing = split == "train", split == "test"
    # Most files have this name, in directories whose names describe them.
    path = pathlib.Path(name)
    title = path.parent.name if path.stem == "features" else path.stem
    return Features(
        (x[training], y[training]),
        (x[testing], y[testing]),
        int(y.max()) + 1,
        title or path.stem,
        history=history,
    )


def read_arrays(name: str) -> dict[str, np.ndarray]:
    """The arrays of a file of features, checked, as they are in the file.

    Raises:
      UsageError: if the file is not that.
    """
    try:
        found = npz_files.read_npz(name)
        missing = [part for part in ARRAYS if part not in found]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        x = found["features"].astype(np.float32)
        if found["labels"].dtype.kind not in "iu":
            raise ValueError(f"`labels` are {found['labels'].dtype}, not integers")
        y = found["labels"].astype(np.int64)
        split = found["split"].astype(str)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise settings.UsageError(
            f"flag --features={name}: {error}. It must be {LAYOUT}."
        ) from error
    fits = x.ndim == 2 and y.shape == split.shape == (len(x),)
    if fits and not np.all(np.isfinite(x)):
        raise settings.UsageError(f"flag --features={name}: `features` must be finite.")
    parts = set(split.tolist()) if fits else set()
    if parts != {"train", "test"} or y.min() < 0:
        raise settings.UsageError(
            f"flag --features={name}: `features` must be [n, D], `labels` [n] from 0 "
            "and `split` [n], with both 'train' and 'test' in it and nothing else."
        )
    return found


def has_history(arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether arrays of a file come with a history, readable or not."""
    return _HISTORY in arrays


def _history(name: str, arrays: Mapping[str, np.ndarray]) -> History:
    fix = _FIX.format(name=name)
    if not has_history(arrays):
        raise settings.UsageError(
            f"flag --features={name}: the file does not say what its network has seen "
            "(it has no `history`), so what was spent on these records is unknown. "
            + fix
        )
    try:
        stored = arrays[_HISTORY]
        if stored.dtype.kind != "U" or stored.shape:
            raise ValueError("it is no text")
        about = json.loads(str(stored))
        if not isinstance(about, dict) or about.get("format") != _FORMAT:
            raise ValueError("it is of no format that this version knows")
        if about.pop("checksum", None) != _checksum(about, arrays):
            raise ValueError("its checksum fits neither it nor these features")
        network, ledger = about["network"], about["ledger"]
        if not isinstance(network, str):
            raise ValueError("its network is no text")
        return History(network, None if ledger is None else Ledger.from_dict(ledger))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise settings.UsageError(
            f"flag --features={name}: its `history` cannot be read: {error}; so what "
            f"was spent on these records is unknown. {fix}"
        ) from error


def _checksum(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode())
    for name in ARRAYS:
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
        digest.update(array.tobytes())
    return "sha256:" + digest.hexdigest()
