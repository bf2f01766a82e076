"""The settings of a private optimizer: arguments, config and mechanism.

Settings are read only: a change in the middle of a run would make the accounting
untrue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdpclip._arguments import (
    boolean,
    choice,
    integer,
    non_negative,
    optional,
    positive,
)
from tfdpclip._schedules import Schedule, as_config, setting, value_at
from tfdpclip.clipping import ClipRule, QuantileClip, as_rule, serialize_rule
from tfdpclip.gradients.engine import DEFAULT_MEMORY
from tfdpclip.gradients.loss.state import PublicVariables
from tfdpclip.mechanism import Mechanism
from tfdpclip.noise import GaussianNoise
from tfdpclip.noise.kept import MatrixNoise
from tfdpclip.noise.runs import CorrelatedNoise, as_run
from tfdpclip.tensorflow_privacy import refuse_arguments

#: The clip rule without an argument `clip`. The paper's median, unnormalised and from
#: 0.1, lost up to 8 points to tuned clip norms: "Which clip?" in docs/clipping.md.
#: Without a minimum norm, runs that are long enough to fit most examples fell apart.
DEFAULT_CLIP = QuantileClip(0.65, initial_norm=1.0, normalize=True, minimum_norm=0.1)


class OptimizerSettings:
    """Checks the arguments of a private optimizer, before Keras sees its own."""

    def __init__(
        self,
        *args: Any,
        clip: float | ClipRule | None = None,
        noise_multiplier: float | Schedule | None = None,
        expected_batch_size: float | None = None,
        accumulation_steps: int = 1,
        unit: str = "example",
        rows_per_record: int = 1,
        perturbation: float = 0.0,
        check_gradients: str = "first",
        gradient_memory: int = DEFAULT_MEMORY,
        hardened_noise: bool = False,
        public_variables: Sequence[tf.Variable | str] = (),
        noise: CorrelatedNoise | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ):
        refuse_arguments(k for k, value in kwargs.items() if value is not None)
        choice("unit", unit, ("example", "person", "batch"))
        rows_per_record = integer("rows_per_record", rows_per_record, 1)
        boolean("hardened_noise", hardened_noise)
        self._check_missing(noise_multiplier, expected_batch_size, unit)
        rule = DEFAULT_CLIP if clip is None else as_rule(clip)
        noise_multiplier = setting("noise_multiplier", noise_multiplier, non_negative)
        expected_batch_size = optional(
            positive, "expected_batch_size", expected_batch_size
        )
        accumulation_steps = integer(
            "accumulation_steps", accumulation_steps, 1, 2**31 - 1
        )
        choice("check_gradients", check_gradients, ("first", "always", "never"))
        positive("gradient_memory", gradient_memory)
        perturbation = non_negative("perturbation", perturbation)
        public = PublicVariables(public_variables)
        source = GaussianNoise(seed, hardened_noise)
        correlated = as_run(noise, noise_multiplier)
        divisor = accumulation_steps if unit == "batch" else expected_batch_size
        super().__init__(*args, **kwargs)
        self._rule = rule
        # Made with the variables, because a rule may depend on them.
        self._bound_mechanism: Mechanism | None = None
        # Called once with the variables: a plan's rate depends on their number.
        self._fit_rate: Callable[[list[tf.Variable]], None] | None = None
        # A budget's epsilon, delta and step, as text: Keras would track a dictionary.
        self._spent = "{}"
        self._noise_setting = noise_multiplier
        self._expected_batch_size = expected_batch_size
        self._accumulation_steps = accumulation_steps
        self._divisor = float(divisor)
        self._unit = unit
        self._rows_per_record = rows_per_record
        self._perturbation = perturbation
        self._check_gradients = check_gradients
        self._gradient_memory = int(gradient_memory)
        self._public_variables = public
        self._seed = seed
        self._hardened = hardened_noise
        self._correlated = correlated
        self._noise = source if correlated is None else MatrixNoise(correlated, source)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(vars(OptimizerSettings).get(name), property):
            raise AttributeError(
                f"{name} of a private optimizer cannot be set: a change during a run "
                "would make the accounting untrue. Make another optimizer, and compile "
                f"with it: {type(self).__name__}(0.1, noise_multiplier=1.1, "
                "expected_batch_size=256), with the number that you mean."
            )
        if value is not None:  # Keras 3 has one of the names, and sets None.
            refuse_arguments([name])
        super().__setattr__(name, value)

    def _check_missing(self, noise_multiplier, expected_batch_size, unit):
        needed = [("noise_multiplier", noise_multiplier)]
        if unit != "batch":
            needed.append(("expected_batch_size", expected_batch_size))
        missing = [name for name, value in needed if value is None]
        if missing:
            raise ValueError(
                f"{type(self).__name__} needs {' and '.join(missing)}, for example "
                f"{type(self).__name__}(learning_rate=0.1, noise_multiplier=1.1, "
                "expected_batch_size=256). plan.optimizer(...) of a PrivacyPlan sets "
                "both from a budget."
            )

    @property
    def clip(self) -> ClipRule:
        """The clip rule; with its groups, once the optimizer is built."""
        bound = self._bound_mechanism
        return self._rule if bound is None else bound.rule

    @property
    def check_gradients(self) -> str:
        """When norms and sums are compared with ordinary gradients."""
        return self._check_gradients

    @property
    def noise_multiplier(self) -> float:
        """z, the number for the accountant; a schedule's current number."""
        return self.noise_multiplier_at(self.iterations)

    @property
    def noise_schedule(self) -> Schedule | None:
        """The schedule of z, or None."""
        return getattr(self._noise_setting, "given", None)

    def noise_multiplier_at(self, step: int) -> float:
        """z of step `step`, counted from 0."""
        setting = self._noise_setting
        if isinstance(setting, float):  # The fast path: called before every step.
            return setting
        with tf.init_scope():
            return float(value_at(setting, step))

    @property
    def noise(self) -> CorrelatedNoise | None:
        """The correlated noise of the run; None for independent noise."""
        return self._correlated

    @property
    def gradient_noise_multiplier(self) -> float:
        """z_g: the sum of group h gets stddev z_g times scale h of `clip`."""
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
        """The clipped unit, for the accountant: see `privatize`, or "group"."""
        if self._unit == "batch" and self._accumulation_steps > 1:
            return "group"
        return self._unit

    @property
    def clips_records(self) -> bool:
        """Whether each record is clipped on its own, and not a whole batch."""
        return self._unit != "batch"

    @property
    def rows_per_record(self) -> int:
        """The number of consecutive rows of a batch that make one record."""
        return self._rows_per_record

    @property
    def perturbation(self) -> float:
        """k, the stddev of the Gaussian that each record's gradient gets first."""
        return self._perturbation

    @property
    def _mechanism(self) -> Mechanism:
        if self._bound_mechanism is None:
            raise ValueError(
                f"{self._rule} has no groups before the first step. First call "
                "optimizer.build(model.trainable_variables)."
            )
        return self._bound_mechanism

    def _state_spent(self, epsilon: float, delta: float) -> None:
        """Has files of this step say the spent budget, as `privacy` of the config."""
        steps = int(self.iterations.numpy())
        spent = {"epsilon": epsilon, "delta": delta, "steps": steps}
        self._spent = json.dumps(spent)

    def get_config(self) -> dict[str, Any]:
        """The settings; ``from_config`` makes an equal optimizer from them."""
        config = super().get_config()
        config.update(
            clip=serialize_rule(self.clip),
            noise_multiplier=as_config(self._noise_setting),
            expected_batch_size=self._expected_batch_size,
            accumulation_steps=self._accumulation_steps,
            unit=self._unit,
            rows_per_record=self._rows_per_record,
            perturbation=self._perturbation,
            check_gradients=self._check_gradients,
            gradient_memory=self._gradient_memory,
            hardened_noise=self._hardened,
            noise=None if self._correlated is None else self._correlated.to_dict(),
            public_variables=list(self._public_variables.names),
            seed=self._seed,
        )
        spent = json.loads(self._spent)
        if spent and spent["steps"] == int(self.iterations.numpy()):
            config["privacy"] = spent
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Makes an optimizer from the result of `get_config`."""
        settings = {name: value for name, value in config.items() if name != "privacy"}
        made = super().from_config(settings, *args, **kwargs)
        made._spent = json.dumps(config.get("privacy", {}))
        return made
