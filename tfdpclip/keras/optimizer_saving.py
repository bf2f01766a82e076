"""What of a private optimizer goes into checkpoints and files.

Its variables, as Keras saves them, and the history of its steps. Never the noise, and
nothing that the optimizer keeps in `_transient`.
"""

from __future__ import annotations

import warnings

from tfdpclip.keras.optimizer_variables import OptimizerVariables


class OptimizerSaving(OptimizerVariables):
    """Saves and restores a private optimizer, with the steps behind its state."""

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        if save_type == "savedmodel" and int(self.iterations.numpy()) > 0:
            warnings.warn(
                "Keras does not read an optimizer's state back from a SavedModel: the "
                "clip norm would start afresh, and the number of steps from 0, so that "
                "the privacy spent would be counted too low. Save to a .keras file, or "
                "use tf.train.Checkpoint.",
                stacklevel=2,
            )
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel":
            children.pop("_step_history", None)
        return children

    def save_own_variables(self, store):
        """Saves the state, and which steps are behind it."""
        super().save_own_variables(store)
        store["step_history"] = self._step_history.to_array()

    def load_own_variables(self, store):
        """Loads the state, and which steps are behind it."""
        names = [name for name in store.keys() if name != "step_history"]
        super().load_own_variables({name: store[name] for name in names})
        # Also where Keras left the variables as they were, with a warning (an optimizer
        # that is not built, or another one): the model's weights are the file's.
        if "step_history" in store.keys():
            self._step_history.from_array(store["step_history"])
