"""Cohorts from a privacy budget, and the server's optimizer, for learning processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdpclip import _arguments, accounting
from tfdpclip._notes import NOTES
from tfdpclip.federated import _tff

# Iterators are saved by their source's name, and a restarted program makes its source
# anew: a ledger must not be restored from a checkpoint.


class CohortDataSource(_tff.FederatedDataSource):
    """Data of the cohorts that a privacy budget draws, for `tff.learning.programs`.

        budget = dpc.accounting.RoundBudget(
            2.0, 1e-6, cohorts, aggregator=aggregator, ledger=path)
        source = CohortDataSource(budget, client_data.create_tf_dataset_for_client,
                                  process.next.type_signature.parameter[1])
        tff.learning.programs.train_model(train_data_source=source,
                                          train_per_round_clients=source.clients, ...)

    *Formal guarantees*

    * Every selection is one round of the budget: its cohort is drawn by the scheme of
      the accounting, and it is in the ledger before the round runs. A round that is
      retried or run again after a restart is a further round, with a fresh cohort.
    * When the budget allows no further round, selecting raises.

    Args:
      budget: the `dpc.accounting.RoundBudget`.
      data_of: returns a client's data set for its id.
      federated_type: the type of a selection: the process's second argument.
      name: the name under which iterators are saved; different for every source of
        a program.

    Raises:
      ValueError: if `budget` is not a budget, or has correlated noise: such programs
        save the server's state, with its secrets, and continue from older states.
    """

    def __init__(
        self,
        budget: accounting.RoundBudget,
        data_of: Callable[[Any], Any],
        federated_type: Any,
        name: str = "train",
    ):
        wanted = "a dpc.accounting.RoundBudget"
        _arguments.instance("budget", budget, accounting.RoundBudget, wanted)
        if budget.noise is not None:
            raise ValueError(
                "budget must have independent noise: a program saves the server's "
                "state, with the secrets of correlated noise, and does not report the "
                "state that a round starts from. Write the loop: with "
                "budget.round(state) as cohort: state = process.next(state, ...).state"
            )
        _arguments.function("data_of", data_of, 1)
        _arguments.text("name", name)
        wanted = "a type of TFF, such as tff.FederatedType(np.int32, tff.CLIENTS)"
        _arguments.instance("federated_type", federated_type, _tff.AnyType, wanted)
        self._budget = budget
        self._data_of = data_of
        self._federated_type = federated_type
        self._name = name
        NOTES.data_sources[name] = self

    @property
    def federated_type(self) -> Any:
        """The type of a selection."""
        return self._federated_type

    @property
    def clients(self) -> int:
        """The expected number of clients in a round, at least 1."""
        return max(1, round(self._budget.cohorts.expected_cohort_size))

    def iterator(self) -> CohortIterator:
        """Returns an iterator. All iterators share the budget."""
        return CohortIterator(self._name)

    def select(self, k: int | None = None) -> list[Any]:
        """The data of the next cohort.

        Args:
          k: `clients`, or None: the scheme determines how many clients take part.

        Raises:
          ValueError: if `k` is a different number.
          BudgetExceededError: if the budget allows no further round.
        """
        if k is not None and k != self.clients:
            raise ValueError(
                f"k must be {self.clients}, the expected size of the cohorts in the "
                f"accounting, got {k!r}. Pass "
                "train_per_round_clients=source.clients."
            )
        with self._budget.round() as cohort:
            return [self._data_of(client) for client in cohort]


class CohortIterator(_tff.FederatedDataSourceIterator):
    """An iterator of a `CohortDataSource`. It holds no position of its own."""

    def __init__(self, name: str):
        self._name = name
        self._source = NOTES.data_sources.get(name)
        if self._source is None:
            raise ValueError(
                f"name: there is no CohortDataSource {name!r} in this process. Make it "
                "before the program state is loaded."
            )

    def __deepcopy__(self, memo: Any) -> CohortIterator:
        return self

    @classmethod
    def from_bytes(cls, buffer: bytes) -> CohortIterator:
        """The iterator of the source with that name."""
        return cls(buffer.decode())

    def to_bytes(self) -> bytes:
        """The name of the source."""
        return self._name.encode()

    @property
    def federated_type(self) -> Any:
        """The type of a selection."""
        return self._source.federated_type

    def select(self, k: int | None = None) -> list[Any]:
        """See `CohortDataSource.select`."""
        return self._source.select(k)


def server_momentum(
    learning_rate: float, momentum: float = 0.9, *, damped: bool = False
) -> Any:
    """Gradient descent with momentum, for the server's step.

    Two conventions differ by a factor 1 / (1 - momentum), 10 at 0.9:

    * undamped, as in TensorFlow Federated and the code behind Andrew et al. (2021):
      ``v = momentum * v + update``;
    * damped, as printed in Algorithm 1: ``v = momentum * v + (1 - momentum) * update``.

    Both step by ``learning_rate * v``. The rates of Table 1 there seem to belong to the
    undamped convention. Momentum accumulates noised results, so it costs no privacy.

    Args:
      learning_rate: the step, above 0.
      momentum: from 0 to below 1.
      damped: whether to use the damped convention.

    Returns:
      A `tff.learning.optimizers.Optimizer`. Its state is the undamped accumulator
      under both conventions.

    Raises:
      ValueError: if an argument is out of range.
    """
    learning_rate = _arguments.positive("learning_rate", learning_rate)
    momentum = _arguments.non_negative("momentum", momentum)
    if momentum >= 1:
        raise ValueError(f"momentum must be below 1, got {momentum!r}.")
    _arguments.boolean("damped", damped)
    if damped:
        # The damped accumulator is 1 - momentum times the undamped accumulator.
        learning_rate *= 1 - momentum
    return _tff.build_sgdm(learning_rate, momentum)
