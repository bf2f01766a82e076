"""Noise: from random bits to what is added to a sum, in the order of these modules.

A number of noise travels like this:

1. `philox`: words of a generator whose key and counter are given in full, and seeds for
   several purposes, of which no bit is lost. The engine and federated rounds draw from
   it by seed.
2. `threefry`: two of its words are a key, under which one compiled loop makes words,
   transforms and scales them: a large draw.
3. `gaussian`: `GaussianNoise` has the state, from the operating system's entropy, and
   moves it on with every draw. It makes small draws itself (`box_muller`), large ones
   by `threefry`. With independent noise the journey ends here.
4. `runs`: `CorrelatedNoise` is what a user asks for instead: a matrix of
   `tfdpclip.correlated`, for how many steps, of records that are drawn how. It has the
   sensitivity.
5. `steps`: one step of such a matrix in a graph. `advance` makes its noise of fresh
   draws and of what the steps before left, and moves that on.
6. What is left is kept in one of two ways, and is as secret as the data:
   `kept`: `MatrixNoise` has variables, on every replica its own, for Keras; it can give
   a secret away, to go on from in another process.
   `carried`: `CarriedNoise` is handed it and hands it on, for federated rounds, whose
   only memory is the server's state; `split_noise` takes it out of there.

`GaussianNoise`, `MatrixNoise` and `CarriedNoise` have `sample_all`, which is all that
`tfdpclip.mechanism` asks of noise. `tfdpclip.correlated` has the mathematics of
matrices, without TensorFlow, and tells what they cost.

Importing this package loads the first three modules alone: the engine needs no more.
"""

from tfdpclip.noise.gaussian import GaussianNoise, box_muller

__all__ = ["GaussianNoise", "box_muller"]
