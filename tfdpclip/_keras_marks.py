"""What Keras writes into graphs, by which the engine knows its work again.

Names and attributes only: neither Keras nor a graph is needed to read this.
"""

from __future__ import annotations

#: The name scope in which losses are weighted and reduced.
WEIGHTED_LOSS = "weighted_loss"
#: The attribute of a function for which a faster kernel may stand in. Its value begins
#: with the kind of layer.
FUSED = "api_implements"
#: The names of a fused layer's weights among the inputs of its function.
FUSED_WEIGHTS = ("kernel", "recurrent_kernel", "bias")
#: The names of all its inputs, by the kind of layer; a mask may follow.
FUSED_INPUTS = {
    "lstm": ("inputs", "init_h", "init_c", *FUSED_WEIGHTS),
    "gru": ("inputs", "init_h", *FUSED_WEIGHTS),
}
#: How many outputs are the layer's: last, sequence, states, and a number.
FUSED_RESULTS = {"lstm": 5, "gru": 4}
