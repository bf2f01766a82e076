"""The correlated noise of a run: its beginning, continuation, and file."""

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
    "the secret of the noise was kept in a file, and read only by people with access "
    "to the data"
)
_NAMES = {"format", "holders", "run", "noise", "order", "records", "secret"}


class SecretFile:
    """A file with the state of correlated noise, which is as secret as the data.

    *Formal guarantees*

    * Only the owner can read the file, from its first byte on. Writes replace the file
      atomically. A file that further users can read is refused: its secret may be
      known.
    * Damage is found by a checksum.

    Args:
      path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)

    def read(self) -> dict[str, Any] | None:
        """Returns the content that `write` was given; None if there is no file.

        Raises:
          PrivacyMismatchError: If anyone but the owner can read the file.
          ValueError: If the file is damaged, or has another format.
          OSError: If the file cannot be read.
        """
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if os.name != "nt" and (found.st_mode & 0o077 or found.st_uid != os.getuid()):
            raise PrivacyMismatchError(
                f"{self.path} can be read or written by other users, and its content "
                "removes the noise of all steps, past and future. If no other user "
                f"read it, chmod 600 {self.path}; {self._advice}"
            )
        try:
            content = _sealed.from_text(
                files.read_bytes(self.path, _MOST_BYTES), (_FORMAT,)
            )
            if set(content) != _NAMES:
                raise ValueError("it lacks a part.")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.path} is damaged, or no secret of correlated noise: {error} To "
                f"continue, {self._advice}"
            ) from error
        return content

    def write(self, content: dict[str, Any]) -> None:
        """Replaces the file.

        Raises:
          OSError: If the file cannot be written.
        """
        text = _sealed.to_text({"format": _FORMAT, **content})
        files.write_atomically(self.path, text, private=True)

    def remove(self) -> None:
        """Deletes the file, if the file exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def refuse(self, reason: Any) -> PrivacyMismatchError:
        """An error with the reason why the noise cannot continue from the file."""
        return PrivacyMismatchError(
            f"The noise cannot continue from {self.path}: {reason} To go on all the "
            f"same, {self._advice}" + see("repeated-noise")
        )

    @property
    def _advice(self) -> str:
        return "delete it: a new matrix begins then, and is counted as a new one."


