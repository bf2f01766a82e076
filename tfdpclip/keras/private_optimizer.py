"""What makes a Keras optimizer private."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._arguments import boolean, choice, fraction, non_negative, positive, shown
from tfdpclip._devices import in_xla
from tfdpclip._docs import see
from tfdpclip._outside import outside_of_functions
from tfdpclip._schedules import Schedule, as_config, setting, value_at
from tfdpclip.clipping import (
    ClipRule,
    Groups,
    QuantileClip,
    as_rule,
    bound_rule,
    serialize_rule,
)
from tfdpclip.clipping.groups import by_group
from tfdpclip.gradients import (
    ExampleIsolationError,
    PerExampleGradients,
)
from tfdpclip.gradients.dataflow import Dataflow
from tfdpclip.gradients.eager import EagerGradients
from tfdpclip.gradients.engine import DEFAULT_MEMORY, refuse_repeated
from tfdpclip.gradients.origins import public_writes
from tfdpclip.gradients.state import PublicVariables, public_handles, reads
from tfdpclip.gradients.status import DEFAULT_RATE, CheckStatus
from tfdpclip.gradients.whole import WholeGradient
from tfdpclip.keras import _compat, private_state
from tfdpclip.keras.constant_state import ConstantState, trained_privately
from tfdpclip.keras.step_history import StepHistory
from tfdpclip.keras.weight_watch import marked_updates, own_writes
from tfdpclip.mechanism import Mechanism
from tfdpclip.noise import GaussianNoise


class _Transient:
    """What must not be saved: plain attributes here are invisible to checkpoints."""

    def __init__(self):
        self.issued: list = []
        self.sums: list[tf.Variable] | None = None
        self.places: dict[int, int] = {}
        self.counts: tf.Variable | None = None
        self.filled: tf.Variable | None = None
        self.built = False
        # What the self-checks of losses found in code that cannot raise.
        self.statuses: list[CheckStatus] = []
        self.constant = ConstantState()


class PrivateOptimizer:
    """What `privatize` adds to a Keras optimizer class. Not for use on its own."""

    def __init__(
        self,
        *args: Any,
        clip: float | ClipRule | None = None,
        noise_multiplier: float | Schedule | None = None,
        expected_batch_size: float | None = None,
        accumulation_steps: int = 1,
        unit: str = "example",
        perturbation: float = 0.0,
        check_isolation: str = "first",
        recheck_rate: float = DEFAULT_RATE,
        gradient_memory: int = DEFAULT_MEMORY,
        hardened_noise: bool = False,
        public_variables: Sequence[tf.Variable | str] = (),
        seed: int | None = None,
        **kwargs: Any,
    ):
        if not (isinstance(unit, str) and unit in ("example", "batch")):
            raise ValueError(f"unit must be 'example' or 'batch', got {shown(unit)}.")
        boolean("hardened_noise", hardened_noise)
        self._check_missing(noise_multiplier, expected_batch_size, unit)
        rule = QuantileClip() if clip is None else as_rule(clip)
        noise_multiplier = setting("noise_multiplier", noise_multiplier, non_negative)
        if expected_batch_size is not None:
            expected_batch_size = positive("expected_batch_size", expected_batch_size)
        if (
            isinstance(accumulation_steps, bool)
            or not isinstance(accumulation_steps, int)
            or not 1 <= accumulation_steps < 2**31
        ):
            raise ValueError(
                f"accumulation_steps must be an integer, 1 or above, got "
                f"{shown(accumulation_steps)}."
            )
        choice("check_isolation", check_isolation, ("first", "always", "never"))
        recheck_rate = fraction("recheck_rate", recheck_rate)
        positive("gradient_memory", gradient_memory)
        perturbation = non_negative("perturbation", perturbation)
        public = PublicVariables(public_variables)
        noise = GaussianNoise(seed, hardened_noise)
        divisor = accumulation_steps if unit == "batch" else expected_batch_size
        settings = (noise_multiplier, float(divisor))
        mechanism = None
        if not rule.has_groups:
            mechanism = Mechanism(rule, *settings)
        super().__init__(*args, **kwargs)
        self._rule = rule
        self._bound_mechanism: Mechanism | None = None
        self._noise_setting = noise_multiplier
        self._expected_batch_size = expected_batch_size
        self._accumulation_steps = accumulation_steps
        self._divisor = float(divisor)
        self._unit = unit
        self._perturbation = perturbation
        self._check_isolation = check_isolation
        self._recheck_rate = recheck_rate
        self._gradient_memory = int(gradient_memory)
        self._public_variables = public
        self._seed = seed
        self._noise = noise
        self._transient = _Transient()
        self._step_history = StepHistory(self)
        if mechanism is not None:
            self._bind(mechanism)

    def _bind(self, mechanism: Mechanism) -> None:
        self._bound_mechanism = mechanism
        with tf.init_scope():
            state = mechanism.rule.initial_state()
            self._clip_state = [
                tf.Variable(part, trainable=False, name=f"clip_state_{i}")
                for i, part in enumerate(tf.nest.flatten(state))
            ]
        self._variables.extend(self._clip_state)

    def _check_missing(self, noise_multiplier, expected_batch_size, unit):
        needed = [("noise_multiplier", noise_multiplier)]
        if unit == "example":
            needed.append(("expected_batch_size", expected_batch_size))
        missing = [name for name, value in needed if value is None]
        if missing:
            raise ValueError(
                f"{type(self).__name__} needs {' and '.join(missing)}, for example "
                f"{type(self).__name__}(learning_rate=0.1, noise_multiplier=1.1, "
                "expected_batch_size=256)."
            )

    # Settings and state, read only: changing them in the middle of a run would make
    # what was accounted untrue.

    @property
    def clip(self) -> ClipRule:
        """The clip rule; it knows its groups once the optimizer is built."""
        bound = self._bound_mechanism
        return self._rule if bound is None else bound.rule

    @property
    def noise_multiplier(self) -> float:
        """z, the number the accountant gets; the current one of a schedule."""
        return self.noise_multiplier_at(self.iterations)

    @property
    def noise_schedule(self) -> Schedule | None:
        """The schedule that z follows, if it does."""
        scheduled = isinstance(self._noise_setting, Schedule)
        return self._noise_setting if scheduled else None

    def noise_multiplier_at(self, step: int) -> float:
        """z of step `step`, counted from 0."""
        with tf.init_scope():
            return float(value_at(self._noise_setting, step))

    @property
    def gradient_noise_multiplier(self) -> float:
        """z_g: the sum of group h gets stddev z_g times ``clip.noise_scales``[h]."""
        with tf.init_scope():
            return float(self._mechanism.gradient_noise_multiplier(self.iterations))

    @property
    def count_stddevs(self) -> tuple[float, ...]:
        """The noise stddev on each sum of the clip rule's indicators."""
        return self._mechanism.count_stddevs

    @property
    def expected_batch_size(self) -> float | None:
        """The public expected number of examples in one logical step."""
        return self._expected_batch_size

    @property
    def accumulation_steps(self) -> int:
        """How many physical batches make one logical step."""
        return self._accumulation_steps

    @property
    def seed(self) -> int | None:
        """The noise's seed; a run with a seed is not private."""
        return self._seed

    @property
    def unit(self) -> str:
        """What is clipped, for the accountant: "example", "batch" or "group"."""
        if self._unit == "batch" and self._accumulation_steps > 1:
            return "group"
        return self._unit

    @property
    def perturbation(self) -> float:
        """k of the Gaussian that is added to each record before clipping."""
        return self._perturbation

    @property
    def clip_state(self) -> Any:
        """The clip rule's current state."""
        flat = [tf.convert_to_tensor(part) for part in self._clip_state]
        return tf.nest.pack_sequence_as(self._mechanism.rule.initial_state(), flat)

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
    def _mechanism(self) -> Mechanism:
        if self._bound_mechanism is None:
            raise ValueError(
                f"{self._rule} does not know the variables before the first step. Call "
                "optimizer.build(model.trainable_variables) first."
            )
        return self._bound_mechanism

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

        Args:
          norms: `[L]` in the groups' order, or by group name; finite, 0 or above. They
            must come from public data: no noise is added to them.

        Raises:
          ValueError: if they do not fit the clip rule's groups.
        """
        numbers = by_group("norms", norms, self.public_layout)
        state = self.clip.with_public_norms(self.clip_state, numbers)
        for variable, value in zip(
            self._clip_state, tf.nest.flatten(state), strict=True
        ):
            variable.assign(value)

    def get_config(self) -> dict[str, Any]:
        """The settings, such that ``from_config`` makes the same optimizer."""
        config = super().get_config()
        config.update(
            clip=serialize_rule(self.clip),
            noise_multiplier=as_config(self._noise_setting),
            expected_batch_size=self._expected_batch_size,
            accumulation_steps=self._accumulation_steps,
            unit=self._unit,
            perturbation=self._perturbation,
            check_isolation=self._check_isolation,
            recheck_rate=self._recheck_rate,
            gradient_memory=self._gradient_memory,
            hardened_noise=self._noise.hardened,
            public_variables=list(self._public_variables.names),
            seed=self._seed,
        )
        return config

    # Steps.

    @tf.autograph.experimental.do_not_convert
    def minimize(self, loss, var_list, tape=None):
        """One physical batch: clip, sum and, when the logical step is full, the rest.

        Args:
          loss: the loss tensor (one loss per example, or a scalar that the engine can
            take apart), or a callable that computes it.
          var_list: the variables to train.
          tape: the tape that recorded `loss`; needed in eager code only.
        """
        gradients = self._records(loss, var_list, tape)
        with own_writes(self._step_history):
            self._take_in(gradients)

    def _take_in(self, gradients):
        sums, counts, shared = self._clipped(gradients)
        if self._accumulation_steps == 1:
            self._finish(gradients, sums, counts, shared)
            return
        kept = self._transient
        places = [kept.places[id(v)] for v in gradients.variables]
        for place, part in zip(places, sums, strict=True):
            total = kept.sums[place]
            total.assign_add(tf.cast(part, total.dtype))
        kept.counts.assign_add(counts)
        filled = kept.filled.assign_add(1, read_value=True)

        def finish():
            totals = [tf.convert_to_tensor(kept.sums[place]) for place in places]
            self._finish(gradients, totals, tf.convert_to_tensor(kept.counts), shared)
            for total in (*kept.sums, kept.counts, kept.filled):
                total.assign(tf.zeros_like(total))
            return tf.constant(True)

        with public_writes():
            tf.cond(
                filled >= self._accumulation_steps, finish, lambda: tf.constant(False)
            )

    @tf.autograph.experimental.do_not_convert
    def compute_gradients(self, loss, var_list, tape=None):
        """The private gradients of one logical step, for `apply_gradients`.

        The clip norm moves here. Use `minimize` with `accumulation_steps` above 1.
        """
        if self._accumulation_steps != 1:
            raise ValueError(
                "compute_gradients cannot accumulate. Call optimizer.minimize(loss, "
                "variables, tape=tape) for each physical batch instead."
            )
        gradients = self._records(loss, var_list, tape)
        with own_writes(self._step_history):
            return self._release(gradients, *self._clipped(gradients))

    def apply_gradients(self, grads_and_vars, name=None, **kwargs):
        """Applies gradients that this optimizer made private; refuses all others."""
        grads_and_vars = list(grads_and_vars)
        issued = {id(gradient) for gradient in self._transient.issued}
        if any(g is not None and id(g) not in issued for g, _ in grads_and_vars):
            raise ValueError(
                f"{type(self).__name__}.apply_gradients got gradients that it did not "
                "make private: they would be applied without clipping and noise. Call "
                "optimizer.minimize(loss, variables, tape=tape) instead of "
                "tape.gradient and apply_gradients. (A LossScaleOptimizer around this "
                "optimizer also causes this; it would scale gradients before the clip: "
                "use mixed_bfloat16, which needs none.)"
                + see("gradients-made-elsewhere")
            )
        self._transient.issued = []
        with marked_updates(self._step_history), public_writes():
            return super().apply_gradients(grads_and_vars, name=name, **kwargs)

    def finalize_variable_values(self, var_list):
        """Runs at the end of `fit`; raises if compiled steps found a broken batch."""
        constant = self._transient.constant
        if tf.executing_eagerly():
            constant.raise_if_changed()
            constant.reset()
        statuses = self._transient.statuses
        if tf.executing_eagerly() and any(status.failed for status in statuses):
            raise ExampleIsolationError(
                "An example's gradient depends on other examples, or is not what it "
                "is taken for (found by the check of a step, inside code compiled by "
                "XLA, which cannot raise). From then on no example contributed to this "
                "run: the steps since hold noise only. Run once without jit_compile "
                "and with check_isolation='always' to see which variable and op are "
                "to blame." + see("mixed-examples")
            )
        return super().finalize_variable_values(var_list)

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        if save_type == "savedmodel" and int(self.iterations) > 0:
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
        if len(names) == len(self.variables) and "step_history" in store.keys():
            self._step_history.from_array(store["step_history"])

    def _records(self, loss, var_list, tape):
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if replicas > 1:
            raise NotImplementedError(
                f"{type(self).__name__} does not support several replicas ("
                f"{replicas} here): each would clip and add noise on its own."
                + see("several-replicas")
            )
        if callable(loss):
            tape = tf.GradientTape(persistent=True) if tape is None else tape
            with tape:
                loss = loss()
        if callable(var_list):
            var_list = var_list()
        var_list = tf.nest.flatten(var_list)
        if not var_list:
            raise ValueError(
                "There is nothing to train: the model has no trainable variables."
            )
        refuse_repeated("var_list", var_list)
        if not self._transient.built:
            outside_of_functions(lambda: self.build(var_list), var_list)
        else:
            self.build(var_list)
        self._check_public_norms()
        perturbation = None
        if self._perturbation > 0:
            perturbation = (self._perturbation, self._noise.seed_pair())
        if _tf_private.is_eager(loss):
            if self._unit == "batch":
                raise ValueError(
                    'unit="batch" needs a graph, in which it sees what layers keep of '
                    "private batches: compile without run_eagerly=True, or put the "
                    "step into a tf.function."
                )
            return EagerGradients(loss, var_list, tape, perturbation)
        loss = tf.convert_to_tensor(loss)
        if self._unit == "batch":
            private_state.keep_public(loss)
            handles = [loss.graph.capture(v.handle) for v in var_list]
            public = public_handles(loss.graph, handles, self._public())
            found = reads(loss, Dataflow([loss], handles, public=public))
            records = WholeGradient(loss, var_list, perturbation)
            records.isolated = self._transient.constant.check(found)
            return records
        records = PerExampleGradients(
            loss,
            var_list,
            nominal_batch_size=self._divisor / self._accumulation_steps,
            memory=self._gradient_memory,
            check_isolation=self._check_isolation,
            recheck_rate=self._recheck_rate,
            groups=self._mechanism.rule.assignment,
            perturbation=perturbation,
            public_variables=self._public(),
        )
        records.isolated = tf.logical_and(
            records.isolated, self._transient.constant.check(records.state_reads)
        )
        if in_xla():
            # Elsewhere the step itself raises.
            self._transient.statuses.append(records.status)
        private_state.keep_public(loss)
        return records

    def written_by_steps(self) -> list[tf.Variable]:
        """What nothing but the optimizer's own steps may write to, in a traced step.

        Its learning rate and step counter among them: they are of private data if a
        training step computes them.
        """
        kept = self._transient
        sums = [*kept.sums, kept.counts, kept.filled] if kept.sums else []
        rate = _compat.own_rate(self)
        rates = [rate] if isinstance(rate, tf.Variable) else []
        found = [*self.variables, *self._clip_state, *rates, *sums]
        return list({id(v): v for v in found}.values())

    def _public(self) -> PublicVariables:
        """What is declared to be public, and the optimizer's own."""
        return self._public_variables.and_those_of(self._variables)

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

    def _clipped(self, records):
        """The clipped sums over the divisor, sums of indicators, shared gradients."""
        mechanism, rule = self._mechanism, self._mechanism.rule
        norms = records.record_norms(rule.assignment)
        weights, bits = mechanism.clip(norms, self.clip_state, records.present)
        # Not the sums: the weights are few.
        weights = records.mask(weights / mechanism.records)
        sums = records.weighted_sum(weights, rule.assignment)
        for part, variable in zip(sums, records.variables, strict=True):
            part.set_shape(variable.shape)
        bits = tf.where(records.isolated, bits, 0.0)
        return sums, tf.reduce_sum(bits, axis=0), records.shared_gradients()

    def _finish(self, gradients, sums, counts, shared):
        released = self._release(gradients, sums, counts, shared)
        self.apply_gradients(released)

    def _release(self, gradients, sums, counts, shared):
        """The mechanism's release, and the terms that depend on no record."""
        self._step_history.count()
        connected = zip(sums, gradients.connected, strict=True)
        release = self._mechanism.release(
            self.clip_state,
            [part if known else None for part, known in connected],
            counts,
            self._noise,
            self.iterations,
            divided=True,
        )
        released = []
        for private, variable, extra in zip(
            release.means, gradients.variables, shared, strict=True
        ):
            if private is not None:
                private = tf.cast(private, variable.dtype)
            if extra is not None:
                extra = tf.convert_to_tensor(extra)
                private = extra if private is None else private + extra
            released.append((private, variable))
        state = tf.nest.flatten(release.next_state)
        for variable, value in zip(self._clip_state, state, strict=True):
            variable.assign(value)
        self._transient.issued = [g for g, _ in released if g is not None]
        return released

    def build(self, var_list):
        """Makes the variables; the un-noised sums among them are never saved."""
        super().build(var_list)
        trained_privately(var_list)
        self._step_history.trains(var_list)
        if self._bound_mechanism is None:
            rule = bound_rule(self._rule, [v.name for v in var_list])
            self._bind(Mechanism(rule, self._noise_setting, self._divisor))
        elif self._bound_mechanism.rule.assignment is not None:
            self._check_names([v.name for v in var_list])
        kept = self._transient
        if kept.built:
            return
        kept.built = True
        if self._accumulation_steps == 1:
            return
        with tf.init_scope():
            kept.sums = [
                tf.Variable(
                    tf.zeros(v.shape, v.dtype if v.dtype.size >= 4 else tf.float32),
                    trainable=False,
                )
                for v in var_list
            ]
            kept.places = {id(v): i for i, v in enumerate(var_list)}
            zeros = tf.zeros([len(self._bound_mechanism.count_stddevs)], tf.float32)
            kept.counts = tf.Variable(zeros, trainable=False)
            kept.filled = tf.Variable(0, trainable=False)

    def _check_names(self, names: list[str]) -> None:
        members = tuple(name.split(":")[0] for name in names)
        if members != self._bound_mechanism.rule.layout.members:
            raise ValueError(
                "The variables differ from those that the clip rule's groups were made "
                "of when the optimizer was built. Use a new optimizer."
            )
