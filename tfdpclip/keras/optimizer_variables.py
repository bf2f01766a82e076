"""The state of a private optimizer: clip state, history of steps, unsaved sums.

All variables that a step writes to are made here, except Keras's own. Checkpoints and
files get the variables, as Keras saves them, and the history of steps. The noise and
everything in `_unsaved` are never saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip._outside import outside_of_functions
from tfdpclip._schedules import traced_of_step, value_at
from tfdpclip._variables import all_unwrapped, path_of, unwrapped
from tfdpclip.accounting.phases import PrivacyMismatchError
from tfdpclip.clipping import ClipRule, Groups, bound_rule
from tfdpclip.clipping.groups import by_group
from tfdpclip.gradients.loss.state import PublicVariables
from tfdpclip.gradients.status import CheckStatus
from tfdpclip.keras import _compat, replicas
from tfdpclip.keras.optimizer_settings import OptimizerSettings
from tfdpclip.keras.step_sums import StepSums
from tfdpclip.keras.watching.constant_state import ConstantState, mark_trained_privately
from tfdpclip.keras.watching.step_history import StepHistory
from tfdpclip.mechanism import Mechanism
from tfdpclip.noise import GaussianNoise
from tfdpclip.noise.kept import MatrixNoise


class _ReplicaState:
    """The unsaved state of a replica, in plain variables of no strategy."""

    def __init__(self):
        # The replica's own noise; None for a single replica (the optimizer's noise).
        self.noise: GaussianNoise | None = None
        self.issued: list = []
        self.sums: StepSums | None = None
        # Results of the comparisons in compiled code, which cannot raise errors.
        self.statuses: list[CheckStatus] = []
        # For each compiled step: whether its records were unknown, and the error.
        self.unknown_rows: list[tuple[tf.Variable, str]] = []
        self.constant = ConstantState()

    def note_rows(self, known: tf.Tensor, error: str) -> None:
        """Notes, in a step that XLA compiles, whether its records are known.

        Args:
          known: a boolean scalar.
          error: the error message if they are not.
        """
        made: list[tf.Variable] = []
        outside_of_functions(
            lambda: made.append(tf.Variable(False, trainable=False)),
            [],
            in_strategy=False,
        )
        made[0].assign(tf.logical_or(made[0], tf.logical_not(known)))
        self.unknown_rows.append((made[0], error))


class _UnsavedState:
    """The unsaved state: plain attributes here are invisible to checkpoints."""

    def __init__(self):
        self.built = False
        self.data = replicas.SharedData()
        # The last learning rate schedule that was checked.
        self.rate: Any = None
        self._local: dict[int, _ReplicaState] = {}

    @property
    def here(self) -> _ReplicaState:
        """The state of this replica; outside of replicas, of the first replica."""
        place = replicas.index()
        if place not in self._local:
            self._local[place] = _ReplicaState()
        return self._local[place]

    @property
    def all(self) -> list[_ReplicaState]:
        """The states of all replicas of this process."""
        return list(self._local.values())


class OptimizerVariables(OptimizerSettings):
    """The variables of a private optimizer, with its clip norms."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._unsaved = _UnsavedState()
        self._scope = replicas.Scope()
        self._step_history = StepHistory(self)
        if not self._rule.has_groups:
            self._bind(self._rule)

    def _bind(self, rule: ClipRule) -> None:
        """Makes the mechanism, and the variables for the rule's state."""
        self._bound_mechanism = Mechanism(rule, self._noise_setting, self._divisor)
        with tf.init_scope():
            state = self.clip.initial_state()
            parts = tf.nest.flatten(state)
            self._clip_state = _compat.add_state(self, parts, "clip_state")

    def build(self, var_list):
        """Makes the variables. The un-noised sums among them are never saved."""
        super().build(var_list)
        # A built optimizer is never built again, and trains no further variables.
        var_list = all_unwrapped(_compat.known_to(self, var_list))
        mark_trained_privately(var_list, self._step_history.counter)
        self._step_history.trains(var_list)
        if self._bound_mechanism is None:
            self._bind(bound_rule(self._rule, _compat.names_of(var_list)))
        elif self._bound_mechanism.rule.assignment is not None:
            self._check_names(_compat.names_of(var_list))
        kept = self._unsaved
        if kept.built:
            return
        kept.built = True
        if self._fit_rate is not None:
            self._fit_rate(var_list)
        if self.noise_schedule is not None:
            self._step_history.prepare()
        if self._accumulation_steps > 1 and replicas.count() == 1:
            self._make_sums(kept.here, var_list)

    def refuse_unknown(
        self, var_list: Sequence[Any], *, any_known: bool = False
    ) -> None:
        """Raises for variables that the optimizer was not built for.

        Args:
          var_list: the variables to train.
          any_known: whether a single known variable is enough: a `train_step` may train
            some of a model's variables.

        Raises:
          ValueError: if the optimizer is built, and has no state for a variable.
        """
        if not self._unsaved.built:
            return
        known = {id(v) for v in _compat.known_to(self, var_list)}
        new = [path_of(v) for v in var_list if id(v) not in known]
        if not new or (any_known and known):
            return
        more = f" and {len(new) - 1} more" if len(new) > 1 else ""
        raise ValueError(
            f"This {type(self).__name__} was built for other variables, and cannot "
            f"train {new[0]!r}{more}: layers were made, unfrozen or given LoRA since, "
            "or used with another model. To train parts in turn: "
            "optimizer.build(all_variables) first. Else make a new optimizer for each "
            "phase: model.compile(plan.optimizer(...), loss). The steps of both add up "
            "in one ledger, with callbacks of the same plan. See "
            "docs/plan.md#a-second-phase."
        )

    def _make_sums(self, local: _ReplicaState, var_list: list[tf.Variable]) -> None:
        """Makes a replica's sums: its own values, in variables of no strategy."""
        mechanism = self._mechanism
        counts, state = len(mechanism.count_stddevs), mechanism.rule.initial_state

        def make():
            local.sums = StepSums(var_list, counts, state())

        outside_of_functions(make, [], in_strategy=False)

    def _count_step(self) -> None:
        """Counts a step, once for all replicas, in the current graph."""
        z = None
        if self.noise_schedule is not None:
            z = value_at(self._noise_setting, unwrapped(self.iterations))
        self._step_history.count(z)
        if isinstance(self._noise, MatrixNoise) and replicas.count() > 1:
            self._noise.begin_step()

    def _noise_here(self) -> GaussianNoise | MatrixNoise:
        """The source of this replica's noise, or of its share of the noise."""
        if replicas.count() == 1:
            return self._noise
        if isinstance(self._noise, MatrixNoise):
            # All replicas begin a new matrix together.
            return self._noise.of_replica(replicas.index())
        here = self._unsaved.here
        if here.noise is None:
            here.noise = self._noise.of_replica(replicas.index())
        return here.noise

    def _check_names(self, names: list[str]) -> None:
        members = tuple(name.split(":")[0] for name in names)
        if members != self._bound_mechanism.rule.layout.members:
            raise ValueError(
                "The variables differ from the variables for which the clip rule's "
                "groups were made in optimizer.build. Use a new optimizer."
            )

    @property
    def pending_batches(self) -> int:
        """The number of physical batches that were added to the unfinished step.

        -1 if the replicas have added different numbers: an error cut the step short.
        """
        filled = {part.sums.filled for part in self._unsaved.all if part.sums}
        return -1 if len(filled) > 1 else next(iter(filled), 0)

    def drop_pending_batches(self) -> None:
        """Begins a new step: the sums of an unfinished step are never released."""
        for part in self._unsaved.all:
            if part.sums is not None:
                part.sums.clear()

    @property
    def may_have_failed(self) -> bool:
        """Whether steps were compiled by XLA that could not raise an error."""
        return any(
            local.statuses or local.constant.compiled for local in self._unsaved.all
        )

    def raise_failures(self) -> None:
        """Raises the error that a step found in code compiled by XLA.

        Such code cannot raise: from that step on, no example contributes to a step.
        """
        for local in self._unsaved.all:
            local.constant.raise_if_changed()
            for unknown, error in local.unknown_rows:
                if bool(unknown):
                    unknown.assign(False)
                    raise PrivacyMismatchError(
                        f"{error} A step compiled by XLA, which cannot raise, found "
                        "this; no example contributed to it."
                    )
        statuses = (one for local in self._unsaved.all for one in local.statuses)
        failed = next((status for status in statuses if status.failed), None)
        if failed is not None:
            raise type(failed.error)(
                f"{failed.error} The first step found this inside code compiled by "
                "XLA, which cannot raise; no example contributed to the steps since, "
                "which hold noise only. Run once without jit_compile and with "
                "check_gradients='always' to see the variable and the op."
                + see("a-wrong-gradient")
            )

    def carried_between_steps(self) -> list[tf.Variable]:
        """Variables that steps keep for later steps, and that callbacks must not set.

        These are the moments, averages and sums: all state except the step counter,
        the learning rate and the clip norms, which callbacks may set.
        """
        may_be_set = [self.iterations, _compat.own_rate(self), *self._clip_state]
        may_be_set = {id(unwrapped(v)) for v in may_be_set}
        return [v for v in self.written_by_steps() if id(v) not in may_be_set]

    def averages(self) -> list[tuple[tf.Variable, tf.Variable]]:
        """Pairs of a weight and the optimizer's moving average of the weight."""
        pairs = _compat.averages_of(self)
        return [(unwrapped(weight), unwrapped(average)) for weight, average in pairs]

    def written_by_steps(self) -> list[tf.Variable]:
        """Variables that only the optimizer may write to, in a traced step.

        The learning rate and the step counter are included: computed in a training
        step, they would depend on private data.
        """
        kept = self._unsaved
        sums = [v for part in kept.all if part.sums for v in part.sums.variables]
        rate = _compat.own_rate(self)
        rates = [rate] if isinstance(rate, tf.Variable) else []
        found = all_unwrapped([*self.variables, *self._clip_state, *rates, *sums])
        return list({id(v): v for v in found}.values())

    def declares_public(self, handle: Any, name: str | None) -> bool:
        """Whether `public_variables` lists the variable of this handle and name."""
        return (handle, name) in self._public_variables

    def _public(self) -> PublicVariables:
        """The declared public variables, and the optimizer's own variables."""
        return self._public_variables.with_variables(all_unwrapped(self._variables))

    @property
    def matrix_noise(self) -> Any:
        """The source of correlated noise; None for independent noise."""
        return self._noise if isinstance(self._noise, MatrixNoise) else None

    @property
    def knows_its_groups(self) -> bool:
        """Whether the clip rule has a state; with groups, only after `build`."""
        return self._bound_mechanism is not None

    @property
    def clip_state(self) -> Any:
        """The clip rule's current state."""
        flat = [tf.convert_to_tensor(part) for part in self._clip_state]
        return tf.nest.pack_sequence_as(self._mechanism.rule.initial_state(), flat)

    def _assign_clip_state(self, values: list) -> None:
        for variable, value in zip(self._clip_state, values, strict=True):
            variable.assign(value)

    @property
    def clip_norm(self) -> tf.Tensor:
        """The current clip norm, a float32 scalar; see `clip_norms` for groups."""
        return self._mechanism.rule.clip_norm(self.clip_state)

    @property
    def clip_norms(self) -> dict[str, float]:
        """The current clip norm of each group of variables."""
        rule = self._mechanism.rule
        if not rule.has_groups:
            return {"all": float(self.clip_norm)}
        norms = rule.clip_norms(self.clip_state).numpy().tolist()
        return dict(zip(rule.layout.names, norms, strict=True))

    @property
    def noise_stddevs(self) -> dict[str, float]:
        """The noise stddev on each coordinate of the next mean gradient, by group.

        For correlated noise, multiply by s(C) and by the norm of a row of C^-1.
        """
        stddevs = self._mechanism.noise_stddevs(self.clip_state, self.iterations)
        rule = self._mechanism.rule
        names = rule.layout.names if rule.has_groups else ("all",)
        values = (stddevs / self._divisor).numpy().tolist()
        return dict(zip(names, values, strict=True))

    @property
    def public_layout(self) -> Groups:
        """The groups whose gradient norms the clip rule takes from public data.

        Raises:
          ValueError: if the rule takes no public norms, or its norms are given.
        """
        rule = self.clip
        if not rule.takes_public_norms:
            raise ValueError(
                f"clip={rule} takes nothing from public data. Use PublicNormClip or "
                "ScaledClip."
            )
        if rule.given is not None:
            raise ValueError(
                f"clip={rule} has its numbers as arguments. To take them from public "
                "data, leave the arguments out."
            )
        return rule.layout

    def set_public_norms(self, norms: Any) -> None:
        """Sets each group's gradient norm on public data.

        A logical step with summed batches keeps the norms that it began with, for its
        clipping and its noise.

        Args:
          norms: by group or layer name; finite, 0 or above. They must come from public
            data: they get no noise.

        Raises:
          ValueError: if they do not fit the clip rule's groups.
        """
        numbers = by_group("norms", norms, self.public_layout)
        state = self.clip.with_public_norms(self.clip_state, numbers)
        self._assign_clip_state(tf.nest.flatten(state))

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        stepped = int(self.iterations.numpy()) > 0
        if save_type == "savedmodel" and stepped and _compat.LOADS_SAVED_MODELS:
            warnings.warn(
                "Keras does not load an optimizer's state from a SavedModel: the clip "
                "norm would start afresh, and the number of steps from 0, so that "
                "too little privacy would be counted as spent. Save to a .keras file, "
                "or use tf.train.Checkpoint.",
                stacklevel=2,
            )
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel":
            children.pop("_step_history", None)
        return children

    def save_own_variables(self, store):
        """Saves the state, and the history of the steps behind it."""
        super().save_own_variables(store)
        store["step_history"] = self._step_history.to_array()

    def load_own_variables(self, store):
        """Loads the state, and the history of the steps behind it."""
        names = [name for name in store.keys() if name != "step_history"]
        super().load_own_variables({name: store[name] for name in names})
        # The history is loaded even if Keras skipped the variables with a warning (for
        # an unbuilt optimizer or another class): the model's weights are the file's.
        if "step_history" in store.keys():
            self._step_history.from_array(store["step_history"])

    def _check_rate(self, eager: bool) -> None:
        """Raises if the learning rate depends on more than the step.

        The rate scales the release, and could depend on a metric of private data.

        Args:
          eager: whether this is an eager step, which is checked only once. Traces are
            few, and all of them are checked.
        """
        rate, kept = _compat.own_rate(self), self._unsaved
        if not callable(rate) or isinstance(rate, tf.Variable):
            return
        if eager and kept.rate is rate:
            return
        scheduled = isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule)
        traced_of_step(
            "learning_rate",
            rate if scheduled else lambda step: rate(),
            unwrapped(self.iterations),
            "0.1, a number, which callbacks may set, or a schedule of the step",
        )
        kept.rate = rate

    def _check_public_norms(self) -> None:
        rule = self._mechanism.rule
        if not rule.takes_public_norms:
            return
        with tf.init_scope():
            state = self.clip_state
            if not tf.executing_eagerly() or bool(rule.knows_norms(state)):
                return
        raise ValueError(
            f"{type(rule).__name__} needs the gradient norms of public data. Add "
            "dpc.keras.PublicGradientNorms((public_x, public_y)) to the callbacks of "
            "fit, or call optimizer.set_public_norms(norms), or give the norms to the "
            "rule."
        )
