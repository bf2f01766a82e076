"""Keras's own update rules in one pass through memory.

Keras writes SGD, momentum and Adam as three to a dozen operations on every variable.
TensorFlow has a single operation for each of these rules. For SGD, its result is equal
to the bit; for Adam, equal up to the rounding of 1 - beta. The saved time pays for part
of a private step's noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdpclip._variables import unwrapped
from tfdpclip.keras import _compat


def _fits(gradient: Any, variable: Any) -> bool:
    """Whether the variable is one dense tensor that an operation can write to."""
    return (
        isinstance(gradient, tf.Tensor)
        and isinstance(variable, tf.Variable)
        and gradient.dtype == variable.dtype
        and gradient.dtype in (tf.float32, tf.float64)
        and getattr(variable, "handle", None) is not None
    )


def _number(value, dtype):
    # Casting a Python number would round it to float32 first.
    if tf.is_tensor(value):
        return tf.cast(value, dtype)
    return tf.constant(value, dtype)


def _sgd_step(optimizer, gradient, variable) -> bool:
    dtype = variable.dtype
    rate = tf.cast(optimizer.learning_rate, dtype)
    momentum = optimizer.momentum
    if isinstance(momentum, (int, float)) and momentum == 0:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle, alpha=rate, delta=gradient
        )
        return True
    place = _compat.place_of(optimizer, variable)
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=optimizer.momentums[place].handle,
        lr=rate,
        grad=gradient,
        momentum=tf.cast(momentum, dtype),
        use_nesterov=bool(optimizer.nesterov),
    )
    return True


def _adam_step(optimizer, gradient, variable) -> bool:
    if optimizer.amsgrad:
        return False
    dtype = variable.dtype
    step = tf.cast(optimizer.iterations + 1, dtype)
    beta_1, beta_2 = (_number(b, dtype) for b in (optimizer.beta_1, optimizer.beta_2))
    place = _compat.place_of(optimizer, variable)
    first, second = _compat.moments_of(optimizer, place)
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=first.handle,
        v=second.handle,
        beta1_power=tf.pow(beta_1, step),
        beta2_power=tf.pow(beta_2, step),
        lr=tf.cast(optimizer.learning_rate, dtype),
        beta1=beta_1,
        beta2=beta_2,
        epsilon=_number(optimizer.epsilon, dtype),
        grad=gradient,
    )
    return True


# Only the exact classes: subclasses may have other rules.
_STEPS = {
    tf.keras.optimizers.SGD: _sgd_step,
    tf.keras.optimizers.Adam: _adam_step,
    tf.keras.optimizers.AdamW: _adam_step,
}


def fused_update_step(
    optimizer_class: type[tf.keras.optimizers.Optimizer],
) -> Callable | None:
    """An `update_step` for subclasses of `optimizer_class`, equal to its own rule.

    Returns:
      None if there is no single operation for the class. Where the operation does not
      apply (sparse gradients, half precision, AMSGrad), the class's own rule runs.
    """
    fused = _STEPS.get(optimizer_class)
    if fused is None:
        return None

    def update_step(self: Any, gradient: Any, variable: Any, *rate: Any) -> None:
        # Keras 3 passes the learning rate, too.
        variable = unwrapped(variable)
        if not (_fits(gradient, variable) and fused(self, gradient, variable)):
            optimizer_class.update_step(self, gradient, variable, *rate)

    return update_step
