"""What the engine raises."""


class _Raisable(ValueError):
    # AutoGraph re-raises an error from traced code as the same type only if the type
    # is constructed exactly as Exception is; anything else becomes a StagingError.
    __init__ = Exception.__init__


class ExampleIsolationError(_Raisable):
    """One example's data reaches another example's gradient.

    Clipping each example's gradient bounds the influence of that example only if no
    other example's gradient depends on it. Batch normalisation in training mode, a
    loss that compares the examples of a batch, and a transposed batch break this.
    """


class LossStructureError(_Raisable):
    """The loss cannot be taken apart into one loss per example with certainty."""


class GradientMismatchError(_Raisable):
    """The engine's gradients are not those of an ordinary backward pass.

    A rule of this library, a converter of TensorFlow or a new version of a layer is
    wrong. Nothing was released.
    """
