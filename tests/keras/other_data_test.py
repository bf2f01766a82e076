"""A training step on data that fit did not draw for it is found."""

import math

import pytest
import tensorflow as tf

from tests.keras.watched import DELTA, private, small_data
from tfdpclip import sampling
from tfdpclip.accounting import PrivacyMismatchError
from tfdpclip.keras import PrivacyBudget

pytestmark = pytest.mark.unchecked


def _other_iterator():
    iterator = iter(tf.data.Dataset.from_tensor_slices(small_data()).repeat().batch(5))
    return lambda: next(iterator)


def _optional_element():
    data = tf.data.Dataset.from_tensor_slices(small_data()).repeat().batch(5)
    element = iter(data).get_next_as_optional()
    return element.get_value


def _new_iterator():
    x, y = small_data()

    def take():
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
        return next(iter(data))

    return take


def _reduced():
    x, y = small_data()

    def take():
        data = tf.data.Dataset.from_tensor_slices((x[:5], y[:5])).batch(5)
        return data.reduce((x[:5], y[:5]), lambda old, new: new)

    return take


class TestOtherData:
    """A training step that does not train on the data that fit drew for it."""

    def _fit(self, take, budget_options=None, checks="first", **options):
        class Model(tf.keras.Sequential):
            def train_step(self, data):
                return super().train_step(take())

        model = Model([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        model.compile(private(check_gradients=checks), "mse", **options)
        batches = sampling.Poisson(0.1).batches(small_data())
        sampled = batches if budget_options is None else batches.scheme
        budget = PrivacyBudget(
            math.inf, DELTA, sampled, "rdp", **(budget_options or {})
        )
        model.fit(batches, verbose=0, callbacks=[budget])
        return budget

    @pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}], ids=str)
    @pytest.mark.parametrize("make", [_other_iterator, _new_iterator])
    @pytest.mark.thinned(2)
    def test_is_found(self, make, options):
        with pytest.raises(PrivacyMismatchError, match="data that fit did not give"):
            self._fit(make(), **options)

    @pytest.mark.every_check
    @pytest.mark.parametrize("checks", ["first", "never"])
    def test_what_a_data_set_was_reduced_to_is_refused_before(self, checks):
        """The examples' axis is unknown, and there is no second batch."""
        with pytest.raises(Exception, match="Dataset.*is not known"):
            self._fit(_reduced(), checks=checks)

    def test_so_is_an_element_that_was_taken_before(self):
        with pytest.raises(PrivacyMismatchError, match="fit did not give.*Optional"):
            self._fit(_optional_element())

    def test_what_a_branch_keeps_for_its_gradient_is_no_data(self):
        class Depth(tf.keras.layers.Layer):
            def call(self, x):
                some = tf.random.uniform([]) < 0.9
                return tf.cond(some, lambda: tf.nn.dropout(x, 0.1), lambda: x)

            def compute_output_shape(self, shape):
                return shape

        dense = tf.keras.layers.Dense
        layers = [tf.keras.Input((2,)), dense(3), Depth(), dense(1)]
        model = tf.keras.Sequential(layers)
        batches = sampling.Poisson(0.1).batches(small_data())
        budget = PrivacyBudget(math.inf, DELTA, batches, "rdp")
        model.compile(private(), "mse", jit_compile=False)
        model.fit(batches, verbose=0, callbacks=[budget])
        assert budget.ledger.steps == 10

    def test_is_taken_on_trust_if_somebody_says_so(self):
        budget = self._fit(_other_iterator(), {"check_data": False})
        assert "were not observed" in str(budget.statement())
