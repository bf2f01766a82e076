"""The interface of clip rules, and the register of rules."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import tensorflow as tf

from tfdpclip import _schedules
from tfdpclip._arguments import shown
from tfdpclip._registered import REGISTERED
from tfdpclip.clipping.groups import Groups
from tfdpclip.kernel.rule import Rule


class ClipRule(Rule):
    """The base class of clip rules.

    *Formal guarantees*

    * For every record r with gradient g of norm n, the weighted record
      ``weights(n, state) * g`` has L2 norm at most ``sensitivity(state)``, up to the
      rounding of the arithmetic.
    * A record whose norm is not finite has weight 0 and indicator 0. The caller must
      replace the gradient of this record by zeros, and not multiply the gradient by the
      weight, because ``0 * inf`` is not 0; `tfdpclip.gradients` does so.
    * Every indicator is in [-1/2, 1/2] and depends on its own record and on the state
      alone.
    * Where a rule clips L groups of variables, the parts of a weighted record, group h
      divided by ``noise_scales(state)[h]``, have a joint L2 norm of at most 1. Noise of
      stddev z_g times ``noise_scales(state)[h]`` on group h therefore makes the sum a
      Gaussian mechanism of noise multiplier z_g.

    The code of a rule does not show whether the guarantees hold. So every step limits
    the weights and indicators of every rule, and computes those of a rule from outside
    the library one record at a time (`tfdpclip.kernel.limits`). A rule that is limited
    clips in another way than its author meant: `dpc.testing.assert_clip_rule` tests a
    rule in a test.

    A rule states its abilities by these attributes of its class:

    Attributes:
      has_groups: whether the rule clips groups of variables, and so has a `layout` once
        it is bound: see `GroupedRule`.
      elementwise: whether norms in a tensor of any shape get the weights and indicators
        that each norm would get alone, also with one clip norm per column of ``[B, L]``
        in the state. `LayerwiseClip` then treats its groups in one operation, and
        `PublicNormClip` can be based on the rule. The attribute is not inherited: a
        subclass that overrides a method states the attribute again.
      threshold: "record" if records of a norm above `clip_norm` are shortened, "group"
        if the parts in group h above ``clip_norms(state)[h]`` are, None if no norm
        separates the records that are clipped from the rest.
      takes_public_norms: whether the rule waits for numbers from public data unless
        `given`; it then has `with_public_norms(state, norms)` and `knows_norms(state)`.
    """

    has_groups: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    takes_public_norms: ClassVar[bool] = False
    threshold: str | None = "record"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "elementwise" not in vars(cls):
            cls.elementwise = False

    @property
    def layout(self) -> Groups:
        """The groups of a rule that has them, once it is bound."""
        raise ValueError(f"{self} has no groups.")

    @property
    def given(self) -> Any:
        """The public norms among the settings; None if the rule waits for them."""
        return None

    def with_public_norms(self, state: Any, norms: Any) -> Any:
        """The state after gradient norms, `[L]`, were measured on public data."""
        raise ValueError(f"{self} takes nothing from public data.")

    def knows_norms(self, state: Any) -> tf.Tensor:
        """Whether public norms were given or measured, or are not needed."""
        return tf.constant(True)

    def clip_norms(self, state: Any) -> tf.Tensor:
        """The current clip norm of each group, `[L]`; `[1]` without groups."""
        return tf.reshape(self.clip_norm(state), [-1])

    def bind(self, names: Sequence[str]) -> ClipRule:
        """This rule for variables of these names; only rules with groups differ.

        Args:
          names: the variables' names, such as "dense/kernel", in order.
        """
        del names
        return self

    @property
    def indicator_levels(self) -> int:
        """Indicators are multiples of 1 / (2 * levels); secure sums round to these.

        1 for bits of +-1/2. The default is 256.
        """
        return 256

    def mean_fraction(self, before: Any, after: Any, steps: int) -> float | None:
        """The mean of the noised fractions of several steps.

        NaN if the states do not tell it, as at the least clip norm; None if the rule
        never tells.

        Args:
          before: C_t before the first of these steps.
          after: the state after the last step.
          steps: the number of steps.
        """
        del before, after, steps
        return None

    def check_noise(self, stddevs: Sequence[float]) -> None:
        """Warns if the noise on the fractions, `[K]`, is too large for the rule."""
        del stddevs

    def clip_norm(self, state: Any) -> tf.Tensor:
        """The current clip norm, for reports: a float32 scalar."""
        return self.sensitivity(state)

    def __str__(self) -> str:
        """The rule with the settings that differ from the defaults."""
        changed = [
            f"{name}={_schedules.in_words(value)}"
            for name, value, default in self._settings()
            if _schedules.as_config(value) != _schedules.as_config(default)
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    __repr__ = __str__

    def _settings(self):
        if not dataclasses.is_dataclass(self):
            raise ValueError(
                f"{type(self).__name__} must be a dataclass, so that its settings can "
                "be read, compared and saved: put "
                "@dataclasses.dataclass(frozen=True, eq=False, repr=False) above it."
            )
        for field in dataclasses.fields(cast(Any, self)):
            default = field.default
            if default is dataclasses.MISSING and (
                field.default_factory is not dataclasses.MISSING
            ):
                default = field.default_factory()
            yield field.name, getattr(self, field.name), default

    def get_config(self) -> dict[str, Any]:
        """The settings, such that ``type(rule)(**rule.get_config()) == rule``."""
        return self._identity()

    def _identity(self) -> dict[str, Any]:
        return {
            name: _schedules.as_config(value) for name, value, _ in self._settings()
        }

    def __eq__(self, other: Any) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(json.dumps(self._identity(), sort_keys=True, default=str))


def register_rule(rule_class: type[ClipRule]) -> type[ClipRule]:
    """Makes a rule class known to `as_rule`, and so to saved models, by its name.

    A decorator, above ``@dataclasses.dataclass(frozen=True, eq=False, repr=False)``. A
    model that was saved with a user's own rule can be loaded once the module that
    registers the rule is imported.

    Args:
      rule_class: a subclass of `ClipRule`.

    Returns:
      `rule_class`.

    Raises:
      ValueError: if `rule_class` is no clip rule, or its name is taken.

    >>> import dataclasses
    >>> import tensorflow as tf
    >>> from tfdpclip.clipping import ClipRule, as_rule, register_rule
    >>> @register_rule
    ... @dataclasses.dataclass(frozen=True, eq=False, repr=False)
    ... class SignClip(ClipRule):
    ...     norm: float
    ...     threshold = None
    ...
    ...     def initial_state(self):
    ...         return ()
    ...
    ...     def weights(self, norms, state):
    ...         usable = tf.math.is_finite(norms) & (norms >= 1e-30)
    ...         weights = self.norm / tf.where(usable, norms, 1.0)
    ...         return tf.where(usable, weights, tf.zeros_like(norms))
    ...
    ...     def sensitivity(self, state):
    ...         return tf.constant(self.norm, tf.float32)
    >>> as_rule({"class_name": "SignClip", "config": {"norm": 2.0}})
    SignClip(norm=2.0)
    """
    if not (isinstance(rule_class, type) and issubclass(rule_class, ClipRule)):
        raise ValueError(
            f"rule_class must be a subclass of ClipRule, got {shown(rule_class)}."
        )
    name = rule_class.__name__
    registered = REGISTERED.clip_rules.get(name)
    # The same class made again, by a notebook's cell or a reload, replaces the first.
    if registered is not None and _home(registered) != _home(rule_class):
        raise ValueError(
            f"rule_class is called {name}, and so is the registered class "
            f"{registered.__module__}.{registered.__qualname__}: a saved rule would be "
            "loaded as the wrong class: choose another name."
        )
    REGISTERED.clip_rules[name] = rule_class
    return rule_class


def registered_rules() -> dict[str, type[ClipRule]]:
    """The registered rule classes by name.

    >>> from tfdpclip.clipping import registered_rules
    >>> registered_rules()["FixedClip"].__module__
    'tfdpclip.clipping.rules'
    """
    return dict(REGISTERED.clip_rules)


def _home(rule_class: type[ClipRule]) -> tuple[str, str]:
    return rule_class.__module__, rule_class.__qualname__
