"""Noise: from random bits to the noise on a sum, in the order of these modules.

1. `philox`: words of a generator with a fully given key and counter, and seeds for
   several purposes, of which no bit is lost. The engine and federated rounds draw from
   `philox` by seed.
2. `threefry`: two words of `philox` are a key, under which a compiled loop makes words,
   transforms and scales them: a large draw.
3. `gaussian`: `GaussianNoise` has the state, from the operating system's entropy, and
   moves the state on with every draw. Small draws come from `box_muller`, large draws
   from `threefry`. Independent noise needs no further module.
4. `runs`: `CorrelatedNoise` is the user's alternative: a matrix of
   `tfdpclip.correlated`, the number of steps, and the scheme that draws the records. It
   has the sensitivity.
5. `steps`: a step of the matrix in a graph. `advance` makes the noise of the step from
   fresh draws and from the memory of earlier steps, and moves the memory on.
6. The memory is as secret as the data, and is held in two ways.
   `kept`: `MatrixNoise` has variables, its own on every replica, for Keras; it can
   return a secret, from which another process continues.
   `carried`: `CarriedNoise` gets the memory as a tensor and makes the next memory, for
   federated rounds, where the server's state is the only memory; `split_noise` takes
   the memory out of the state.

`GaussianNoise`, `MatrixNoise` and `CarriedNoise` have `sample_all`, the only method
that `tfdpclip.mechanism` needs. `tfdpclip.correlated` has the mathematics of matrices,
without TensorFlow, and their cost.

Importing this package loads only the first three modules, as the engine needs no more.
"""

from tfdpclip.noise.gaussian import GaussianNoise, box_muller

__all__ = ["GaussianNoise", "box_muller"]
