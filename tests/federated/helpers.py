"""Helpers of the federated tests."""

import collections

import numpy as np
import tensorflow_federated as tff

NESTED = tff.to_type(
    collections.OrderedDict(
        kernel=(np.float32, [3, 2]),
        rest=[(np.float32, [4]), collections.OrderedDict(scale=np.float32)],
    )
)


def vector_type(size, dtype=np.float32):
    return tff.TensorType(dtype, [size])


def nested(vector):
    """An update of type `NESTED` with these 11 coordinates."""
    vector = np.asarray(vector, np.float32)
    return collections.OrderedDict(
        kernel=vector[:6].reshape(3, 2),
        rest=[vector[6:10], collections.OrderedDict(scale=vector[10])],
    )


def flat(value):
    """All coordinates of a structure, as float64."""
    parts = tff.structure.flatten(tff.structure.from_container(value, recursive=True))
    return np.concatenate([np.ravel(np.asarray(p, np.float64)) for p in parts])


def updates(rng, clients, size, scale=1.0):
    """Updates of various norms."""
    norms = scale * np.exp(rng.normal(size=(clients, 1)))
    x = rng.normal(size=(clients, size))
    x *= norms / np.linalg.norm(x, axis=1, keepdims=True)
    return list(x.astype(np.float32))
