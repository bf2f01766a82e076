"""The least time of aggregations of this kind: not private, for `federated_worker`.

`Product` measures each update and multiplies it by a number, without noise or a rule:
the floor for clipping at a client. `ModularSum` sends updates as integers into a sum
modulo 2^24 and reads them again, without clipping, rotation, rounding or noise: the
floor for distributed noise.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

_BITS = 24


class _Floor(tff.aggregators.UnweightedAggregationFactory):
    """A mean without a state.

    Args:
      clients: the divisor of the sum.
    """

    def __init__(self, clients: int):
        self._clients = clients

    def create(self, value_type):
        shapes = [tuple(leaf.shape) for leaf in tff.structure.flatten(value_type)]

        @tff.tensorflow.computation(value_type)
        def encode(value):
            return self.encode(tf.nest.flatten(list(value)))

        @tff.tensorflow.computation(encode.type_signature.result)
        def decode(summed):
            return self.decode(summed, shapes)

        @tff.federated_computation
        def initialize():
            return tff.federated_value((), tff.SERVER)

        @tff.federated_computation(
            initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_round(state, value):
            summed = self.sum(tff.federated_map(encode, value))
            result = tff.federated_map(decode, summed)
            nothing = tff.federated_value((), tff.SERVER)
            return tff.templates.MeasuredProcessOutput(state, result, nothing)

        return tff.templates.AggregationProcess(initialize, next_round)


class Product(_Floor):
    """Norm, product, sum."""

    def encode(self, leaves):
        squares = tf.add_n([tf.nn.l2_loss(leaf) for leaf in leaves])
        factor = tf.minimum(1.0, 0.1 * tf.math.rsqrt(2 * squares))
        return [leaf * factor for leaf in leaves]

    def sum(self, encoded):
        return tff.federated_sum(encoded)

    def decode(self, summed, shapes):
        return [part / self._clients for part in summed]


class ModularSum(_Floor):
    """A vector of a power of 2 of integers, and their sum modulo 2^24."""

    def encode(self, leaves):
        parts = [tf.reshape(leaf, [-1]) for leaf in leaves]
        size = sum(int(part.shape[0]) for part in parts)
        padding = 2 ** math.ceil(math.log2(size)) - size
        return tf.cast(tf.concat([*parts, tf.zeros([padding])], 0), tf.int32)

    def sum(self, encoded):
        modulus = np.int32(2**_BITS)
        return tff.backends.mapreduce.federated_secure_modular_sum(encoded, modulus)

    def decode(self, summed, shapes):
        sizes = [math.prod(shape) for shape in shapes]
        vector = tf.cast(summed, tf.float32)[: sum(sizes)] / self._clients
        parts = tf.split(vector, sizes)
        return [tf.reshape(x, s) for x, s in zip(parts, shapes, strict=True)]
