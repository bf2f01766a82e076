"""What the engine raises."""


class ExampleIsolationError(ValueError):
    """One example's data reaches another example's gradient.

    Clipping each example's gradient bounds the influence of that example only if no
    other example's gradient depends on it. Batch normalisation in training mode, a
    loss that compares the examples of a batch, and a transposed batch break this.
    """


class LossStructureError(ValueError):
    """The loss cannot be taken apart into one loss per example with certainty."""
