"""A ledger counts every draw of a loop, and states what a loop did to the draws."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tfdpclip.accounting import PrivacyMismatchError

rng = np.random.default_rng(0)
X = rng.normal(size=(40, 3)).astype("float32")
Y = rng.normal(size=40).astype("float32")
BESIDE = "beside, or in the place of, its drawn element"


class Loop:
    """A model, its optimizer, and the private step of a loop."""

    def __init__(self, **options):
        self.dense = tf.keras.layers.Dense(1)
        self.dense.build((None, 3))
        self.optimizer = dpc.keras.DPSGD(
            0.1, clip=1.0, noise_multiplier=2.0, expected_batch_size=20
        )
        self.step = tf.function(self.train, **options)

    def train(self, x, y, w, scale=1.0):
        losses = tf.square(self.dense(x)[:, 0] - y) * scale
        self.optimizer.minimize(losses, self.dense.trainable_variables)


def trained(take, steps=2, data=None, scheme=None):
    """The ledger of a loop that calls `take` with every drawn element."""
    scheme = dpc.sampling.Poisson(0.5) if scheme is None else scheme
    batches = scheme.batches((X, Y) if data is None else data)
    ledger = dpc.accounting.Ledger(delta=1e-4)
    ledger.begin(noise_multiplier=2.0, sampling=batches)
    for element in batches.repeat().take(steps):
        with ledger.step():
            take(*element)
    return ledger


def lines(ledger, part):
    return [text for text in ledger.statement().assumptions if part in text]


def centred(x, y, w):
    return x - tf.reduce_mean(x, 0), y, w


def mixed(x, y, w):
    return 0.7 * x + 0.3 * tf.reverse(x, [0]), 0.7 * y + 0.3 * tf.reverse(y, [0]), w


def standardised(x, y, w):
    return x, (y - tf.reduce_mean(y)) / tf.math.reduce_std(y), w


def in_numpy(x, y, w):
    return x.numpy() - x.numpy().mean(0), y, w


def with_a_scalar(x, y, w):
    return x, y, w, 1 / tf.reduce_max(tf.abs(y))


CHANGES = [centred, mixed, standardised, in_numpy, with_a_scalar]


@pytest.mark.parametrize("change", CHANGES)
def test_a_batch_that_eager_code_changed_is_stated(change):
    step = Loop().step
    (text,) = lines(trained(lambda *e: step(*change(*e))), BESIDE)
    assert "each row was made of its own record" in text and "float32" in text


@pytest.mark.parametrize(
    "call",
    [
        lambda step, e: step(x=e[0], y=e[1], w=e[2]),
        lambda step, e: tf.function(lambda parts: step(*parts))(e),
        lambda step, e: step.get_concrete_function(*map(tf.TensorSpec.from_tensor, e))(
            *e
        ),
    ],
    ids=["by name", "as one argument", "concrete"],
)
@pytest.mark.parametrize("changed", [False, True])
def test_however_a_step_is_called(call, changed):
    step = Loop().step

    def take(*element):
        call(step, centred(*element) if changed else element)

    assert bool(lines(trained(take, steps=1), BESIDE)) == changed


@pytest.mark.slow
@pytest.mark.parametrize("changed", [False, True])
def test_compiled_steps_too(changed):
    step = Loop(jit_compile=True).step
    take = (lambda *e: step(*centred(*e))) if changed else step
    assert bool(lines(trained(take), BESIDE)) == changed


def test_the_drawn_tensors_themselves_need_no_line():
    step = Loop().step
    assert not lines(trained(step), BESIDE)
    assert not lines(trained(lambda x, y, w: step(x, y, w, 0.5)), BESIDE)


def test_a_later_ledger_has_no_line_of_an_earlier_loop():
    step = Loop().step
    assert lines(trained(lambda *e: step(*centred(*e))), BESIDE)
    assert not lines(trained(step), BESIDE)


def test_steps_that_run_eagerly_are_stated():
    with pytest.warns(UserWarning, match="Eager steps are slow"):
        ledger = trained(_eager_step(Loop()), steps=1)
    assert lines(ledger, "eager steps kept the records of a batch apart")


def _eager_step(loop):
    def step(x, y, w):
        loss = lambda: tf.square(loop.dense(centred(x, y, w)[0])[:, 0] - y)  # noqa: E731
        loop.optimizer.minimize(loss, loop.dense.trainable_variables)

    return step


@pytest.mark.parametrize("change", [centred, mixed, standardised])
def test_a_batch_that_a_function_around_the_step_changed_is_refused(change):
    """As in `fit`: the proof ends at the arguments of the function of the loss."""
    inner = Loop().step
    around = tf.function(lambda *element: inner(*change(*element)))
    with pytest.raises(PrivacyMismatchError, match="gets more than data.*mixed"):
        trained(around)


def test_functions_around_the_step_that_change_nothing_pass():
    inner = Loop().step
    around = tf.function(lambda x, y, w: inner(tf.cast(x, tf.float32), y / 2.0, w))
    assert not lines(trained(around), BESIDE)


# Draws that no step uses.


def skipping(left_out, steps=30, scheme=None, **options):
    """The ledger of a loop that leaves draws out; and how many it left out."""
    y = Y.copy()
    y[7] = 1000
    scheme = dpc.sampling.Poisson(0.5) if scheme is None else scheme
    batches = scheme.batches((X, y), **options)
    ledger = dpc.accounting.Ledger(delta=1e-4)
    ledger.begin(noise_multiplier=2.0, sampling=batches)
    step, skipped = Loop().step, 0
    for x, labels, w in batches.repeat().take(steps):
        if left_out(labels, w):
            skipped += 1
            continue
        with ledger.step():
            step(x, labels, w)
    return ledger, skipped


def by_content(y, w):
    return tf.reduce_max(tf.abs(y)) > 100


def test_a_draw_that_is_left_out_by_its_content_counts():
    """The number of steps tells whether the record was there."""
    ledger, skipped = skipping(by_content)
    assert 0 < skipped < 30
    statement = ledger.statement()
    assert statement.steps == 30 and ledger.epsilon() == statement.epsilon
    full = dpc.accounting.epsilon(
        2.0, 30, dpc.sampling.Poisson(0.5), delta=1e-4, unit="example"
    )
    assert statement.epsilon == pytest.approx(full, rel=1e-6)
    (text,) = lines(ledger, "left out for public reasons")
    assert f"the {skipped} draws" in text


def test_draws_that_were_all_left_out_count_before_any_step():
    ledger, skipped = skipping(lambda y, w: True, steps=4)
    assert skipped == 4 and ledger.statement().steps == 4
    assert ledger.epsilon() > 0


def test_a_loop_that_uses_all_draws_has_no_further_step():
    ledger, _ = skipping(lambda y, w: False, steps=5)
    assert ledger.statement().steps == ledger.steps == 5
    assert not lines(ledger, "left out") and not ledger.reserved


def test_an_element_at_hand_is_not_counted_twice():
    """Elements that a loop fetches ahead reserve the steps that then use them."""
    batches = dpc.sampling.Poisson(0.5).batches((X, Y))
    ledger = dpc.accounting.Ledger(delta=1e-4)
    ledger.begin(noise_multiplier=2.0, sampling=batches)
    step, elements = Loop().step, list(batches.repeat().take(3))
    assert ledger.statement().steps == 3
    for number in range(3):
        with ledger.step():
            step(*elements[number])
        assert (ledger.steps, ledger.reserved) == (number + 1, 2 - number)
    assert ledger.statement().steps == 3


def test_a_phase_for_each_step_counts_each_draw_once():
    """A schedule of the noise begins a phase with the number of every step."""
    batches = dpc.sampling.Poisson(0.5).batches((X, Y))
    ledger = dpc.accounting.Ledger(delta=1e-4)
    step = Loop().step
    for number, element in enumerate(batches.repeat().take(6)):
        if number == 3:
            continue
        ledger.begin(
            noise_multiplier=2.0 - 0.01 * number, sampling=batches, change=number > 0
        )
        with ledger.step():
            step(*element)
    # Of the draws before the first phase none counts but the one that it used.
    assert ledger.statement().steps == 6
    assert lines(ledger, "the 1 draws that the loop took")


def test_draws_before_the_phase_and_of_other_batches_do_not_count():
    batches = dpc.sampling.Poisson(0.5).batches((X, Y))
    next(iter(batches))
    ledger = dpc.accounting.Ledger(delta=1e-4)
    ledger.begin(noise_multiplier=2.0, sampling=batches)
    next(iter(dpc.sampling.Poisson(0.5).batches((X, Y))))
    assert ledger.reserved == 0 and ledger.epsilon() == 0


def test_a_phase_that_begins_with_a_scheme_counts_the_draws_that_it_uses():
    scheme = dpc.sampling.Poisson(0.5)
    batches = scheme.batches((X, Y))
    ledger = dpc.accounting.Ledger(delta=1e-4)
    ledger.begin(noise_multiplier=2.0, sampling=batches.scheme)
    step = Loop().step
    for number, element in enumerate(batches.repeat().take(5)):
        if number in (1, 4):
            continue
        with ledger.step():
            step(*element)
    assert ledger.statement().steps == 5


def test_steps_of_several_elements_count_once():
    options = dict(accumulation_steps=2)
    batches = dpc.sampling.Poisson(0.5).batches((X, Y), **options)
    ledger = dpc.accounting.Ledger(delta=1e-4)
    ledger.begin(noise_multiplier=2.0, sampling=batches)
    iterator = iter(batches.repeat())
    for _ in range(6):
        next(iterator)
    assert ledger.statement().steps == 3


def test_a_reserved_draw_is_in_the_file(tmp_path):
    """A process that ends in a step has counted the draws before it."""
    path = tmp_path / "ledger.json"
    batches = dpc.sampling.Poisson(0.5).batches((X, Y))
    ledger = dpc.accounting.Ledger(delta=1e-4, path=path)
    ledger.begin(noise_multiplier=2.0, sampling=batches)
    step, iterator = Loop().step, iter(batches.repeat())
    next(iterator)
    element = next(iterator)
    with ledger.step():
        step(*element)
        assert dpc.accounting.Ledger.load(path).steps == 2
    assert dpc.accounting.Ledger.load(path).steps == 2
