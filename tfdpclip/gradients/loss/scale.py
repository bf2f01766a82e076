"""Public factors of a loss."""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass
class Scale:
    """A public factor, kept as numerators and denominators so that B / B is 1.

    Attributes:
      times: the numerators.
      over: the denominators.
      sign: 1 or -1.
      power: the factor's power of the batch size B: -1 for a mean, 0 for a sum.
      given: the caller's own constants, (factor, whether it divides), in which a
        static batch size may hide.
    """

    times: tuple[tf.Tensor, ...] = ()
    over: tuple[tf.Tensor, ...] = ()
    sign: float = 1.0
    power: int = 0
    given: tuple[tuple[tf.Tensor, bool], ...] = ()

    def multiply(self, factor: tf.Tensor, power: int) -> Scale:
        return dataclasses.replace(
            self,
            times=(*self.times, factor),
            power=self.power + power,
            given=(*self.given, (factor, False)),
        )

    def divide(self, factor: tf.Tensor, power: int, counted: bool = False) -> Scale:
        given = () if counted else ((factor, True),)
        return dataclasses.replace(
            self,
            over=(*self.over, factor),
            power=self.power - power,
            given=(*self.given, *given),
        )

    def negate(self) -> Scale:
        return dataclasses.replace(self, sign=-self.sign)

    def stopped_after(self, first: Scale) -> Scale:
        """The same, without gradients of the factors that `first` did not have."""

        def stopped(factors, known):
            return (*known, *map(tf.stop_gradient, factors[len(known) :]))

        times, over = stopped(self.times, first.times), stopped(self.over, first.over)
        return dataclasses.replace(self, times=times, over=over)

    def value(self, first: tf.Tensor | None = None) -> tf.Tensor:
        top = tf.constant(self.sign, tf.float32)
        if first is not None:
            top *= tf.cast(first, tf.float32)
        for factor in self.times:
            top *= tf.cast(factor, tf.float32)
        for factor in self.over:
            top /= tf.cast(factor, tf.float32)
        return top
