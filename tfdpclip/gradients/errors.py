"""The exceptions of the engine."""

from tfdpclip._docs import TracedError


class ExampleIsolationError(TracedError):
    """The data of an example reach the gradients of further examples.

    Clipping each example's gradient bounds the influence of that example only if the
    gradients of all remaining examples do not depend on it. Batch normalisation in
    training mode, a loss that compares the examples of a batch, and a transposed batch
    break this.
    """


class LossStructureError(TracedError):
    """The loss cannot be taken apart into a loss for each example with certainty."""


class GradientMismatchError(TracedError):
    """The engine's gradients differ from an ordinary backward pass.

    A rule of this library, a converter of TensorFlow or a new version of a layer is
    wrong. Nothing was released.
    """
