"""A privacy plan for Keras: the budget and the public facts, given once."""

from __future__ import annotations

import copy
import functools
import os
import weakref
from collections.abc import Callable, Iterable, MutableSet, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments, pictures
from tfdpclip._docs import see
from tfdpclip.accounting.ledger import Ledger
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.accounting.plan import BudgetPlan
from tfdpclip.accounting.plan_arguments import (
    check_accountant,
    check_facts,
    check_noise,
    named_matrix,
)
from tfdpclip.clipping import as_rule
from tfdpclip.correlated import NoiseMatrix
from tfdpclip.keras import _compat, step_memory
from tfdpclip.keras.matrix_run import check_secret
from tfdpclip.keras.optimizers import privatize
from tfdpclip.keras.plan_choices import (
    PLANNED_CLIP,
    WITH_PLANNED_RATE,
    check_sampling,
    choose_length,
    chosen_execution,
    describe_optimizer,
    expected_gain,
    fit_rate_to_weights,
    planned_learning_rate,
    refuse_other_momentum,
    scheme_of,
    warn_of_other_rate,
)
from tfdpclip.keras.privacy_budget import PrivacyBudget
from tfdpclip.keras.private_optimizer import PrivateOptimizer
from tfdpclip.keras.replicas import gathers_ahead
from tfdpclip.keras.watching.executions import runs_eagerly
from tfdpclip.keras.watching.followed_step import has_own_step
from tfdpclip.keras.watching.step_history import StepHistory, history_of
from tfdpclip.noise.runs import CorrelatedNoise
from tfdpclip.sampling.allocation import RandomAllocation
from tfdpclip.sampling.base import SamplingScheme
from tfdpclip.sampling.batches import Batches
from tfdpclip.sampling.capacity import fit_capacity
from tfdpclip.sampling.columns import as_keras_reads
from tfdpclip.sampling.sources import map_named
from tfdpclip.tensorflow_privacy import ARGUMENTS

_LINES = "    model.compile(plan.optimizer(), loss)\n    plan.fit(model, (x, y))"
_LOOP = (
    "    plan.ledger.begin(noise_multiplier=plan.noise_multiplier, sampling=batches)\n"
    "    for x, y, w in batches:\n"
    "        with plan.ledger.step(): step(x, y, w)"
)
# Arguments that the plan gives to an optimizer, and to batches.
_PLANNED = ("noise_multiplier", "expected_batch_size", "accumulation_steps")
_PLANNED += ("unit", "noise", "rows_per_record")
_SHAPED = ("physical_batch_size", "accumulation_steps", "steps", "independent_groups")
_SHAPED += ("views", "per_person")
_IN_FIT = {
    "x": "write plan.fit(model, (x, y))",
    "y": "write plan.fit(model, (x, y))",
    "sample_weight": "write plan.fit(model, (x, y, sample_weight))",
    "batch_size": "write PrivacyPlan(..., batch_size=...)",
    "shuffle": "the plan draws the records",
    "steps_per_epoch": "an epoch of the plan has all of its steps",
    "validation_split": "split the data first, and give validation_data=(x, y)",
}
# Fewer steps are no training, whose rate or result would be worth a word.
_MANY_STEPS = 100
# The plan's own arguments for these; `physical_batch_size` for the rest.
_SAID = {"views": "views", "per_person": "per_person"}


