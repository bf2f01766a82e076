"""What a private optimizer keeps: the clip's state, its history, and what is not saved.

Everything that a step writes to is made here, besides what Keras makes. Checkpoints and
files get the variables, as Keras saves them, and the history of the steps; never the
noise, and nothing that is in `_transient`.
"""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tfdpclip._outside import outside_of_functions
from tfdpclip._schedules import traced_of_step, value_at
from tfdpclip._variables import all_unwrapped, unwrapped
from tfdpclip.clipping import ClipRule, Groups, bound_rule
from tfdpclip.clipping.groups import by_group
from tfdpclip.gradients.checks.status import CheckStatus
from tfdpclip.gradients.loss.state import PublicVariables
from tfdpclip.keras import _compat, replicas
from tfdpclip.keras.optimizer_settings import OptimizerSettings
from tfdpclip.keras.step_sums import StepSums
from tfdpclip.keras.watching.constant_state import ConstantState, trained_privately
from tfdpclip.keras.watching.step_history import StepHistory
from tfdpclip.mechanism import Mechanism
from tfdpclip.noise import GaussianNoise
from tfdpclip.noise.kept import MatrixNoise


class _Local:
    """What a replica has for itself, in plain variables of no strategy."""

    def __init__(self):
        # Of its own; None where there is one replica: the optimizer's.
        self.noise: GaussianNoise | None = None
        self.issued: list = []
        self.sums: StepSums | None = None
        # What the self-checks of losses found in code that cannot raise.
        self.statuses: list[CheckStatus] = []
        self.constant = ConstantState()


class _Transient:
    """What must not be saved: plain attributes here are invisible to checkpoints."""

    def __init__(self):
        self.built = False
        self.data = replicas.SharedData()
        # The schedule of the learning rate that was looked at.
        self.rate: Any = None
        self._local: dict[int, _Local] = {}

    @property
    def here(self) -> _Local:
        """What this replica has; the first, outside of replicas."""
        place = replicas.index()
        if place not in self._local:
            self._local[place] = _Local()
        return self._local[place]

    @property
    def all(self) -> list[_Local]:
        """What the replicas of this process have."""
        return list(self._local.values())


