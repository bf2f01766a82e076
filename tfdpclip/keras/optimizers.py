"""Keras optimizers that train with differential privacy."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import tensorflow as tf

from tfdpclip import accounting
from tfdpclip.clipping import (
    ClipRule,
    QuantileClip,
    as_rule,
    check_non_negative,
    check_positive,
    serialize_rule,
)
from tfdpclip.gradients import (
    ExampleIsolationError,
    PerExampleGradients,
)
from tfdpclip.gradients.eager import EagerGradients
from tfdpclip.gradients.engine import DEFAULT_MEMORY
from tfdpclip.gradients.isolation import FAILED, UNCHECKED
from tfdpclip.noise import GaussianNoise

_ARGUMENTS = """
    Privacy arguments, for every optimizer of this module:

    Args:
      clip: the clip norm, or a clip rule. The default follows the median of the
        gradient norms.
      noise_multiplier: z, the number the accountant gets: the noise's stddev as a
        multiple of the clip norm, 0 or above. What the gradient sum gets is slightly
        more where the clip rule spends some of the budget on counts
        (`gradient_noise_multiplier`). 0 is not private.
      expected_batch_size: the public expected number of examples in one logical step.
        It is the divisor of every sum; the number of examples that happened to be in
        a batch is never used.
      accumulation_steps: how many physical batches make one logical step. Noise is
        drawn and the clip norm moves once per logical step; `iterations` counts those.
      check_isolation: "first" (on the first step), "always" or "never": whether to test
        that no example's gradient depends on another example.
      gradient_memory: bytes of materialised per-example gradients to allow at once.
      seed: an integer makes the noise reproducible, for experiments only: the run is
        then not private, and reports say so.

    Raises:
      ValueError: if an argument is missing, not finite or out of range, or if the
        counts of an adaptive clip are too precise for `noise_multiplier`.

    *Formal guarantees*

    * Each step releases the sum of clipped gradients plus N(0, (z_g C)^2) on every
      coordinate, and each count of the clip rule plus its own noise, where
      1/z^2 = 1/z_g^2 + sum_k 1/(2 s_k)^2: one Gaussian mechanism of noise multiplier z
      under adding or removing one example (Andrew et al. 2021, Theorem 1).
    * Noise is scaled by the clip that was applied; the clip moves afterwards.
    * Noise comes from the operating system's entropy and is in no checkpoint.
    * Gradients that were computed any other way are refused by `apply_gradients`.
