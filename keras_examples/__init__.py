"""Private training of Keras models, one command line program per experiment."""

# Before TensorFlow: it decides what TensorFlow logs.
import driver_kit
