"""The exceptions of the engine."""


class _Raisable(ValueError):
    # AutoGraph re-raises an error from traced code as the same type only if the type
    # is constructed exactly as Exception is; anything else becomes a StagingError.
    __init__ = Exception.__init__
    # is constructed exactly as Exception is; a changed constructor gives StagingError.


class ExampleIsolationError(_Raisable):
    """The data of an example reach the gradients of further examples.

    Clipping each example's gradient bounds the influence of that example only if the
    gradients of all remaining examples do not depend on it. Batch normalisation in
    training mode, a loss that compares the examples of a batch, and a transposed batch
    break this.
    """


class LossStructureError(_Raisable):
    """The loss cannot be taken apart into a loss for each example with certainty."""


class GradientMismatchError(_Raisable):
    """The engine's gradients differ from an ordinary backward pass.

    A rule of this library, a converter of TensorFlow or a new version of a layer is
    wrong. Nothing was released.
    """
