"""The correlated noise of a run: begun, gone on with, and kept in a file of its own."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from typing import Any

from tfdpclip import _arguments, _sealed, files
from tfdpclip._docs import see
from tfdpclip.accounting.ledger import Ledger
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.correlated import NoiseMatrix
from tfdpclip.keras.replicas import gathers_ahead
from tfdpclip.keras.watching.draw_check import DrawCheck
from tfdpclip.keras.watching.step_history import history_of
from tfdpclip.noise.kept import MatrixNoise

_FORMAT = 1
_MOST_BYTES = 2**28
_KEPT_APART = (
    "the secret that the noise goes on from was kept in a file, which nobody has read "
    "who may not see the data"
)
_NAMES = {"format", "holders", "run", "noise", "order", "records", "secret"}


class SecretFile:
    """What correlated noise goes on from, in a file that is as secret as the data.

    *Formal guarantees*

    * Nobody but the owner can read the file, from its first byte on, and it is replaced
      atomically. One that others can read is refused: what was in it may be known.
    * Damage is found: the file has a checksum.

    Args:
      path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)

    def read(self) -> dict[str, Any] | None:
        """What `write` was given; None if there is no file.

        Raises:
          PrivacyMismatchError: If others than the owner can read it.
          ValueError: If it is damaged, or something else.
          OSError: If it cannot be read.
        """
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if os.name != "nt" and (found.st_mode & 0o077 or found.st_uid != os.getuid()):
            raise PrivacyMismatchError(
                f"{self.path} can be read or written by others than you: whoever read "
                "it can take off the noise of all steps, past and to come. If nobody "
                f"did, chmod 600 {self.path}; {self._advice}"
            )
        try:
            content = _sealed.from_text(
                files.read_bytes(self.path, _MOST_BYTES), (_FORMAT,)
            )
            if set(content) != _NAMES:
                raise ValueError("it lacks a part.")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.path} is no secret of correlated noise, or damaged: {error} To "
                f"go on, {self._advice}"
            ) from error
        return content

    def write(self, content: dict[str, Any]) -> None:
        """Replaces the file.

        Raises:
          OSError: If it cannot be written.
        """
        text = _sealed.to_text({"format": _FORMAT, **content})
        files.write_atomically(self.path, text, private=True)

    def remove(self) -> None:
        """Deletes the file, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def refuse(self, reason: Any) -> PrivacyMismatchError:
        """An error that says why nothing can go on from the file."""
        return PrivacyMismatchError(
            f"The noise cannot go on from {self.path}: {reason} To go on all the same, "
            f"{self._advice}" + see("repeated-noise")
        )

    @property
    def _advice(self) -> str:
        return "delete it: another matrix begins then, and is counted as such."


class MatrixRun:
    """The noise of a call of `fit`: a matrix of its own, or the rest of one.

    *Formal guarantees*

    * Without a file, every call of `fit` begins another matrix. With one, noise goes on
      only where the ledger's last run ended, at the first step that was not reserved
      there: no draw of a step that ran, or may have run, is used for other data,
      whatever was restored.
    * The draws of the matrix are for executions that the budget stands around. Steps
      that nobody counts have draws of their own, and spoil what could go on.
    * Steps are in the ledger's file before they run, and the file of the secret names
      the ledger's run and whoever may hold it. Whenever the process is killed, the two
      fit, or there is no secret: then another matrix begins.
    * The order of the records goes on with the noise. Other records, another order of
      them, other settings, another run: raises.

    Args:
      optimizer: the private optimizer.
      ledger: what counts its steps.
      draws: who draws them.
      path: the file of the secret; None to keep none.

    Raises:
      ValueError: if there is a path, and noise is not correlated, or made under a
        distribution strategy.
    """

    def __init__(
        self,
        optimizer: Any,
        ledger: Ledger,
        draws: DrawCheck,
        path: str | os.PathLike[str] | None,
    ):
        self._noise = getattr(optimizer, "noise", None)
        self._source: MatrixNoise = getattr(optimizer, "matrix_noise", None)
        self._ledger, self._draws = ledger, draws
        self._holder = history_of(optimizer).identity
        self._file = None if path is None else SecretFile(path)
        self._content: dict[str, Any] | None = None
        check_secret(path, ledger, self._noise)
        if path is not None and gathers_ahead(optimizer._scope.strategy):
            raise ValueError(
                "secret is for training without a distribution strategy: leave it out, "
                "so that every call of fit begins another matrix, or train on one "
                "device without tf.distribute." + see("several-replicas")
            )

    def begin(self) -> dict[str, Any]:
        """Begins the noise; returns what the ledger's phase is told of it.

        To be called before the ledger's phase is begun.

        Raises:
          PrivacyMismatchError: if the noise cannot go on from the file.
          ValueError: if the file is damaged.
        """
        if self._noise is None:
            return {}
        self._draws.refuse_other_noise(self._noise)
        if self._file is not None and not self._draws.known:
            raise ValueError(
                "secret needs the batches themselves, whose order goes on with the "
                "noise: PrivacyBudget(epsilon, delta, batches, secret=...)."
            )
        found = None if self._file is None else self._file.read()
        if self._file is None or found is None:
            self._tell_of_a_loss()
            self._source.restart(keep=self._file is not None)
            return self._noise.of_a_phase
        steps = self._went_on(self._file, found)
        return {**self._noise.of_a_phase, "continued": steps}

    def begun(self) -> None:
        """Notes where a matrix begins, after the ledger's phase was begun."""
        if self._file is None:
            return
        self._ledger.assume(_KEPT_APART)
        if self._content is None:
            drawer = self._draws.drawer
            self._content = {
                "noise": self._settings(),
                "order": drawer.order,
                "records": drawer.source.digest(),
            }
            self._content["holders"] = [self._holder]
            self._content["run"] = self._run_of_the_ledger()

    @property
    def kept(self) -> bool:
        """Whether a process that is killed now can be gone on from, if it is to be."""
        return self._file is None or "secret" in (self._content or {})

    def keep(self, last: bool = False) -> None:
        """Writes the file, after steps of this call of `fit` were counted.

        Args:
          last: whether the call is over. Of a matrix that has made all of its steps
            nothing is left to go on from: then the file is deleted.
        """
        if self._file is None or self._content is None:
            return
        made, counted = self._source.made, self._ledger.phases[-1].runs[-1]
        if not made:
            return
        if made != counted or (last and made % self._noise.steps == 0):
            # Where noise was drawn for a step that did not end, nobody knows what was
            # released.
            self._content = None
            self._file.remove()
            return
        self._content["secret"] = self._source.secret()
        self._file.write(self._content)

    def drawing(self) -> contextlib.AbstractContextManager:
        """Within, the optimizer draws the noise of the matrix."""
        if self._file is None:
            return contextlib.nullcontext()
        return self._source.drawing()

    def _tell_of_a_loss(self) -> None:
        """Says that a matrix begins where one was not at its end."""
        if self._file is None or not self._ledger.phases:
            return
        last = self._ledger.phases[-1]
        if last.noise == self._noise.matrix and last.runs[-1] % self._noise.steps:
            print(
                f"PrivacyBudget: there is no {self._file.path} to go on from. Another "
                "matrix of correlated noise begins, and is counted as such."
            )

    def _went_on(self, file: SecretFile, found: dict[str, Any]) -> int:
        """Goes on from what was in the file; returns the steps that were made."""
        if found["noise"] != self._settings():
            raise file.refuse("it is of another matrix, or of other records.")
        if (
            not self._ledger.phases
            or self._ledger.holder not in found["holders"]
            or self._run_of_the_ledger() != found["run"]
        ):
            raise file.refuse(
                "it is not of the run that the ledger counted last, so that its noise "
                "may have been used for other data."
            )
        steps = self._ledger.phases[-1].runs[-1] + self._ledger.reserved
        drawer = self._draws.drawer
        if drawer.source.digest() != found["records"]:
            raise file.refuse(
                "the records are others than before, or in another order, and would "
                "come sooner than their noise allows. Give the same data, unshuffled."
            )
        here = self._ledger.holder == self._holder
        try:
            if not (here and self._source.made == steps):
                if here:
                    raise ValueError("a step was cut short, with noise that was drawn.")
                self._source.go_on(found["secret"], steps)
            drawer.continue_order(found["order"], steps)
        except (KeyError, TypeError, ValueError) as error:
            raise file.refuse(error) from error
        self._draws.went_on(steps)
        # Before the ledger says whose steps follow: at any moment the file knows it.
        holders = dict.fromkeys([self._ledger.holder, self._holder])
        self._content = {**found, "holders": list(holders)}
        self._content.pop("format")
        file.write(self._content)
        return steps

    def _settings(self) -> Any:
        """Of the noise, as a file has them: JSON knows no tuples."""
        return json.loads(json.dumps(self._noise.to_dict()))

    def _run_of_the_ledger(self) -> list[int]:
        phases = self._ledger.phases
        return [len(phases), len(phases[-1].runs)]


