"""A federated run of the digits benchmark, to be killed and resumed."""

from __future__ import annotations

import os
import pathlib

from tff_tasks import program
from tff_tasks.config import RunConfig
from tff_tasks.engine_local import LocalEngine

ROUNDS = 40


def prepare() -> None:
    """Imports the modules that `run` needs."""
    import sklearn.datasets
    import sklearn.model_selection  # noqa: F401


def run(name: str) -> None:
    """Runs the rounds that are left."""
    handle = os.open(
        pathlib.Path(f"{name}.steps"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    run_round = LocalEngine.run_round

    def counted(self, clients, round_num):
        measured = run_round(self, clients, round_num)
        os.write(handle, b".")
        return measured

    LocalEngine.run_round = counted
    program.run(
        RunConfig(
            "digits",
            name,
            options={"num_clients": 30, "hidden_units": 8},
            rounds=ROUNDS,
            clients_per_round=10,
            rounds_per_eval=5,
            rounds_per_checkpoint=2,
            engine="local",
            quiet=True,
            tensorboard=False,
            sampling="poisson",
            accountant="rdp",
        )
    )
