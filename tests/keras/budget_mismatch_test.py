"""PrivacyBudget refuses to train on data that the accounting does not cover."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.counted import DELTA, RECORDS, Optimizer, model_of, poisson, small_data
from tests.stack import KERAS_3
from tfdpclip import sampling
from tfdpclip.accounting import Ledger, PrivacyMismatchError
from tfdpclip.keras import DPSGD
from tfdpclip.keras.privacy_budget import PrivacyBudget

pytestmark = pytest.mark.unchecked


class TestMismatchIsRefused:
    """Each way to train on data that the accounting does not cover."""

    def _assert_refused(self, data, budget, match, optimizer=None, **fit_options):
        model = model_of(optimizer or Optimizer())
        with pytest.raises(PrivacyMismatchError, match=match):
            model.fit(data, verbose=0, callbacks=[budget], **fit_options)
        # Caught before or right after the first execution.
        assert model.optimizer.iterations.numpy() <= 1

    def test_arrays(self):
        x, y = small_data()
        model = model_of(Optimizer())
        budget = PrivacyBudget(math.inf, DELTA, sampling.Poisson(0.1234))
        with pytest.raises(PrivacyMismatchError, match="fit gets other data"):
            model.fit(x, y, verbose=0, callbacks=[budget])

    def test_arrays_while_batches_exist(self):
        batches = poisson()
        x, y = small_data()
        model = model_of(Optimizer())
        with pytest.raises(PrivacyMismatchError, match="drawn by something else"):
            model.fit(
                x,
                y,
                batch_size=10,
                verbose=0,
                callbacks=[PrivacyBudget(math.inf, DELTA, batches)],
            )
        assert model.optimizer.iterations.numpy() == 0
        assert batches._drawer.delivered == 0

    def test_another_rate(self):
        budget = PrivacyBudget(math.inf, DELTA, sampling.Poisson(0.017))
        self._assert_refused(poisson(0.1), budget, "fit gets other data")

    def test_another_rate_while_batches_exist(self):
        accounted = poisson(0.05)
        budget = PrivacyBudget(math.inf, DELTA, accounted)
        optimizer = Optimizer(expected_batch_size=5)
        self._assert_refused(poisson(0.1), budget, "Poisson, rate 0.1", optimizer)

    def test_batches_that_were_made_twice(self):
        budget = PrivacyBudget(math.inf, DELTA, poisson(0.1))
        self._assert_refused(poisson(0.1), budget, "another object than the batches")

    def test_another_scheme(self):
        shuffled = sampling.ShuffledEpochs(10, RECORDS).batches(small_data())
        budget = PrivacyBudget(math.inf, DELTA, poisson())
        self._assert_refused(shuffled, budget, "shuffled epochs")

    def test_other_batches_of_the_same_scheme(self):
        budget = PrivacyBudget(math.inf, DELTA, poisson())
        self._assert_refused(poisson(), budget, "drawn by")

    def test_reused_batches(self):
        batches = poisson()
        # Not by its own methods, which refuse this.
        replayed = tf.data.Dataset.cache(batches)
        for _ in replayed:
            pass
        budget = PrivacyBudget(math.inf, DELTA, batches)
        self._assert_refused(replayed, budget, "altered, reused or mixed")

    def test_batches_on_one_device_of_a_mirrored_strategy_name_the_line(self):
        strategy = tf.distribute.MirroredStrategy(["CPU:0"])
        for distribute in (False, True):
            batches = poisson()
            budget = PrivacyBudget(math.inf, DELTA, batches)
            with strategy.scope():
                model = model_of(Optimizer())
            data = batches.distribute(strategy) if distribute else batches
            options = dict(steps_per_epoch=2, verbose=0, callbacks=[budget])
            if distribute:
                model.fit(data, **options)
                continue
            with pytest.raises(PrivacyMismatchError, match=r"batches.distribute\(str"):
                model.fit(data, **options)

    def test_mixed_with_other_data(self):
        batches = poisson()
        other = tf.data.Dataset.cache(batches.take(1)).repeat(10)
        mixed = tf.data.Dataset.sample_from_datasets([batches, other], [0.5, 0.5])
        budget = PrivacyBudget(math.inf, DELTA, batches)
        self._assert_refused(mixed, budget, "altered, reused or mixed")

    @pytest.mark.thinned(4)
    @pytest.mark.parametrize(
        "alter",
        [
            lambda b: tf.data.Dataset.map(b, lambda x, y, w: (x[::-1] + x, y, w)),
            lambda b: tf.data.Dataset.map(b.take(5), lambda *e: e),
            lambda b: tf.data.Dataset.zip((b, b)).map(lambda first, other: first),
            lambda b: tf.data.Dataset.from_generator(
                lambda: iter(b), output_signature=b.element_spec
            ),
            lambda b: tf.data.Dataset.cache(b.take(3).prefetch(1)),
            lambda b: tf.data.Dataset.ignore_errors(b),
            lambda b: tf.data.Dataset.range(1).flat_map(lambda _: b),
        ],
    )
    def test_batches_that_were_altered(self, alter):
        batches = poisson()
        budget = PrivacyBudget(math.inf, DELTA, batches)
        self._assert_refused(alter(batches), budget, "drawn by")

    def test_a_generator(self):
        batches = poisson()

        def generate():
            for x, y, weights in batches:
                yield x[::-1], y, weights

        budget = PrivacyBudget(math.inf, DELTA, batches)
        self._assert_refused(generate(), budget, "drawn by something else")

    def test_another_optimizer_in_the_middle(self):
        batches = poisson()

        class Swap(tf.keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.optimizer = Optimizer()

        model = model_of(Optimizer())
        budget = PrivacyBudget(math.inf, DELTA, batches)
        with pytest.raises(PrivacyMismatchError, match="optimizer was replaced"):
            model.fit(batches, verbose=0, callbacks=[budget, Swap()])

    def test_other_accumulation(self):
        batches = poisson(accumulation_steps=2)
        budget = PrivacyBudget(math.inf, DELTA, batches)
        self._assert_refused(batches, budget, "accumulation_steps = 2, the optimizer 1")

    def test_other_expected_batch_size(self):
        batches = poisson()
        budget = PrivacyBudget(math.inf, DELTA, batches)
        optimizer = Optimizer(expected_batch_size=50)
        self._assert_refused(batches, budget, "expected_batch_size is 50", optimizer)

    def test_a_step_begun_earlier(self):
        batches = poisson(accumulation_steps=3)
        optimizer = Optimizer(accumulation_steps=3)
        optimizer._seen.assign(1)
        budget = PrivacyBudget(math.inf, DELTA, batches)
        self._assert_refused(batches, budget, "in the middle of a step", optimizer)

    def test_regrouping(self):
        batches = poisson()
        for change in (
            lambda b: b.shuffle(10),
            lambda b: b.cache(),
            lambda b: b.unbatch(),
            lambda b: b.batch(2),
            lambda b: b.filter(lambda *_: True),
        ):
            with pytest.raises(ValueError, match="which records meet"):
                change(batches)

    def test_declared_data_are_said_to_be(self):
        x, y = small_data()
        budget = PrivacyBudget(math.inf, DELTA, sampling.Poisson(0.1), check_data=False)
        model_of(Optimizer()).fit(x, y, batch_size=10, verbose=0, callbacks=[budget])
        assert "draws were not observed" in str(budget.statement())

    @pytest.mark.parametrize("jit", [False, True])
    def test_declared_data_train_while_an_element_of_a_draw_is_at_hand(self, jit):
        """The element that a user looked at is no element of the data of `fit`."""
        element = next(iter(poisson()))
        x, y = small_data()
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
        budget = PrivacyBudget(math.inf, DELTA, sampling.Poisson(0.1), check_data=False)
        private = DPSGD(0.1, noise_multiplier=2.0, expected_batch_size=10)
        model = model_of(private, jit_compile=jit)
        model.fit(data, verbose=0, callbacks=[budget])
        assert budget.ledger.steps == len(data)
        assert len(element[0])


@pytest.mark.parametrize(
    "data",
    [
        lambda b: b.map(lambda x, y: (2 * x, y)).prefetch(2),
        lambda b: b.prefetch(2).map(lambda x, y: (2 * x, y)).with_options(
            tf.data.Options()
        ),
        lambda b: b.apply(lambda d: d.repeat().take(10)),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_transforming_records_is_fine(data):
    batches = poisson()
    budget = PrivacyBudget(math.inf, DELTA, batches)
    model_of(Optimizer()).fit(data(batches), epochs=2, verbose=0, callbacks=[budget])
    assert budget.ledger.steps == 20
    assert "transformed" not in str(budget.statement())


@pytest.mark.slow
def test_transforming_whole_batches_is_an_assumption(tmp_path):
    batches = poisson()

    def double(x, y):
        return 2 * x, y

    path = tmp_path / "privacy.json"
    budget = PrivacyBudget(math.inf, DELTA, batches, ledger=path)
    data = batches.map_batches(double).repeat().map(lambda x, y: (x, y))
    model = model_of(Optimizer())
    model.fit(data, epochs=2, steps_per_epoch=5, verbose=0, callbacks=[budget])
    assert "batches were transformed by double, which is assumed" in str(
        budget.statement()
    )
    assert "transformed by double" in str(Ledger.load(path).statement())


def test_class_weights_are_fine():
    x, y = small_data()
    batches = sampling.Poisson(0.1).batches((x, (y[:, 0] > 0.5).astype(np.int32)))
    budget = PrivacyBudget(math.inf, DELTA, batches)
    model_of(Optimizer()).fit(
        batches, verbose=0, callbacks=[budget], class_weight={0: 0.5, 1: 2.0}
    )
    assert budget.ledger.steps == 10


def test_validation_batches_do_not_confuse():
    batches, held_out = poisson(), poisson()
    budget = PrivacyBudget(math.inf, DELTA, batches)
    model_of(Optimizer()).fit(
        batches, validation_data=held_out, epochs=2, verbose=0, callbacks=[budget]
    )
    assert budget.ledger.steps == 20


@pytest.mark.skipif(not KERAS_3, reason="Keras 3 has unrolled executions")
def test_unrolled_executions_are_refused():
    batches, model = poisson(), model_of(Optimizer())
    model.unrolled_steps_per_execution = 2
    with pytest.raises(ValueError, match="unrolled_steps_per_execution"):
        model.fit(
            batches, verbose=0, callbacks=[PrivacyBudget(math.inf, DELTA, batches)]
        )
