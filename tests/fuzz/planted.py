"""Bugs that the fuzzer must find, planted in the library while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from unittest import mock

import tensorflow as tf

from tests.fuzz import steps
from tests.fuzz.steps import Step
from tfdpclip.gradients import engine
from tfdpclip.gradients.proof import isolation_proof
from tfdpclip.gradients.rules.combine import VariableGradient
from tfdpclip.kernel import limits


def _small_norms():
    real = VariableGradient.measured

    def wrong(self, budget):
        found = real(self, budget)
        return dataclasses.replace(found, squared_norms=0.81 * found.squared_norms)

    return mock.patch.object(VariableGradient, "measured", wrong)


def _wrong_sums():
    real = VariableGradient.measured

    def wrong(self, budget):
        found = real(self, budget)
        if not len(self.variable.shape):
            return found

        def reverse(*args):
            return tf.reverse(found.weighted_sum(*args), [0])

        return dataclasses.replace(found, weighted_sum=reverse)

    return mock.patch.object(VariableGradient, "measured", wrong)


def _without_check():
    return mock.patch.object(Step, "options", {"check_gradients": "never"})


def _without_proof():
    """Every loss counts as proven to keep its examples apart."""
    proven = isolation_proof.Proof(isolation_proof.Verdict.PROVEN)
    return mock.patch.object(engine, "prove", lambda losses, flows: proven)


def _unclipped():
    def wrong(rule, norms, state):
        return tf.ones_like(norms)

    return mock.patch.object(limits, "weights_of", wrong)


def _foreign_error():
    def wrong(*args, **kwargs):
        raise ValueError("Inputs to operation AddN must have the same size and shape")

    return mock.patch.object(steps, "PerExampleGradients", wrong)


def _death():
    return mock.patch.object(Step, "__call__", lambda *args: os.abort())


def _sleep():
    return mock.patch.object(Step, "__call__", lambda *args: time.sleep(600))


def _both(plant):
    """Also switches off the library's own checks, which would find the bug first."""

    @contextlib.contextmanager
    def context():
        with _without_check(), plant():
            yield

    return context


BUGS = {
    "small norms": _both(_small_norms),
    "wrong sums": _both(_wrong_sums),
    "no proof": _both(_without_proof),
    "unclipped": _both(_unclipped),
    "foreign error": _foreign_error,
    "death": _death,
    "sleep": _sleep,
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """With a bug of `BUGS` in the library; with none, if `name` is empty."""
    with BUGS[name]() if name else contextlib.nullcontext():
        yield