class PrivacyPlan(BudgetPlan):
    """A budget and the public facts of a run; noise, rates and steps follow.

        plan = dpc.keras.PrivacyPlan(epsilon=3, delta=1e-5, examples=len(x))
        model.compile(plan.optimizer(), loss)
        plan.fit(model, (x, y))
        print(plan)

    *Formal guarantees*

    * The noise multiplier is the least with which all of `epochs` stay within
      (epsilon, delta), for the batches as drawn: with the capacity of their shape, and
      with the counts of the clip rule.
    * Everything is a function of the arguments, which must be public. This includes
      `examples`: adding or removing a record would change the plan, unless `examples`
      comes from a number that does not depend on these data.
    * `callbacks` keep one ledger for all calls of `fit` of this plan: together these
      calls stay within the budget. A `fit` without the callbacks raises; after other
      steps that nothing counted, `statement` raises.
    * `batches` refuses data of another size, and `optimizer` refuses other noise.

    Args:
      epsilon: The budget.
      delta: In (0, 1 / examples).
      examples: Number of training examples.
      batch_size: Expected examples per step. By default, the run has 500 steps,
        and more above 10,000 examples.
      epochs: How often to go through the data, on average. By default 40, fewer above
        10,000 examples, or as many as give these steps of `batch_size`.
      sampling: `"poisson"` by default, and all examples in every step if the batch is
        as large as the data. `"random_allocation"`: each example in one random step of
        each epoch, with the number of steps that brings a batch nearest to
        `batch_size`; this needs less noise than Poisson, above all in few short epochs.
        `"fixed_size"`; `"shuffled"`, as plain `fit` draws; or `"fixed_order"`, the same
        order in every epoch. The last two have no amplification.
      noise: `"independent"`, or correlated over the steps, for `"fixed_order"`:
        `"buffered"` (3 buffers), `"toeplitz"` (16 bands), `"tree"`, or a matrix of
        `dpc.correlated`. The matrix is for one call of `fit` over all epochs, or, with
        `secret`, for several calls.
      momentum: The optimizer's momentum, for which `"buffered"` and `"toeplitz"` are
        made; 0 by default. The matching momentum leaves less noise in the weights, at
        no cost in privacy.
      physical_batch_size: The most examples that the device holds at a time; a step
        then consists of several batches. By default, a step is one batch.
      views: Augmented views of an example in a step (De et al. 2022), made by
        ``plan.batches((x, y)).map(augment)``: their mean gradient is clipped once, at
        no cost in privacy.
      per_person: The number of a person's examples in a step, clipped together. The
        guarantee is then for people, told apart by ``plan.batches((x, y),
        people=ids)``, and `examples`, `batch_size` and `epochs` count people.
      accountant: `"pld"` or `"rdp"`.
      ledger: A `Ledger`, or the path of its file, which outlives the process.
      allow_change: Whether the plan may follow other phases in its ledger: phases of
        another plan or another clip rule. `epsilon` then covers both the ledger's
        earlier steps and this run, and the noise is the least that keeps within it.
        Statistics that were released into the ledger before need no `allow_change`.
      secret: A file from which correlated noise continues, as in `PrivacyBudget`.
      **others: None; errors say where an optimizer's settings belong.

    Attributes:
      epsilon: As given.
      delta: As given.
      examples: As given.
      batch_size: As given, or as chosen.
      epochs: As given.
      noise_multiplier: z of every step.
      steps: Steps of all epochs.
      scheme: The accounted sampling scheme of the steps.
      physical_batch_size: Rows of a batch.
      accumulation_steps: Batches of a step.
      ledger: The ledger of spent steps.

    Raises:
      ValueError: If an argument is out of range, or contradicts another argument.

    >>> plan = PrivacyPlan(
    ...     epsilon=3, delta=1e-5, examples=1000, batch_size=100, epochs=5)
    >>> plan.steps, round(plan.noise_multiplier, 2)
    (50, 1.35)
    >>> print(plan.replace(epochs=10).steps)
    100
    """

    _RECORDS, _SIZE, _LENGTH, _STEP = "examples", "batch_size", "epochs", "step"

    def __init__(
        self,
        epsilon: float,
        delta: float,
        examples: int,
        batch_size: int | None = None,
        epochs: int | None = None,
        *,
        sampling: str | None = None,
        noise: str | NoiseMatrix = "independent",
        momentum: float = 0.0,
        physical_batch_size: int | None = None,
        views: int = 1,
        per_person: int | None = None,
        accountant: str = "pld",
        ledger: Ledger | str | os.PathLike[str] | None = None,
        allow_change: bool = False,
        secret: str | os.PathLike[str] | None = None,
        **others: Any,
    ):
        arguments = dict(locals())
        _refuse_others(others)
        self._set_record(views, per_person)
        self._momentum = check_noise(noise, momentum)
        if sampling is None:
            sampling = "poisson" if noise == "independent" else "fixed_order"
        epsilon, delta, examples = check_facts(epsilon, delta, "examples", examples)
        epochs = _arguments.optional(_arguments.integer, "epochs", epochs, 1)
        if batch_size is not None:
            batch_size = _arguments.integer("batch_size", batch_size, 1)
            if batch_size > examples:
                raise ValueError(
                    f"batch_size must be at most examples ({examples}), got "
                    f"{batch_size}."
                )
        check_sampling(sampling)
        check_accountant(accountant)
        physical_batch_size = _arguments.optional(
            _arguments.integer, "physical_batch_size", physical_batch_size, 1
        )
        self.examples = examples
        self.batch_size, self.epochs = choose_length(examples, batch_size, epochs)
        self._asked = scheme_of(sampling, self.batch_size, examples)
        drawn = self._shape_batches(physical_batch_size)
        steps = self.epochs * drawn.steps_per_epoch(examples)
        matrix = named_matrix(noise, steps, drawn, self._momentum)
        self._noise = None if matrix is None else CorrelatedNoise(matrix, steps, drawn)
        super().__init__(
            arguments,
            epsilon=epsilon,
            delta=delta,
            population=examples,
            size=self._expected,
            steps=steps,
            scheme=drawn,
            unit="example" if per_person is None else "person",
            matrix=matrix,
        )
        check_secret(secret, self.ledger, self._noise)
        self._secret = secret
        self._batches: Batches | None = None
        self._people: np.ndarray | None = None
        self._budget: PrivacyBudget | None = None
        # The number of batches in a step of its optimizers.
        self._summed = self.accumulation_steps
        self._histories: list[StepHistory] = []
        self._made: PrivateOptimizer | None = None
        # Functions of models that run any number of steps.
        self._loops: MutableSet[Any] = weakref.WeakSet()

    def _set_record(self, views: int, per_person: int | None) -> None:
        """Sets the rows of a record: views of an example, or examples of a person."""
        self.views = _arguments.integer("views", views, 1)
        integer = _arguments.integer
        self.per_person = _arguments.optional(integer, "per_person", per_person, 1)
        if per_person is not None:
            self._RECORDS = "people"

    def _shape_batches(self, physical_batch_size: int | None) -> SamplingScheme:
        """Sets the rows and number of a step's batches; returns the accounted scheme.

        The accounted scheme has the capacity of these batches.
        """
        asked, examples = self._asked, self.examples
        capacity = asked._capacity(examples)
        rows = min(physical_batch_size or capacity, capacity)
        self.accumulation_steps = -(-capacity // rows)
        # As many rows as a step needs, spread evenly over its batches.
        rows = -(-capacity // self.accumulation_steps)
        drawn, self.physical_batch_size = fit_capacity(
            asked, examples, rows, self.accumulation_steps, False
        )
        # Random allocation has a whole number of steps in an epoch, and so the nearest
        # expected batch size.
        self._expected: float = self.batch_size
        if isinstance(asked, RandomAllocation):
            self._expected = asked.expected_batch_size(examples)
        return drawn

    def optimizer(
        self, optimizer: type | None = None, *args: Any, **options: Any
    ) -> Any:
        """A private optimizer with the noise of the plan.

        Without a learning rate, `DPSGD`, `DPAdam`, `DPAdamW` and `Nadam` take the
        plan's: it gives the random walk of the noise a fixed size, and falls to 0 over
        the steps of the plan. Beside it, the clip norm is 1, normalised, where no
        `clip` is given. `print(plan)` shows the numbers.

        *Formal guarantees*: the rate is a function of the plan's public numbers.

        Args:
          optimizer: A class: an optimizer of `dpc.keras` (`dpc.keras.DPAdam`), or any
            Keras optimizer, which is made private. By default `DPSGD`, with a momentum
            of 0.9 where no `momentum` is given.
          *args: Arguments of that class.
          **options: Arguments of that class, such as `clip` and `learning_rate`.

        Raises:
          ValueError: If an argument belongs to the plan, the clip rule's counts are too
            precise for the noise, the noise is made for another momentum, or there is
            no learning rate for a class to which the plan gives none, or for a rule
            whose clip norm is not known before the run.

        >>> plan = PrivacyPlan(3, 1e-5, examples=1000, batch_size=100, epochs=5)
        >>> plan.optimizer(tf.keras.optimizers.SGD, 0.1).expected_batch_size
        100.0
        >>> round(float(plan.optimizer().momentum), 2)
        0.9
        """
        if optimizer is None:
            optimizer = tf.keras.optimizers.SGD
        if not (isinstance(optimizer, type) and hasattr(optimizer, "from_config")):
            raise ValueError(
                "optimizer must be a class, such as dpc.keras.DPAdam or "
                "tf.keras.optimizers.Lion, got "
                f"{_arguments.shown(optimizer)}. Write\n{_LINES}"
            )
        for name in _PLANNED:
            if name in options:
                raise ValueError(
                    f"{name} follows from the plan: leave it out. To change it, change "
                    "the plan's arguments, for example plan.replace(epsilon=8)."
                )
        if not issubclass(optimizer, PrivateOptimizer):
            optimizer = privatize(optimizer)
        planned = not args and "learning_rate" not in options
        if planned:
            self._set_learning_rate(optimizer, options)
        with self._counting():
            made = optimizer(
                *args,
                noise_multiplier=self.noise_multiplier,
                expected_batch_size=float(self._expected),
                accumulation_steps=self._summed,
                noise=self._noise,
                unit=self._unit,
                rows_per_record=self.views * (self.per_person or 1),
                **options,
            )
            self._check_counts(made.clip)
        refuse_other_momentum(made, self._settings["noise"], self._momentum)
        self._histories.append(history_of(made))
        self._histories[-1].planned = True
        self._clip = str(made.clip)
        self._made = made
        noise = self._noise_in_all
        if planned:
            rate = options["learning_rate"]
            made._fit_rate = functools.partial(fit_rate_to_weights, rate, noise)
        elif self.steps >= _MANY_STEPS and isinstance(made, WITH_PLANNED_RATE):
            # A clip norm that moves is near 1 more often than not.
            settings = {"clip": made.clip, "momentum": getattr(made, "momentum", 0.0)}
            usual = self._learning_rate(optimizer, settings)
            usual = usual or self._learning_rate(optimizer, settings | {"clip": 1.0})
            made._fit_rate = functools.partial(warn_of_other_rate, made, usual, noise)
        return made

    @property
    def _noise_in_all(self) -> float:
        """The noise on a weight of the mean of all gradients, in clip norms."""
        return self.noise_multiplier / (self._expected * self.steps**0.5)

    def _set_learning_rate(self, optimizer: type, options: dict[str, Any]) -> None:
        """Sets the plan's clip rule, learning rate and momentum in `options`."""
        if not issubclass(optimizer, WITH_PLANNED_RATE):
            names = [usual.__name__ for usual in WITH_PLANNED_RATE]
            raise ValueError(
                f"learning_rate is missing: the plan chooses it for {', '.join(names)} "
                f"alone, not for {optimizer.__name__}. Write learning_rate=...."
            )
        options.setdefault("clip", PLANNED_CLIP)
        if issubclass(optimizer, tf.keras.optimizers.SGD):
            usual = 0.9 if self._noise is None else self._momentum
            options.setdefault("momentum", usual)
        options["learning_rate"] = self._learning_rate(optimizer, options)
        if options["learning_rate"] is None:
            raise ValueError(
                "learning_rate is missing: the step of SGD grows with the clip norm, "
                f"and {as_rule(options['clip'])} moves it, or has several. Write "
                "learning_rate=..., or normalize=True in the clip rule, or take "
                "dpc.keras.DPAdam."
            )

    def _learning_rate(self, optimizer: type, options: dict[str, Any]) -> Any:
        noise = self.noise_multiplier / self._expected
        return planned_learning_rate(optimizer, options, noise, self.steps)

    def batches(self, data: Any, *others: Any, **options: Any) -> Batches:
        """The data, drawn as planned; for `fit`.

        Args:
          data: As for `scheme.batches`: (x, y), arrays, a data set with random access.
          *others: Always empty: inputs and labels are one argument, (x, y).
          **options: `seed`, as for `scheme.batches`; with `per_person` also `people`,
            the person of each example.

        Raises:
          ValueError: If the data have another number of records than `examples`, an
            option belongs to the plan, or people changed since the last batches.
        """
        for name in _SHAPED:
            if name in options:
                raise ValueError(
                    f"{name} follows from the plan: leave it out, or write "
                    f"PrivacyPlan(..., {_SAID.get(name, 'physical_batch_size')}=...)."
                )
        if (self.per_person is None) != (options.get("people") is None):
            raise ValueError(
                "people and per_person go together: PrivacyPlan(..., per_person=8) "
                "and plan.batches((x, y), people=ids). Then examples, batch_size and "
                "epochs of the plan count people." + see("records-of-several-rows")
            )
        options |= dict(views=self.views, per_person=self.per_person)
        try:
            batches = self._asked.batches(
                data,
                *others,
                physical_batch_size=self.physical_batch_size,
                accumulation_steps=self.accumulation_steps,
                **options,
            )
        except ValueError:
            # For data of another size than planned, an error about the size is clearer.
            self._check_size(self._asked.batches(data, *others, **options))
            raise
        self._check_size(batches)
        if self.per_person is not None:
            self._check_same_people(batches._drawer.source.ids)
        self._batches = batches
        return batches

    def _check_size(self, batches: Batches) -> None:
        if batches.population != self.examples:
            raise ValueError(
                f"data has {batches.population} {self._RECORDS}, the plan is for "
                f"{self.examples}: PrivacyPlan(..., examples={batches.population})."
            )

    def _check_same_people(self, ids: np.ndarray) -> None:
        if self._people is not None and not np.array_equal(ids, self._people):
            raise ValueError(
                "people differ from the people of this plan's earlier batches: one "
                "ledger protects nothing if the examples of a person change between "
                "epochs. Give the same ids, in the order of the same examples; for "
                "other data make a new plan, plan.replace()."
                + see("records-of-several-rows")
            )
        self._people = ids

    def within_memory(
        self, memory: int, training: Callable[[PrivacyPlan], tuple[Any, Batches]]
    ) -> PrivacyPlan:
        """The same plan, with physical batches whose steps fit into some memory.

            def training(plan):
                model = build_model()
                model.compile(plan.optimizer(dpc.keras.DPAdam, 1e-3), loss)
                return model, plan.batches((x, y))

            plan = plan.within_memory(2 * 2**30, training)
            model, batches = training(plan)

        It trains some models for eight steps each, on zeros: no record is drawn, and no
        budget is spent. TensorFlow counts the bytes. A line through the last two sizes
        gives the number of rows, which is tried with a tenth to spare: docs/plan.md.

        *Formal guarantees*: unchanged. The noise is computed for these rows, as for a
        given `physical_batch_size`.

        Args:
          memory: Bytes that a step may take on a device, beyond the weights, the
            optimizer's variables and the data; 2**24 or more.
          training: A function from a plan to a new compiled model and new batches.

        Raises:
          ValueError: If not even one row fits, the ledger has steps (then give the
            former `physical_batch_size`), or `training` returns something else.
          NotImplementedError: If TensorFlow does not count its memory here.
        """
        memory = _arguments.integer("memory", memory, step_memory.LEAST)
        _arguments.function("training", training, 1)
        if self.ledger.phases:
            raise ValueError(
                "This plan has counted steps, with physical batches of "
                f"{self.physical_batch_size} rows. To continue with them, write "
                f"PrivacyPlan(..., physical_batch_size={self.physical_batch_size})."
            )
        capacity = self._asked._capacity(self.examples)

        def used_by(rows: int) -> int:
            trial = copy.copy(self)
            batches = -(-capacity // rows)
            vars(trial).update(
                physical_batch_size=rows,
                accumulation_steps=batches,
                ledger=Ledger(self.delta, self.accountant),
                # Further batches of a step take no more memory.
                _summed=min(batches, 2),
                _histories=[],
                _secret=None,
            )
            model, drawn = training(trial)
            for history in trial._histories:
                history.planned = False  # Zeros cost no budget.
            return step_memory.measure_step(model, drawn, trial._summed)

        rows = step_memory.find_most_rows(used_by, memory, capacity)
        return self.replace(physical_batch_size=rows, ledger=self._settings["ledger"])

    @property
    def steps_per_execution(self) -> int:
        """Batches in one call of the training function, for `model.compile`.

        The Python code of `fit` and of the callbacks then runs once in 8 to 16 batches,
        which makes small models faster. An epoch has at least four executions. Draws,
        noise, accounting and the updates of the weights are those of single steps;
        `on_train_batch_end` is called once an execution.

        It is 1 in the scope of a strategy of several replicas where Keras has no such
        executions (Keras 3).

        >>> plan = PrivacyPlan(3, 1e-5, examples=1000, batch_size=10, epochs=5)
        >>> plan.steps_per_execution
        10
        """
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if replicas > 1 and not _compat.EXECUTES_ON_REPLICAS:
            return 1
        return chosen_execution(self.steps // self.epochs * self.accumulation_steps)

    @property
    def _at_a_time(self) -> int:
        return max(1, self.steps_per_execution // self.accumulation_steps)

    def fit(
        self,
        model: tf.keras.Model,
        data: Any = None,
        *others: Any,
        people: Any = None,
        epochs: int | None = None,
        callbacks: Sequence[tf.keras.callbacks.Callback] = (),
        steps_per_execution: int | None = None,
        **options: Any,
    ) -> tf.keras.callbacks.History:
        """Trains a model that was compiled with `plan.optimizer()`.

        The same run as `model.fit(plan.batches(data), epochs=plan.epochs,
        callbacks=plan.callbacks)`, in executions of `steps_per_execution`, and dealt to
        the replicas where the model was compiled in the scope of a strategy.

        Args:
          model: The compiled model.
          data: As for `batches`: (x, y), (x, y, sample_weight), a data set; or batches
            of this plan, such as ``plan.batches((x, y)).map(augment)``.
          *others: Always empty: inputs and labels are one argument, (x, y).
          people: With `per_person`, the person of each example.
          epochs: The epochs of this call, by default all of the plan's.
          callbacks: Further callbacks, or one, called after those of the plan.
          steps_per_execution: Batches in one call of the training function; by default
            the plan's, unless the model was compiled with its own, and 1 for a model
            with a `train_step` of its own.
          **options: Further arguments of `model.fit`: `validation_data`,
            `class_weight`, `verbose`, `initial_epoch`.

        Returns:
          Keras's history, with `epsilon` and `clip_norm` of each epoch.

        Raises:
          ValueError: If the model has no private optimizer, or one of another plan with
            other noise, or an option belongs to the plan or to `data`.
        """
        optimizer = getattr(model, "optimizer", None)
        # The steps of an optimizer that no plan made are counted with its own noise.
        if not isinstance(optimizer, PrivateOptimizer) or (
            history_of(optimizer).planned
            and optimizer.noise_multiplier != self.noise_multiplier
        ):
            raise ValueError(
                f"model has the optimizer {getattr(optimizer, 'name', None)}, and none "
                f"of this plan (a task of KerasHub compiles itself). Write\n{_LINES}"
            )
        for name, instead in _IN_FIT.items():
            if name in options:
                raise ValueError(f"{name} is no option of plan.fit: {instead}.")
        if others or not isinstance(data, Batches):
            drawn = {} if people is None else {"people": people}
            data = self.batches(data, *others, **drawn)
        elif people is not None:
            raise ValueError("people belongs to plan.batches(..., people=ids) here.")
        elif data.scheme != self.scheme:
            raise ValueError(
                f"data draws by {data.scheme.describe()}, and the plan by "
                f"{self.scheme.describe()}: write plan.batches((x, y))."
            )
        else:
            self._check_size(data)
            self._batches = data
        held_out = options.get("validation_data")
        if isinstance(held_out, tuple):
            options["validation_data"] = map_named(as_keras_reads, held_out)
        strategy = optimizer._scope.strategy
        # A mirrored strategy of one device deals, too.
        dealt = gathers_ahead(strategy)
        size = steps_per_execution
        # Several steps of an own `train_step`, as of a GAN, may not follow each other
        # without a look at the weights that a step writes beside the private ones.
        together = _compat.EXECUTES_ON_REPLICAS or not dealt
        together = together and not has_own_step(model)
        if size is None and together and _compat.steps_per_execution(model) == 1:
            size = self.steps_per_execution
        size = None if runs_eagerly(model) else size
        steps = data.steps_per_epoch * data.accumulation_steps
        if not dealt and int(data.cardinality()) == tf.data.INFINITE_CARDINALITY:
            data = data.take(steps)
        with _compat.executing(model, size, self._loops):
            if dealt or self._runs_on(model, data):
                options["steps_per_epoch"] = steps
                data = data.distribute(strategy) if dealt else data.repeat()
            return model.fit(
                data,
                epochs=self.epochs if epochs is None else epochs,
                callbacks=[*self.callbacks, *tf.nest.flatten(callbacks)],
                shuffle=False,
                **options,
            )

    @staticmethod
    def _runs_on(model: tf.keras.Model, data: Batches) -> bool:
        """Whether the epochs of a call of `fit` may share an iterator of the data.

        A new iterator takes as long as several steps of a small model.
        """
        size, length = _compat.steps_per_execution(model), int(data.cardinality())
        if _compat.OVERRUNS_EPOCHS and length % size:
            return False
        whole = data.steps_per_epoch * data.accumulation_steps
        return data.scheme.independent_steps and length == whole

    def plot(self, history: tf.keras.callbacks.History) -> Any:
        """Draws the logs of a run: loss, scores, epsilon, clip norm and signal.

        The losses and scores of the training data are exact, and not to be released.

        Args:
          history: the return value of `fit`.

        Returns:
          A matplotlib figure; ``plan.plot(history).savefig("run.png")``.

        Raises:
          ValueError: If there is no epoch in `history`.
        """
        if not getattr(history, "history", None):
            raise ValueError(
                "history must be what plan.fit returned, with an epoch or more, got "
                f"{_arguments.shown(history)}. Write history = plan.fit(model, (x, y))."
            )
        figure = pictures.draw_history(history.history)
        pictures.title(figure, f"({self.epsilon:g}, {self.delta:g}) privacy")
        pictures.note(figure, "training scores: " + pictures.PRIVATE_NOTE)
        return figure

    @property
    def callbacks(self) -> list[tf.keras.callbacks.Callback]:
        """Callbacks for `fit`: a `PrivacyBudget` for the last `batches` and the ledger.

        Raises:
          ValueError: If there are no batches of this plan yet.
        """
        if self._batches is None:
            raise ValueError(
                "The plan has drawn no batches yet, and plain arrays are not drawn by "
                f"the accounted scheme. Write\n{_LINES}"
                + see("batches-drawn-another-way")
            )
        self._budget = PrivacyBudget(
            self.epsilon,
            self.delta,
            self._batches,
            self.accountant,
            ledger=self.ledger,
            allow_change=self._allow_change,
            secret=self._secret,
        )
        return [self._budget]

    def _refuse_unseen(self) -> None:
        for history in self._histories:
            unseen = history.releases - self.ledger.counted.get(history.identity, 0)
            if self._budget is not None and self.ledger.holder == history.identity:
                unseen -= self._budget._unrecorded()
            if unseen > 0:
                raise PrivacyMismatchError(
                    f"{unseen} steps of this plan's optimizers were not counted, so "
                    f"the spent budget is not known. With fit, write\n{_LINES}\n"
                    "In a loop of your own, with batches = plan.batches((x, y)):\n"
                    f"{_LOOP}" + see("steps-that-are-not-counted")
                )

    def _facts(self) -> list[tuple[str, str]]:
        per_epoch = self.steps // self.epochs
        shape = f"{self.physical_batch_size} rows"
        if self.views > 1 or self.per_person is not None:
            shape = f"{self.physical_batch_size} {self._RECORDS}"
            each = [f"up to {self.per_person} examples"] * (self.per_person is not None)
            each += [f"{self.views} views"] * (self.views > 1)
            shape += f" of {' of '.join(each[::-1])} each"
        if self.accumulation_steps > 1:
            shape = f"{self.accumulation_steps} x {shape}"
        facts = [
            (
                "draws",
                f"{self._asked.describe()}: {self._expected:,.6g} {self._RECORDS} "
                f"expected in a step, room for {shape}",
            ),
            (
                "runs",
                f"{self.epochs} epochs of {per_epoch:,} steps, {self.steps:,} in all",
            ),
            (
                "noise",
                f"multiplier {self.noise_multiplier:.4g}, "
                f"{self.noise_multiplier / self._expected:.3g} clip norms on the mean",
            ),
        ]
        facts += self._facts_of_release()
        if self._made is not None:
            facts.append(("updates", describe_optimizer(self._made)))
        if self._noise is None and self.steps >= _MANY_STEPS:
            facts.append(("to expect", expected_gain(self._noise_in_all)))
        return facts


def _refuse_others(names: Iterable[str]) -> None:
    """Raises for arguments that a plan lacks, and says where they belong."""
    for name in names:
        if name in (*ARGUMENTS, "clip", "learning_rate", "unit"):
            raise ValueError(
                f"{name} is no argument of a plan. Settings of the optimizer go to "
                "plan.optimizer(dpc.keras.DPAdam, 1e-3, clip=1.0); noise and divisor "
                f"are the plan's. {ARGUMENTS.get(name, '')}".rstrip()
            )
        if name == "noise_multiplier":
            raise ValueError(
                "noise_multiplier follows from a plan's epsilon. Write "
                "dpc.keras.DPAdam(1e-3, clip=1.0, noise_multiplier=1.1, "
                "expected_batch_size=256) for a multiplier without a plan."
            )
        raise TypeError(f"PrivacyPlan has no argument {name!r}.")
