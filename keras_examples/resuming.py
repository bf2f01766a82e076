"""A training that goes on after a kill, when the same command runs again."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from driver_kit import json_files, reports
from driver_kit.settings import UsageError
from tfdpclip import files

#: Settings that change no number of a training.
_FREE = ("data_dir", "figure_format", "output_dir")
#: Keras 3 writes its backup in place, and Keras 2 beside the last.
_SAFE = {"double_checkpoint": True}
#: The types that stand for NaN and infinity in JSON.
_TEXTS = (type(None), str)


class Unfinished:
    """The state of a training in OUTPUT_DIR/unfinished: ledger, backup, rows.

    *Guarantees*: the ledger counts every step that ran, in every process; epochs after
    the last backup run again, with fresh draws and noise, and count again. The files
    belong to one set of settings.

    Args:
      used: the program's settings.
      **facts: the data, in words and numbers, which must stay the same too.

    Attributes:
      path: the directory, for further files.
      rows: the rows of the epochs that ended, oldest first.

    Raises:
      UsageError: if the directory holds a training under other settings.
    """

    def __init__(self, used: Any, **facts: Any):
        self.path = pathlib.Path(used.output_dir) / "unfinished"
        now = dataclasses.asdict(used) | facts
        text = reports.to_json({k: v for k, v in now.items() if k not in _FREE})
        files.prepare_directory(self.path)
        begun, self._rows = self.path / "settings.json", self.path / "rows.json"
        if begun.exists():
            self._refuse_others(json_files.read_json(begun), json.loads(text))
        else:
            files.write_atomically(begun, text)
        rows = json_files.read_json(self._rows) if self._rows.exists() else []
        #: JSON has no NaN and no infinity.
        self.rows: list[dict[str, Any]] = [
            {k: float(v or "nan") if type(v) in _TEXTS else v for k, v in row.items()}
            for row in rows
        ]
        if self.ledger.exists():
            print(f"Going on with the training in {self.path}.", flush=True)

    def _refuse_others(self, begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        names = {*begun, *now}
        changed = sorted(n for n in names if begun.get(n) != now.get(n))
        if changed:
            raise UsageError(
                f"flag --output_dir: {self.path} holds a training that was stopped, "
                f"under another --{changed[0]}. Repeat its command to go on, delete "
                "the directory, or use another, for example --output_dir=runs/mine."
            )

    @property
    def ledger(self) -> pathlib.Path:
        """The file of the ledger, for `PrivacyBudget`."""
        return self.path / "privacy.json"

    def add(self, row: Mapping[str, Any]) -> None:
        """Keeps the row of an epoch; an epoch that ran again replaces its row."""
        earlier = [one for one in self.rows if one["epoch"] < row["epoch"]]
        self.rows[:] = [*earlier, dict(row)]
        files.write_atomically(self._rows, reports.to_json(self.rows))

    def backup(self) -> tf.keras.callbacks.Callback:
        """Saves weights at the end of epochs; goes behind callbacks with tables."""
        kind = tf.keras.callbacks.BackupAndRestore
        known = inspect.signature(kind).parameters
        options = {name: value for name, value in _SAFE.items() if name in known}
        folder = str(self.path / "backup")
        return kind(folder, delete_checkpoint=False, **options)

    def remove(self) -> None:
        """Removes the files, when the training's results are written."""
        shutil.rmtree(self.path)