class OptimizerVariables(OptimizerSettings):
    """The variables of a private optimizer, and the clip norms that are in them."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._transient = _Transient()
        self._scope = replicas.Scope()
        self._step_history = StepHistory(self)
        if not self._rule.has_groups:
            self._bind(self._rule)

    def _bind(self, rule: ClipRule) -> None:
        """Makes the mechanism, and the variables of the rule's state."""
        self._bound_mechanism = Mechanism(rule, self._noise_setting, self._divisor)
        with tf.init_scope():
            state = self.clip.initial_state()
            parts = tf.nest.flatten(state)
            self._clip_state = _compat.add_state(self, parts, "clip_state")

    def build(self, var_list):
        """Makes the variables; the un-noised sums among them are never saved."""
        super().build(var_list)
        var_list = all_unwrapped(var_list)
        trained_privately(var_list, self._step_history.counter)
        self._step_history.trains(var_list)
        if self._bound_mechanism is None:
            self._bind(bound_rule(self._rule, _compat.names_of(var_list)))
        elif self._bound_mechanism.rule.assignment is not None:
            self._check_names(_compat.names_of(var_list))
        kept = self._transient
        if kept.built:
            return
        kept.built = True
        if self.noise_schedule is not None:
            self._step_history.prepare()
        if self._accumulation_steps > 1 and replicas.count() == 1:
            self._make_sums(kept.here, var_list)

    def _make_sums(self, local: _Local, var_list: list[tf.Variable]) -> None:
        """Makes the sums of a replica: values of its own, so no strategy's."""
        mechanism = self._mechanism
        counts, state = len(mechanism.count_stddevs), mechanism.rule.initial_state

        def make():
            local.sums = StepSums(var_list, counts, state())

        outside_of_functions(make, [], in_strategy=False)

    def _count_step(self) -> None:
        """Counts a step, once for all replicas, in the graph at hand."""
        z = None
        if self.noise_schedule is not None:
            z = value_at(self._noise_setting, unwrapped(self.iterations))
        self._step_history.count(z)
        if isinstance(self._noise, MatrixNoise) and replicas.count() > 1:
            self._noise.begin_step()

    def _noise_here(self) -> GaussianNoise | MatrixNoise:
        """What draws the noise of this replica, or its share of it."""
        if replicas.count() == 1:
            return self._noise
        if isinstance(self._noise, MatrixNoise):
            # It begins another matrix on all of them at once.
            return self._noise.of_replica(replicas.index())
        here = self._transient.here
        if here.noise is None:
            here.noise = self._noise.of_replica(replicas.index())
        return here.noise

    def _check_names(self, names: list[str]) -> None:
        members = tuple(name.split(":")[0] for name in names)
        if members != self._bound_mechanism.rule.layout.members:
            raise ValueError(
                "The variables differ from those that the clip rule's groups were made "
                "of when the optimizer was built. Use a new optimizer."
            )

    @property
    def pending_batches(self) -> int:
        """How many physical batches the step that was begun has.

        -1 if replicas have summed different numbers of them: an error cut it short.
        """
        filled = {part.sums.filled for part in self._transient.all if part.sums}
        return -1 if len(filled) > 1 else next(iter(filled), 0)

    def drop_pending_batches(self) -> None:
        """Begins a step: what was summed of the last one is not released."""
        for part in self._transient.all:
            if part.sums is not None:
                part.sums.clear()

    def carried_between_steps(self) -> list[tf.Variable]:
        """What steps keep for later ones, and callbacks have no business with.

        Moments, averages and sums: all that it has but for the step counter, the
        learning rate and the clip norms, which may be set.
        """
        may_be_set = [self.iterations, _compat.own_rate(self), *self._clip_state]
        may_be_set = {id(unwrapped(v)) for v in may_be_set}
        return [v for v in self.written_by_steps() if id(v) not in may_be_set]

    def averages(self) -> list[tuple[tf.Variable, tf.Variable]]:
        """Pairs of a weight and the moving average of it that the optimizer keeps."""
        pairs = _compat.averages_of(self)
        return [(unwrapped(weight), unwrapped(average)) for weight, average in pairs]

    def written_by_steps(self) -> list[tf.Variable]:
        """What nothing but the optimizer's own steps may write to, in a traced step.

        Its learning rate and step counter among them: they are of private data if a
        training step computes them.
        """
        kept = self._transient
        sums = [v for part in kept.all if part.sums for v in part.sums.variables]
        rate = _compat.own_rate(self)
        rates = [rate] if isinstance(rate, tf.Variable) else []
        found = all_unwrapped([*self.variables, *self._clip_state, *rates, *sums])
        return list({id(v): v for v in found}.values())

    def declares_public(self, handle: Any, name: str | None) -> bool:
        """Whether `public_variables` has the variable of this handle and name."""
        return (handle, name) in self._public_variables

    def _public(self) -> PublicVariables:
        """What is declared to be public, and the optimizer's own."""
        return self._public_variables.with_variables(all_unwrapped(self._variables))

    @property
    def matrix_noise(self) -> Any:
        """What makes correlated noise; None for independent noise."""
        return self._noise if isinstance(self._noise, MatrixNoise) else None

    @property
    def knows_its_groups(self) -> bool:
        """Whether the clip rule has a state: one with groups, once it is built."""
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

        Correlated noise has this times s(C) and the norm of a row of C^-1.
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
          ValueError: if the rule takes none, or has been given them.
        """
        rule = self.clip
        if not rule.takes_public_norms:
            raise ValueError(
                f"clip={rule} takes nothing from public data; PublicNormClip and "
                "ScaledClip do."
            )
        if rule.given is not None:
            raise ValueError(
                f"clip={rule} has been given its numbers. Leave them out to take them "
                "from public data."
            )
        return rule.layout

    def set_public_norms(self, norms: Any) -> None:
        """Sets each group's gradient norm on public data.

        A logical step of which batches were summed already is clipped, and noised, by
        the norms that it began with.

        Args:
          norms: `[L]` in the groups' order, or by group name; finite, 0 or above. They
            must come from public data: no noise is added to them.

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
                "Keras does not read an optimizer's state back from a SavedModel: the "
                "clip norm would start afresh, and the number of steps from 0, so that "
                "the privacy spent would be counted too low. Save to a .keras file, or "
                "use tf.train.Checkpoint.",
                stacklevel=2,
            )
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel":
            children.pop("_step_history", None)
        return children

    def save_own_variables(self, store):
        """Saves the state, and which steps are behind it."""
        super().save_own_variables(store)
        store["step_history"] = self._step_history.to_array()

    def load_own_variables(self, store):
        """Loads the state, and which steps are behind it."""
        names = [name for name in store.keys() if name != "step_history"]
        super().load_own_variables({name: store[name] for name in names})
        # Also where Keras left the variables as they were, with a warning (an optimizer
        # that is not built, or another one): the model's weights are the file's.
        if "step_history" in store.keys():
            self._step_history.from_array(store["step_history"])

    def _check_rate(self, eager: bool) -> None:
        """Raises if the learning rate is a function of more than the step.

        It would scale what is released, by a metric of private data perhaps.

        Args:
          eager: whether this may be any of many steps. A trace is one of few.
        """
        rate, kept = _compat.own_rate(self), self._transient
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
            f"{type(rule).__name__} does not know the gradient norms of public data. "
            "Add dpc.keras.PublicGradientNorms((public_x, public_y)) to the callbacks "
            "of fit, or call optimizer.set_public_norms(norms), or give them to the "
            "rule."
        )
