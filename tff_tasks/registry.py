"""All benchmarks by name."""

from __future__ import annotations

from tff_tasks.digits_task import Digits
from tff_tasks.image_tasks import Cifar100Image, EmnistAutoencoder, EmnistCharacter
from tff_tasks.language_tasks import (
    ShakespeareCharacter,
    StackOverflowTag,
    StackOverflowWord,
)
from tff_tasks.task import Task

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        Cifar100Image,
        EmnistCharacter,
        EmnistAutoencoder,
        ShakespeareCharacter,
        StackOverflowWord,
        StackOverflowTag,
        Digits,
    )
}


def task_class(name: str) -> type[Task]:
    """The benchmark of this name.

    Raises:
      ValueError: if there is none.
    """
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}; got {name!r}.")
    return TASKS[name]