def check_secret(secret: Any, ledger: Ledger, noise: Any) -> None:
    """Raises if a secret's file is no path, or nothing could go on from it.

    Args:
      secret: the file; None for none.
      ledger: what must say how many steps ran.
      noise: the correlated noise; None for independent noise.

    Raises:
      ValueError: if something is missing.
    """
    if secret is None:
        return
    if not isinstance(secret, (str, os.PathLike)):
        raise ValueError(
            f"secret must be the path of a file, got {_arguments.shown(secret)}."
        )
    for own in [] if noise is None else _arguments.foreign(noise.matrix, NoiseMatrix):
        raise ValueError(
            "secret needs a ledger in a file, which could not be read again with "
            f"{_arguments.shown(own)}, a matrix that is not of this library: leave "
            "secret out, or use correlated.Toeplitz(column), which makes one of "
            "coefficients of your own."
        )
    if ledger.path is None:
        raise ValueError(
            "secret needs a ledger in a file, which says how many steps ran: "
            'ledger="run.ledger", secret="run.secret".'
        )
    if os.path.realpath(secret) == os.path.realpath(ledger.path):
        raise ValueError("secret and ledger must be two files.")
    if noise is None:
        raise ValueError(
            "secret is the file that correlated noise goes on from; independent noise "
            "needs none: leave secret out."
        )
