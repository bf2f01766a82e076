"""Private training of Keras models, one command line program per experiment."""

# This import comes before TensorFlow's, because it sets what TensorFlow logs.
from driver_kit import lazy

__getattr__ = lazy.submodules(__name__)