"""


class _Transient:
    """What must not be saved: plain attributes here are invisible to checkpoints."""

    def __init__(self):
        self.issued: list = []
        self.sums: list[tf.Variable] | None = None
        self.places: dict[int, int] = {}
        self.counts: tf.Variable | None = None
        self.filled: tf.Variable | None = None
        self.status: tf.Variable | None = None


class PrivateOptimizer:
    """What `privatize` adds to a Keras optimizer class. Not for use on its own."""

    def __init__(
        self,
        *args: Any,
        clip: float | ClipRule | None = None,
        noise_multiplier: float | None = None,
        expected_batch_size: float | None = None,
        accumulation_steps: int = 1,
        check_isolation: str = "first",
        gradient_memory: int = DEFAULT_MEMORY,
        seed: int | None = None,
        **kwargs: Any,
    ):
        self._check_missing(noise_multiplier, expected_batch_size)
        rule = QuantileClip() if clip is None else as_rule(clip)
        noise_multiplier = check_non_negative("noise_multiplier", noise_multiplier)
        batch_size = check_positive("expected_batch_size", expected_batch_size)
        if (
            isinstance(accumulation_steps, bool)
            or not isinstance(accumulation_steps, int)
            or accumulation_steps < 1
        ):
            raise ValueError(
                f"accumulation_steps must be an integer, 1 or above, got "
                f"{accumulation_steps!r}."
            )
        if check_isolation not in ("first", "always", "never"):
            raise ValueError(
                "check_isolation must be 'first', 'always' or 'never', got "
                f"{check_isolation!r}."
            )
        check_positive("gradient_memory", gradient_memory)
        private = noise_multiplier > 0
        count_stddevs = tuple(rule.count_stddevs(batch_size, private))
        split = (
            accounting.split_noise_multiplier(noise_multiplier, count_stddevs)
            if private
            else 0.0
        )
        noise = GaussianNoise(seed)
        super().__init__(*args, **kwargs)
        self._rule = rule
        self._noise_multiplier = noise_multiplier
        self._gradient_noise_multiplier = float(split)
        self._count_stddevs = count_stddevs
        self._expected_batch_size = batch_size
        self._accumulation_steps = accumulation_steps
        self._check_isolation = check_isolation
        self._gradient_memory = int(gradient_memory)
        self._seed = seed
        self._noise = noise
        self._transient = _Transient()
        with tf.init_scope():
            self._clip_state = [
                tf.Variable(part, trainable=False, name=f"clip_state_{i}")
                for i, part in enumerate(tf.nest.flatten(rule.initial_state()))
            ]
        self._variables.extend(self._clip_state)

    def _check_missing(self, noise_multiplier, expected_batch_size):
        missing = [
            name
            for name, value in (
                ("noise_multiplier", noise_multiplier),
                ("expected_batch_size", expected_batch_size),
            )
            if value is None
        ]
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
        """The clip rule."""
        return self._rule

    @property
    def noise_multiplier(self) -> float:
        """z, the number the accountant gets."""
        return self._noise_multiplier

    @property
    def gradient_noise_multiplier(self) -> float:
        """z_g: the gradient sum gets noise of stddev z_g times the sensitivity."""
        return self._gradient_noise_multiplier

    @property
    def count_stddevs(self) -> tuple[float, ...]:
        """The noise stddev on each sum of the clip rule's indicators."""
        return self._count_stddevs

    @property
    def expected_batch_size(self) -> float:
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
        """What is clipped: "example"."""
        return "example"

    @property
    def clip_state(self) -> Any:
        """The clip rule's current state."""
        flat = [tf.convert_to_tensor(part) for part in self._clip_state]
        return tf.nest.pack_sequence_as(self._rule.initial_state(), flat)

    @property
    def clip_norm(self) -> tf.Tensor:
        """The current clip norm, a float32 scalar."""
        return self._rule.clip_norm(self.clip_state)

    def get_config(self) -> dict[str, Any]:
        """The settings, such that ``from_config`` makes the same optimizer."""
        config = super().get_config()
        config.update(
            clip=serialize_rule(self._rule),
            noise_multiplier=self._noise_multiplier,
            expected_batch_size=self._expected_batch_size,
            accumulation_steps=self._accumulation_steps,
            check_isolation=self._check_isolation,
            gradient_memory=self._gradient_memory,
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
        gradients = self._per_example(loss, var_list, tape)
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

        tf.cond(filled >= self._accumulation_steps, finish, lambda: tf.constant(False))

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
        gradients = self._per_example(loss, var_list, tape)
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
            )
        self._transient.issued = []
        return super().apply_gradients(grads_and_vars, name=name, **kwargs)

    def finalize_variable_values(self, var_list):
        """Runs at the end of `fit`; raises if compiled steps found a broken batch."""
        status = self._transient.status
        if status is not None and tf.executing_eagerly() and int(status) == FAILED:
            raise ExampleIsolationError(
                "An example's gradient depends on other examples (found on the first "
                "step, inside code compiled by XLA, which cannot raise). No example "
                "contributed to this run: the weights hold noise only. Run once "
                "without jit_compile to see which variable and op are to blame."
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
        return super()._trackable_children(save_type, **kwargs)

    def _per_example(self, loss, var_list, tape):
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if replicas > 1:
            raise NotImplementedError(
                f"{type(self).__name__} does not support several replicas ("
                f"{replicas} here): each would clip and add noise on its own."
            )
        if callable(loss):
            tape = tf.GradientTape() if tape is None else tape
            with tape:
                loss = loss()
        if callable(var_list):
            var_list = var_list()
        var_list = tf.nest.flatten(var_list)
        if not var_list:
            raise ValueError(
                "There is nothing to train: the model has no trainable variables."
            )
        with tf.init_scope():
            self.build(var_list)
        if isinstance(loss, tf.__internal__.EagerTensor):
            return EagerGradients(loss, var_list, tape)
        # Every trace builds a graph of its own, which is to be checked.
        with tf.init_scope():
            self._transient.status.assign(UNCHECKED)
        return PerExampleGradients(
            tf.convert_to_tensor(loss),
            var_list,
            nominal_batch_size=self._expected_batch_size / self._accumulation_steps,
            memory=self._gradient_memory,
            check_isolation=self._check_isolation,
            status=self._transient.status,
        )

    def _clipped(self, gradients):
        """The clipped sums, the sums of indicators and the shared gradients."""
        state, norms = self.clip_state, gradients.norms
        sums = gradients.clipped_sum(self._rule, state)
        indicators = self._rule.indicators(norms, state, gradients.present)
        indicators = tf.where(gradients.isolated, indicators, 0.0)
        return sums, tf.reduce_sum(indicators, axis=0), gradients.shared_gradients()

    def _finish(self, gradients, sums, counts, shared):
        released = self._release(gradients, sums, counts, shared)
        self.apply_gradients(released)

    def _release(self, gradients, sums, counts, shared):
        """Noise with the clip that was applied, divide, and only then adapt."""
        state = self.clip_state
        stddev = self._gradient_noise_multiplier * self._rule.sensitivity(state)
        drawn = [i for i, c in enumerate(gradients.connected) if c]
        noise = self._noise.sample_all(
            [gradients.variables[i].shape for i in drawn],
            [stddev] * len(drawn),
            [sums[i].dtype for i in drawn],
        )
        noisy = {i: sums[i] + part for i, part in zip(drawn, noise, strict=True)}
        released = []
        for i, (variable, extra) in enumerate(
            zip(gradients.variables, shared, strict=True)
        ):
            private = None
            if i in noisy:
                private = tf.cast(noisy[i] / self._expected_batch_size, variable.dtype)
            if extra is not None:
                extra = tf.convert_to_tensor(extra)
                private = extra if private is None else private + extra
            released.append((private, variable))
        self._adapt(state, counts)
        self._transient.issued = [g for g, _ in released if g is not None]
        return released

    def _adapt(self, state, counts):
        if not self._count_stddevs:
            return
        stddevs = tf.constant(self._count_stddevs, tf.float32)
        counts += self._noise.sample([len(self._count_stddevs)], 1.0) * stddevs
        fractions = tf.clip_by_value(counts / self._expected_batch_size + 0.5, 0, 1)
        new = tf.nest.flatten(self._rule.next_state(state, fractions))
        for variable, value in zip(self._clip_state, new, strict=True):
            variable.assign(value)

    def build(self, var_list):
        """Makes the variables; the un-noised sums among them are never saved."""
        super().build(var_list)
        kept = self._transient
        if kept.status is not None:
            return
        with tf.init_scope():
            kept.status = tf.Variable(UNCHECKED, trainable=False, dtype=tf.int64)
            if self._accumulation_steps == 1:
                return
            kept.sums = [
                tf.Variable(
                    tf.zeros(v.shape, v.dtype if v.dtype.size >= 4 else tf.float32),
                    trainable=False,
                )
                for v in var_list
            ]
            kept.places = {id(v): i for i, v in enumerate(var_list)}
            zeros = tf.zeros([len(self._count_stddevs)], tf.float32)
            kept.counts = tf.Variable(zeros, trainable=False)
            kept.filled = tf.Variable(0, trainable=False)


@functools.cache
def privatize(
    optimizer_class: type[tf.keras.optimizers.Optimizer],
) -> type[tf.keras.optimizers.Optimizer]:
    """A differentially private version of a Keras optimizer class.

    Everything after the gradient (momentum, schedules, weight decay, averaging) is the
    given class's own, and works on gradients that are private already.

    Args:
      optimizer_class: a subclass of `tf.keras.optimizers.Optimizer`.

    Returns:
      A subclass of it, named with DP in front, that takes the arguments of the class
      and `clip`, `noise_multiplier`, `expected_batch_size`, `accumulation_steps`,
      `check_isolation`, `gradient_memory` and `seed` by keyword.

    Raises:
      ValueError: if it is no such class.

    >>> DPAdamax = privatize(tf.keras.optimizers.Adamax)
    >>> DPAdamax(1e-3, noise_multiplier=1.0, expected_batch_size=64).name
    'DPAdamax'
    """
    if not (
        isinstance(optimizer_class, type)
        and issubclass(optimizer_class, tf.keras.optimizers.Optimizer)
        and not issubclass(optimizer_class, PrivateOptimizer)
    ):
        raise ValueError(
            "optimizer_class must be a subclass of tf.keras.optimizers.Optimizer (not "
            "of the legacy optimizers, and not private already), got "
            f"{optimizer_class!r}. For example privatize(tf.keras.optimizers.Adamax)."
        )
    return _private_class(optimizer_class)


def _private_class(optimizer_class):
    name = f"DP{optimizer_class.__name__}"

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("name", name)
        PrivateOptimizer.__init__(self, *args, **kwargs)

    doc = (
        f"`tf.keras.optimizers.{optimizer_class.__name__}` with differential privacy.\n"
        f"\n    Takes the arguments of `{optimizer_class.__name__}` and the following "
        f"by keyword.\n{_ARGUMENTS}"
    )
    body = {"__init__": __init__, "__doc__": doc, "__module__": __name__}
    made = type(name, (PrivateOptimizer, optimizer_class), body)
    # A class from elsewhere must not take the place of a Keras class of the same name.
    module = optimizer_class.__module__
    package = "tfdpclip" if module.startswith("keras.") else f"tfdpclip.{module}"
    return tf.keras.saving.register_keras_serializable(package)(made)


DPSGD = privatize(tf.keras.optimizers.SGD)
DPAdam = privatize(tf.keras.optimizers.Adam)
DPAdamW = privatize(tf.keras.optimizers.AdamW)
DPAdagrad = privatize(tf.keras.optimizers.Adagrad)
DPRMSprop = privatize(tf.keras.optimizers.RMSprop)
