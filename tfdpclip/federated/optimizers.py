"""Server optimizers of Algorithm 1."""

from __future__ import annotations

from typing import Any

from tfdpclip import _arguments
from tfdpclip.federated import _tff


def server_momentum(
    learning_rate: float, momentum: float = 0.9, *, damped: bool = False
) -> Any:
    """Gradient descent with momentum, for the server's step.

    Two conventions differ by a factor 1 / (1 - momentum), 10 at 0.9:

    * undamped, as TensorFlow Federated and the code behind Andrew et al. (2021) have
      it: ``v = momentum * v + update``;
    * damped, as Algorithm 1 prints it: ``v = momentum * v + (1 - momentum) * update``.

    Both step by ``learning_rate * v``. The rates of Table 1 there belong, it seems, to
    the undamped one. Momentum accumulates what has been noised already, so it costs no
    privacy.

    Args:
      learning_rate: the step, above 0.
      momentum: from 0 to below 1.
      damped: which convention.

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
        # The damped accumulator is 1 - momentum times the undamped one.
        learning_rate *= 1 - momentum
    return _tff.build_sgdm(learning_rate, momentum)