class MatrixRun:
    """The noise of a call of `fit`: a new matrix, or the rest of an earlier matrix.

    *Formal guarantees*

    * Without a file, every call of `fit` begins a new matrix. With a file, the noise
      continues only where the ledger's last run ended, at the first unreserved step.
      So no noise of a step that ran, or may have run, is used for other data, whatever
      checkpoint was restored.
    * The optimizer draws the noise of the matrix only inside executions that the budget
      watches. Uncounted steps draw other noise, and make the file invalid.
    * Steps are in the ledger's file before they run, and the secret's file names the
      ledger's run and its possible holders. If the process is killed at any moment, the
      two files fit, or there is no secret, and a new matrix begins.
    * The order of the records continues with the noise. Other records, another order,
      other settings or another run raise.

    Args:
      optimizer: the private optimizer.
      ledger: the ledger that counts the steps.
      draws: the `DrawCheck` of the run.
      path: the file of the secret; None to keep none.

    Raises:
      ValueError: if there is a path but the noise is not correlated, or the optimizer
        was made under a distribution strategy.
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
                "so that every call of fit begins a new matrix, or train on one "
                "device without tf.distribute." + see("several-replicas")
            )

    def begin(self) -> dict[str, Any]:
        """Begins the noise; returns its facts for the ledger's phase.

        Must be called before the ledger's phase begins.

        Raises:
          PrivacyMismatchError: if the noise cannot continue from the file.
          ValueError: if the file is damaged.
        """
        if self._noise is None:
            return {}
        self._draws.refuse_other_noise(self._noise)
        if self._file is not None and not self._draws.known:
            raise ValueError(
                "secret needs the batches, because their order continues with the "
                "noise: PrivacyBudget(epsilon, delta, batches, secret=...)."
            )
        found = None if self._file is None else self._file.read()
        if self._file is None or found is None:
            self._print_new_matrix()
            self._source.restart(keep=self._file is not None)
            return self._noise.of_a_phase
        steps = self._continue_from(self._file, found)
        return {**self._noise.of_a_phase, "continued": steps}

    def note_phase(self) -> None:
        """Notes where a matrix begins, once the ledger's phase has begun."""
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
        """Whether a later process could continue after a kill now, if asked to."""
        return self._file is None or "secret" in (self._content or {})

    def keep(self, last: bool = False) -> None:
        """Writes the file, after the ledger counted steps of this call of `fit`.

        Args:
          last: whether the call is over. A finished matrix has no steps to continue
            with: then the file is deleted.
        """
        if self._file is None or self._content is None:
            return
        made, counted = self._source.made, self._ledger.phases[-1].runs[-1]
        if not made:
            return
        if made != counted or (last and made % self._noise.steps == 0):
            # Noise was drawn for a step that did not end: its release is unknown.
            self._content = None
            self._file.remove()
            return
        self._content["secret"] = self._source.secret()
        self._file.write(self._content)

    def drawing(self) -> contextlib.AbstractContextManager:
        """A context in which the optimizer draws the noise of the matrix."""
        if self._file is None:
            return contextlib.nullcontext()
        return self._source.drawing()

    def _print_new_matrix(self) -> None:
        """Prints that a new matrix begins before the last matrix is finished."""
        if self._file is None or not self._ledger.phases:
            return
        last = self._ledger.phases[-1]
        if last.noise == self._noise.matrix and last.runs[-1] % self._noise.steps:
            print(
                f"PrivacyBudget: there is no {self._file.path} to continue from. A new "
                "matrix of correlated noise begins, and is counted as a new one."
            )

    def _continue_from(self, file: SecretFile, found: dict[str, Any]) -> int:
        """Continues from the content of the file; returns the number of made steps."""
        if found["noise"] != self._settings():
            raise file.refuse("it is for another matrix, or for other records.")
        if (
            not self._ledger.phases
            or self._ledger.holder not in found["holders"]
            or self._run_of_the_ledger() != found["run"]
        ):
            raise file.refuse(
                "it does not belong to the last run of the ledger, so its noise may "
                "have been used for other data."
            )
        steps = self._ledger.phases[-1].runs[-1] + self._ledger.reserved
        drawer = self._draws.drawer
        if drawer.source.digest() != found["records"]:
            raise file.refuse(
                "the records or their order changed, and a record would come again "
                "sooner than the noise allows. Give the same data, unshuffled."
            )
        here = self._ledger.holder == self._holder
        try:
            if not (here and self._source.made == steps):
                if here:
                    raise ValueError("a step was cut short after its noise was drawn.")
                self._source.go_on(found["secret"], steps)
            drawer.continue_order(found["order"], steps)
        except (KeyError, TypeError, ValueError) as error:
            raise file.refuse(error) from error
        self._draws.continue_after(steps)
        # Before the ledger names the new holder: the file knows both at any moment.
        holders = dict.fromkeys([self._ledger.holder, self._holder])
        self._content = {**found, "holders": list(holders)}
        self._content.pop("format")
        file.write(self._content)
        return steps

    def _settings(self) -> Any:
        """The noise's settings as JSON reads them back, with lists for tuples."""
        return json.loads(json.dumps(self._noise.to_dict()))

    def _run_of_the_ledger(self) -> list[int]:
        phases = self._ledger.phases
        return [len(phases), len(phases[-1].runs)]


def check_secret(secret: Any, ledger: Ledger, noise: Any) -> None:
    """Raises if a secret is no path, or noise could not continue from its file.

    Args:
      secret: the file, or None.
      ledger: the ledger, whose file must hold the number of steps.
      noise: the correlated noise; None for independent noise.

    Raises:
      ValueError: if something is missing.
    """
    if secret is None:
        return
    _arguments.instance("secret", secret, (str, os.PathLike), "the path of a file")
    for own in [] if noise is None else _arguments.foreign(noise.matrix, NoiseMatrix):
        raise ValueError(
            "secret needs a ledger in a file, but a ledger cannot read "
            f"{_arguments.shown(own)} back, a matrix of another library: leave secret "
            "out, or use correlated.Toeplitz(column), which takes coefficients of your "
            "own."
        )
    if ledger.path is None:
        raise ValueError(
            "secret needs a ledger in a file, which holds the number of steps: "
            'ledger="run.ledger", secret="run.secret".'
        )
    if os.path.realpath(secret) == os.path.realpath(ledger.path):
        raise ValueError("secret and ledger must be two files.")
    if noise is None:
        raise ValueError(
            "secret is the file from which correlated noise continues; independent "
            "noise needs none: leave secret out."
        )
