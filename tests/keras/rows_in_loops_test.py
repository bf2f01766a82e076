"""Custom training loops: which rows are records, and a private step for each draw."""

import gc
import itertools

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tfdpclip import accounting, sampling
from tfdpclip.accounting import PrivacyMismatchError

pytestmark = pytest.mark.unchecked
RECORDS, SIZE = 60, 6.0
RATE = SIZE / RECORDS


class Counting:
    """A private step; the gradient of each loss by the bias is 1."""

    def __init__(self):
        self.dense = tf.keras.layers.Dense(1, bias_initializer="ones")
        self.dense.build((None, 3))
        self.optimizer = dpc.keras.DPSGD(
            1.0,
            clip=dpc.FixedClip(1.0),
            noise_multiplier=0.0,
            expected_batch_size=SIZE,
        )

    def losses(self, x):
        return tf.reduce_mean(self.dense(x), axis=-1)

    @tf.autograph.experimental.do_not_convert
    def take_step(self, x, tape=None, times=1.0, tensors=None):
        loss = self.losses(x) * times if tensors is None else tensors
        self.optimizer.minimize(loss, self.dense.trainable_variables, tape=tape)

    @property
    def moved(self):
        """How many records moved the bias."""
        return float((1.0 - self.dense.bias.numpy()[0]) * SIZE)


def batches(scheme=None, seed=3, **options):
    scheme = sampling.Poisson(RATE) if scheme is None else scheme
    x = np.zeros((RECORDS, 3), np.float32)
    return scheme.batches((x, np.arange(RECORDS) % 2), seed=seed, **options)


def drawn():
    return sum(int(np.sum(w)) for *_, w in batches())


@pytest.fixture(autouse=True)
def _nothing_is_held():
    """Frees the elements that earlier failures in this process may hold."""
    gc.collect()


def whole(step, **options):
    """A function of whole elements, with a loss that leaves the weights out."""
    made = tf.function(lambda x, y, w: step.take_step(x), **options)
    for element in batches():
        made(*element)


def without_weights(step, **options):
    made = tf.function(lambda x, y: step.take_step(x), **options)
    for x, y, _ in batches():
        made(x, y)


def class_weights(step):
    """Made outside of the step, and given in the place of the weights."""
    made = tf.function(lambda x, y, w: step.take_step(x, times=w))
    for x, y, _ in batches():
        made(x, y, tf.gather([1.0, 3.0], tf.cast(y, tf.int32)))


def gathered_ahead(step):
    made = tf.function(lambda x, y, w: step.take_step(x))
    elements = list(batches())
    for element in elements:
        made(*element)


def another_held(step):
    first = next(iter(batches(seed=5)))
    whole(step)
    del first


def made_of_elements(step):
    """The element does not exist any more when the step is called."""
    made = tf.function(lambda x: step.take_step(x))
    iterator = iter(batches())

    def given():
        x, _, _ = next(iterator)
        return x + 1.0 - 1.0

    for _ in range(10):
        made(given())


def left_out(step):
    made = tf.function(lambda x: step.take_step(x), reduce_retracing=True)
    for x, _, w in batches():
        made(x[w > 0])


def in_a_loop_over_the_batches(step):
    @tf.function
    def train(data):
        for x, _, _ in data:
            step.take_step(x)

    train(batches())


def in_a_loop_over_an_iterator(step):
    @tf.function
    def train(iterator):
        for _ in tf.range(10):
            x, _, _ = next(iterator)
            step.take_step(x)

    train(iter(batches()))


def in_an_inner_function(step):
    # Computed outside of `inner`, the weights would be refused, as in `fit`.
    inner = tf.function(lambda x, y: step.take_step(x, times=tf.gather([1.0, 3.0], y)))

    @tf.function
    def train(iterator):
        for _ in tf.range(10):
            x, y, _ = next(iterator)
            inner(x, tf.cast(y, tf.int32))

    train(iter(batches()))


def in_a_function_within_a_loop(step):
    inner = tf.function(lambda x: step.take_step(x))

    @tf.function
    def outer(x):
        for _ in tf.range(1):
            inner(x)

    for x, _, _ in batches():
        outer(x)


def in_a_branch(step):
    @tf.function
    def made(x):
        if public > 0:  # A choice by the batch would be refused.
            step.take_step(x)

    public = tf.Variable(1, trainable=False)
    for x, _, _ in batches():
        made(x)


def eagerly(step):
    for x, _, _ in batches():
        with tf.GradientTape(persistent=True) as tape:
            losses = step.losses(x)
        step.take_step(None, tape=tape, tensors=losses)


LOOPS = [
    whole,
    without_weights,
    class_weights,
    gathered_ahead,
    another_held,
    made_of_elements,
    left_out,
    in_a_loop_over_the_batches,
    in_a_loop_over_an_iterator,
    in_an_inner_function,
    in_a_function_within_a_loop,
    in_a_branch,
    eagerly,
]


@pytest.mark.filterwarnings("ignore:Eager steps")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.thinned(4)
def test_only_records_move_the_sum_of_a_loop(loop):
    step = Counting()
    loop(step)
    assert step.moved == pytest.approx(drawn(), abs=1e-3)


@pytest.mark.parametrize("loop", [whole, without_weights])
@pytest.mark.slow
def test_nor_of_a_loop_that_is_compiled(loop):
    step = Counting()
    loop(step, jit_compile=True)
    assert step.moved == pytest.approx(drawn(), abs=1e-3)


def test_which_of_several_elements_a_step_is_of_must_be_told():
    step = Counting()
    made = tf.function(lambda x: step.take_step(x))
    elements = list(batches())
    with pytest.raises(PrivacyMismatchError, match=r"def step\(x, y, w\)"):
        made(elements[0][0])
    assert step.moved == 0


def test_an_element_that_is_given_twice_over_is_refused():
    step = Counting()
    made = tf.function(lambda x: step.take_step(x))
    for x, _, _ in batches().take(1):
        with pytest.raises(PrivacyMismatchError, match="views=2"):
            made(tf.concat([x, x], axis=0))
    assert step.moved == 0


def parts(step, start, end, weights, outside=False, **options):
    """A step of some rows of the only element."""
    made = tf.function(lambda *element: step.take_step(element[0]), **options)
    whole = tf.function(lambda *element: made(*(t[start:end] for t in element)))
    for element in batches().take(1):
        if outside:
            whole(*element)
        else:
            made(*(t[start:end] for t in element[: 3 if weights else 1]))


REFUSED = (PrivacyMismatchError, tf.errors.InvalidArgumentError)


def number_of_first():
    return next(int(np.sum(w)) for *_, w in batches())


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("cut", [(0, 2), (0, -1), (13, None)])
def test_a_step_of_some_of_the_rows_is_refused(cut, weights):
    """A record less brings a further record in, or a row that fills up goes."""
    assert number_of_first() > 2
    step = Counting()
    if weights and cut == (0, -1):
        parts(step, *cut, weights)
        assert step.moved == pytest.approx(number_of_first(), abs=1e-3)
        return
    with pytest.raises(REFUSED, match="differ in their number of rows"):
        parts(step, *cut, weights)
    assert step.moved == 0


@pytest.mark.parametrize("how", ["within", "any_length", "eager"])
@pytest.mark.filterwarnings("ignore:Eager steps")
def test_however_the_step_is_called(how):
    step = Counting()
    # A function around the step that cuts the rows changes data, as far as it can know.
    said = "gets more than data" if how == "within" else "differ in their number"
    with pytest.raises(REFUSED, match=said):
        if how == "within":
            parts(step, 0, 2, True, outside=True)
        elif how == "any_length":
            signature = [tf.TensorSpec([None, 3])]
            parts(step, 0, 2, False, input_signature=signature)
        else:
            for x, _, _ in batches().take(1):
                with tf.GradientTape(persistent=True) as tape:
                    losses = step.losses(x[:2])
                step.take_step(None, tape=tape, tensors=losses)
    assert step.moved == 0


PICKED = {
    "in_another_order": lambda x, y, w: (x[::-1], y[::-1], w[::-1]),
    "with_other_weights": lambda x, y, w: (x, y, tf.ones_like(w)),
    "in_part": lambda x, y, w: (x[:2], y[:2], w[:2]),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("pick", PICKED.values(), ids=PICKED)
def test_a_counted_loop_ends_at_a_step_of_unknown_rows(pick, jit):
    step, drawn_batches = Counting(), batches()
    made = tf.function(lambda x, y, w: step.take_step(x), jit_compile=jit)
    ledger = accounting.Ledger(delta=1e-5)
    ledger.begin(noise_multiplier=0.0, sampling=drawn_batches)
    held = list(drawn_batches)  # Several elements: the weights tell them apart.
    with pytest.raises(REFUSED, match="rows"), ledger.step():
        made(*pick(*held[0]))
    assert step.moved == 0
    if jit:  # The compiled step has run, and is counted; a sound step runs afterwards.
        assert ledger.steps == int(step.optimizer.iterations) == 1
        with ledger.step():
            made(*held[1])
        assert step.moved == pytest.approx(np.sum(held[1][2]), abs=1e-3)


@pytest.mark.parametrize("jit", [False, True])
def test_a_counted_loop_ends_at_a_step_with_a_changed_weight(jit):
    step, drawn_batches = Counting(), batches()
    step.dense.kernel.assign(np.ones([3, 1]))
    frozen = tf.Variable([1.0, 1.0, 1.0], trainable=False)
    made = tf.function(lambda x, y, w: step.take_step(x * frozen), jit_compile=jit)
    ledger = accounting.Ledger(delta=1e-5)
    ledger.begin(noise_multiplier=0.0, sampling=drawn_batches)
    elements = iter(drawn_batches)
    with ledger.step():
        made(*next(elements))
    frozen.assign([2.0, 2.0, 2.0])
    errors = tf.errors.InvalidArgumentError, dpc.ExampleIsolationError
    with pytest.raises(errors, match="changed"), ledger.step():
        made(*next(elements))


def test_compiled_code_takes_no_part():
    step = Counting()
    with pytest.raises(REFUSED, match="differ in their number of rows"):
        parts(step, 0, 2, False, jit_compile=True)
    parts(step, 0, 2, True, jit_compile=True)
    assert step.moved == 0


@pytest.mark.parametrize("weights", [False, True])
def test_rows_that_are_given_again_are_refused(weights):
    step = Counting()
    made = tf.function(lambda *element: step.take_step(element[0]))
    for element in batches().take(1):
        more = [tf.concat([t, t[:1]], axis=0) for t in element]
        with pytest.raises(REFUSED, match="differ in their number of rows"):
            made(*more[: 3 if weights else 1])
    assert step.moved == 0


def test_rows_without_weight_may_be_added():
    step = Counting()
    made = tf.function(lambda x, y, w: step.take_step(x))
    for element in batches().take(1):
        made(*(tf.concat([t, tf.zeros_like(t[:3])], axis=0) for t in element))
    assert step.moved == pytest.approx(number_of_first(), abs=1e-3)


CUTS = {
    "halves": lambda e: [[t[:3] for t in e], [t[3:] for t in e]],
    "first": lambda e: [[t[:3] for t in e]],
    "again": lambda e: [[tf.concat([t, t[:1]], axis=0) for t in e]],
    "joined": lambda e: [[tf.concat([t, t[-3:]], axis=0) for t in e]],
}


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_nor_are_parts_of_an_element_added_up_without_noise(cut, weights, jit):
    """Rows that fill the element up would be records, which the sum is clipped for."""
    step, rule = Counting(), dpc.FixedClip(1.0)

    @tf.function(jit_compile=jit)
    def clipped(*element):
        variables = step.dense.trainable_variables
        return dpc.gradients.clipped_sum(step.losses(element[0]), variables, rule)[0]

    @tf.function(jit_compile=jit)
    def norms(*element):
        variables = step.dense.trainable_variables
        return dpc.gradients.per_example_norms(step.losses(element[0]), variables)

    for element in batches().take(1):
        sums = clipped(*element)
        assert sums[1].numpy() == pytest.approx(number_of_first(), abs=1e-3)
        parts = [p if weights else p[:1] for p in CUTS[cut](element)]
        assert [len(norms(*p)) for p in parts] == [len(p[0]) for p in parts]
        if cut == "joined" and weights:
            # Only rows without weight came to the element.
            sums = clipped(*parts[0])
            assert sums[1].numpy() == pytest.approx(number_of_first(), abs=1e-3)
            continue
        if jit and weights:
            added = sum(clipped(*part)[1].numpy() for part in parts)
            assert added == pytest.approx(0, abs=1e-3)
            continue
        with pytest.raises(REFUSED, match="differ in their number of rows"):
            for part in parts:
                clipped(*part)


@pytest.mark.parametrize("weights", [False, True])
def test_two_elements_are_not_added_up_as_one(weights):
    step, rule = Counting(), dpc.FixedClip(1.0)

    @tf.function
    def clipped(*element):
        variables = step.dense.trainable_variables
        return dpc.gradients.clipped_sum(step.losses(element[0]), variables, rule)[0]

    elements = list(batches().take(2))
    both = [tf.concat(pair, axis=0) for pair in zip(*elements, strict=True)]
    with pytest.raises(REFUSED):
        clipped(*(both if weights else both[:1]))


class TestTwoStepsOnOneDraw:
    def test_two_optimizers_are_refused_before_either_has_released(self):
        first, second = Counting(), Counting()

        @tf.function
        def made(x):
            first.take_step(x)
            second.take_step(x)

        for x, _, _ in batches().take(1):
            with pytest.raises(PrivacyMismatchError, match="of one draw"):
                made(x)
        assert first.moved == second.moved == 0

    def test_two_of_one_graph_are_refused_when_it_is_traced(self):
        first, second = Counting(), Counting()

        @tf.function
        def train(iterator):
            x, _, _ = next(iterator)
            first.take_step(x)
            second.take_step(x)

        with pytest.raises(PrivacyMismatchError, match="of one draw"):
            train(iter(batches()))

    def test_so_is_an_element_that_is_used_again(self):
        step = Counting()
        made = tf.function(lambda x: step.take_step(x))
        for x, _, _ in batches().take(1):
            made(x)
            with pytest.raises(PrivacyMismatchError, match="of one draw"):
                made(x)

    @pytest.mark.parametrize(
        "scheme", [None, sampling.FixedSize(10, RECORDS)], ids=["poisson", "fixed"]
    )
    def test_so_is_an_element_of_a_list_that_is_used_again(self, scheme):
        step = Counting()
        made = tf.function(lambda x, y, w: step.take_step(x))
        elements = list(batches(scheme))
        for element in reversed(elements):
            made(*element)
        for element in elements:
            with pytest.raises(PrivacyMismatchError, match="of one draw"):
                made(*element)
        assert step.optimizer.iterations.numpy() == len(elements)

    def test_before_the_rest_of_the_list_is_used(self):
        step = Counting()
        made = tf.function(lambda x, y, w: step.take_step(x))
        elements = list(batches(sampling.FixedSize(10, RECORDS)))
        made(*elements[2])
        with pytest.raises(PrivacyMismatchError, match="of one draw"):
            made(*elements[2])
        made(*elements[0])

    def test_a_list_is_not_used_more_often_than_it_is_long(self):
        step = Counting()
        made = tf.function(lambda x, y, w: step.take_step(x))
        elements = list(batches(sampling.FixedSize(10, RECORDS)))
        # No tensor of an element is among the arguments.
        for x, y, w in elements:
            made(x + 1, y + 0, w + 0)
        with pytest.raises(PrivacyMismatchError, match="of one draw"):
            made(*(part + 0 for part in elements[0]))

    def test_a_guess_that_was_wrong_is_taken_back(self):
        step = Counting()
        made = tf.function(lambda x, y, w: step.take_step(x))
        elements = list(batches(sampling.FixedSize(10, RECORDS)))
        made(*(part + 0 for part in elements[3]))
        for element in elements[:3] + elements[4:]:
            made(*element)
        with pytest.raises(PrivacyMismatchError, match="of one draw"):
            made(*elements[0])

    def test_a_long_list_is_remembered(self):
        step = Counting()
        made = tf.function(lambda x, y, w: step.take_step(x))
        data = batches(sampling.FixedSize(10, RECORDS))
        elements = list(data.repeat(20))
        for element in elements:
            made(*element)
        with pytest.raises(PrivacyMismatchError, match="of one draw"):
            made(*elements[0])

    def test_of_all_records_each_is_a_step_like_any_other(self):
        step = Counting()
        made = tf.function(lambda x: step.take_step(x))
        for x, _, _ in batches(sampling.FullBatch(), seed=None):
            made(x)
            made(x)
        assert step.moved == pytest.approx(2 * RECORDS)


class TestStepsOfALedger:
    def _train(self, step, ledger, data, times=1):
        for element in data:
            with ledger.step():
                for _ in range(times):
                    step(*element)

    def _ledger(self, data, noise_multiplier=0.0):
        ledger = accounting.Ledger(delta=1e-5)
        ledger.begin(noise_multiplier=noise_multiplier, sampling=data)
        return ledger

    def test_an_empty_draw_that_is_left_out_is_found(self):
        step, data = Counting(), batches(sampling.Poisson(0.01), seed=1)

        @tf.function
        def made(x, y, w):
            if tf.reduce_sum(w) > 0:
                step.take_step(x)

        ledger = self._ledger(data)
        with pytest.raises(PrivacyMismatchError, match="the result of Sum"):
            self._train(made, ledger, data.take(20))

    def test_steps_more_than_were_said_are_found_and_counted(self):
        step, data = Counting(), batches(sampling.FullBatch(), seed=None)
        made = tf.function(lambda x, y, w: step.take_step(x))
        ledger = self._ledger(data)
        with pytest.raises(PrivacyMismatchError, match="counted 1 steps.*made 2"):
            self._train(made, ledger, data.take(1), times=2)
        assert ledger.steps == 2

    def test_a_step_outside_of_the_blocks_is_found_and_counted(self):
        step, data = Counting(), batches()
        made = tf.function(lambda x, y, w: step.take_step(x))
        ledger, elements = self._ledger(data), iter(data)
        made(*next(elements))  # To try the function.
        with pytest.raises(PrivacyMismatchError, match="made 1 steps outside"):
            self._train(made, ledger, [next(elements)])
        assert ledger.steps == 2
        self._train(made, ledger, [next(elements)])
        assert ledger.steps == 3
        made(*next(elements))
        assert any(
            "outside of ledger.step()" in text
            for text in ledger.statement().assumptions
        )

    def test_steps_more_than_were_recorded_by_a_number_are_named(self):
        step, data = Counting(), batches()
        made = tf.function(lambda x, y, w: step.take_step(x))

        def named(ledger):
            told = ledger.statement().assumptions
            return [text for text in told if "by no ledger" in text]

        other, ledger = self._ledger(data), self._ledger(data)
        for element in data.take(3):
            made(*element)
        ledger.record()  # As if once an epoch.
        (text,) = named(ledger)
        assert "2 steps of private optimizers" in text
        other.record()  # Of these steps, in a ledger of their own.
        assert "1 steps" in named(ledger)[0]
        ledger.record()
        assert not named(ledger) and not named(other) and not ledger.notes[2:]
        ledger.begin(noise_multiplier=0.0, sampling=data)
        for element in data.take(2):
            with ledger.step():
                made(*element)
        assert not named(ledger)

    def _trained_on_batches(self):
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
        model.compile(
            dpc.keras.DPSGD(1.0, clip=1.0, noise_multiplier=0.0, expected_batch_size=9),
            "mse",
        )
        return model

    @pytest.mark.parametrize("given", ["element", "arrays"])
    @pytest.mark.parametrize("kept", [False, True])
    def test_two_steps_of_train_on_batch_on_one_draw_are_found(self, kept, given):
        """Where the step does not know its element, the numbers are compared."""
        model, data = self._trained_on_batches(), batches()
        ledger = self._ledger(data)
        elements = data.take(3)
        if given == "arrays":
            elements = (
                [t.numpy() for t in tf.nest.flatten(element)] for element in elements
            )
        order = list(elements) * 2 if kept else (e for e in elements for _ in range(2))
        found = "draws that earlier steps had|would be made of one draw"
        with pytest.raises(PrivacyMismatchError, match=found) as error:
            for x, y, w in order:
                with ledger.step():
                    model.train_on_batch(x, y, w)
        ran = 3 if kept else 1
        if "would be" in str(error.value):
            assert model.optimizer.iterations.numpy() == ran
            assert ledger.steps == ran + 1  # The refused step was reserved.
            return
        # The step and the first step of its draw, as if of all records, too.
        assert ledger.steps == ran + 3
        assert ledger.phases[0].sampling == sampling.FullBatch()

    @pytest.mark.parametrize("looked", [True, False])
    @pytest.mark.parametrize("same", [True, False])
    def test_draws_of_an_earlier_fit_do_not_hide_a_second_step_on_one_draw(
        self, same, looked
    ):
        model, data = self._trained_on_batches(), batches()
        earlier = data if same else batches()
        elements = iter(earlier)
        if looked:
            next(elements)
        model.fit(earlier, epochs=2, verbose=0)
        ledger = self._ledger(data)
        with pytest.raises(PrivacyMismatchError, match="draws that earlier steps had"):
            for x, y, w in data.take(6):
                for _ in range(2):
                    with ledger.step():
                        model.train_on_batch(x, y, w)
        assert elements is not None

    def test_train_on_batch_of_elements_of_another_scheme_is_found(self):
        model, data = self._trained_on_batches(), batches(sampling.Poisson(0.5))
        ledger = self._ledger(sampling.Poisson(0.2))
        with pytest.raises(PrivacyMismatchError, match=r"drawn by Poisson, rate 0\.5"):
            for x, y, w in data.take(1):
                with ledger.step():
                    model.train_on_batch(x, y, w)

    @pytest.mark.parametrize("way", ["list", "prefetch", "iterator", "peek"])
    def test_one_train_on_batch_for_each_draw_is_what_is_said(self, way):
        """Elements from before `begin` that no step used are draws, too."""
        model, data = self._trained_on_batches(), batches()
        elements = iter(data.prefetch(3) if way == "prefetch" else data)
        elements = list(data.take(4)) if way == "list" else elements
        if way != "list":
            next(elements)
        ledger = self._ledger(data)
        if way == "peek":
            elements = iter(data)
        for x, y, w in itertools.islice(elements, 4):
            with ledger.step():
                model.train_on_batch(x, y, w)
        assert ledger.steps == 4

    def test_draws_of_a_loop_in_the_graph_are_enough_for_its_steps(self):
        step, data = Counting(), batches()
        next(iter(data))  # To look at the data.
        ledger, iterator = self._ledger(data), iter(data)

        @tf.function
        def train(iterator):
            for _ in range(3):
                x, _, _ = next(iterator)
                step.take_step(x)

        for _ in range(2):
            with ledger.step(3):
                train(iterator)
        assert ledger.steps == 6

    @pytest.mark.parametrize("rate, covered", [(0.2, False), (0.9, True)])
    def test_elements_of_another_scheme_are_found_and_counted(self, rate, covered):
        step, data = Counting(), batches(sampling.Poisson(0.5), seed=None)
        made = tf.function(lambda x, y, w: step.take_step(x))
        ledger = self._ledger(sampling.Poisson(rate))
        if covered:
            self._train(made, ledger, data.take(2))
            assert ledger.steps == 2
            return
        with pytest.raises(PrivacyMismatchError, match=r"drawn by Poisson, rate 0\.5"):
            self._train(made, ledger, data.take(1))
        assert [p.sampling for p in ledger.phases][0] == sampling.FullBatch()
        assert ledger.steps == 2

    def test_steps_that_another_ledger_counts_are_not_outside(self):
        step, data = Counting(), batches()
        made = tf.function(lambda x, y, w: step.take_step(x))
        ledgers, elements = [self._ledger(data) for _ in range(3)], iter(data)
        for ledger in (*ledgers, *ledgers):
            self._train(made, ledger, [next(elements)])
        made(*next(elements))
        ledgers[0].record()  # By hand.
        self._train(made, ledgers[0], [next(elements)])
        assert [ledger.steps for ledger in ledgers] == [4, 2, 2]
        assert "outside" not in str(ledgers[0].statement())

    def test_one_step_for_every_draw_is_what_is_said(self):
        step, data = Counting(), batches()
        made = tf.function(lambda x, y, w: step.take_step(x))
        ledger = self._ledger(data)
        self._train(made, ledger, data.take(5))
        assert ledger.steps == 5

    @pytest.mark.parametrize(
        "scheme",
        [sampling.RandomAllocation(6), sampling.ShuffledEpochs(10, RECORDS)],
        ids=["allocation", "shuffled"],
    )
    def test_draws_of_an_epoch_that_are_left_out_are_counted(self, scheme):
        data = scheme.batches(np.ones((RECORDS, 1), "float32"))
        steps = data.steps_per_epoch
        ledger = self._ledger(data, 1.0)
        for number, _ in enumerate(data.repeat(2)):
            if number % 2 == 0:
                with ledger.step():
                    pass
        assert ledger.steps == steps
        # The run went up to the step before the last of the second epoch.
        whole = accounting.epsilon(1.0, 2 * steps - 1, data.scheme, 1e-5)
        assert ledger.epsilon() == pytest.approx(whole)

    def test_a_run_begins_an_epoch_after_elements_were_looked_at(self):
        data = sampling.ShuffledEpochs(10, RECORDS).batches(np.ones((RECORDS, 1)))
        next(iter(data))
        self._ledger(data)
        assert data._drawer.steps_drawn() == data.steps_per_epoch

    @pytest.mark.parametrize("begun", ["scheme", "others", "first"])
    @pytest.mark.parametrize(
        "scheme",
        [
            sampling.RandomAllocation(6),
            sampling.ShuffledEpochs(10, RECORDS),
            sampling.MinSeparation(RECORDS, 10),
            sampling.CyclicPoisson(RECORDS, 0.1, 4),
        ],
        ids=lambda scheme: type(scheme).__name__,
    )
    def test_a_second_order_of_the_records_is_another_run(self, scheme, begun):
        step = Counting()
        made = tf.function(lambda x: step.take_step(x))
        orders = [batches(scheme, seed=None) for _ in range(4)]
        told = {"scheme": scheme, "others": orders[3], "first": orders[0]}[begun]
        ledger = self._ledger(told)
        for data in orders[:3]:
            for x, _, _ in data.take(3):
                with ledger.step():
                    made(x)
        assert ledger.steps == 9
        assert [run for run in ledger.phases[-1].runs if run] == [3, 3, 3]

    def test_of_an_order_that_was_begun_before_the_run_has_the_whole_epoch(self):
        step = Counting()
        made = tf.function(lambda x: step.take_step(x))
        data = batches(sampling.RandomAllocation(6), seed=None).repeat()
        elements = iter(data)
        for _ in range(4):
            next(elements)
        ledger = self._ledger(data.scheme)
        for _ in range(4):
            x, _, _ = next(elements)
            with ledger.step():
                made(x)
        # Steps 5 to 8 of the order are of two epochs.
        assert (ledger.steps, ledger.phases[-1].runs) == (4, [8])

    @pytest.mark.parametrize("begun", ["scheme", "first"])
    def test_a_second_order_is_refused_where_noise_is_correlated(self, begun):
        scheme = sampling.MinSeparation(RECORDS, 10)
        matrix = dpc.correlated.SquareRootToeplitz(2)
        dense = tf.keras.layers.Dense(1)
        dense.build((None, 3))
        optimizer = dpc.keras.DPSGD(
            1.0,
            clip=1.0,
            noise_multiplier=1.0,
            expected_batch_size=10,
            noise=dpc.CorrelatedNoise(matrix, 12, scheme),
        )

        @tf.function
        def made(x, y, w):
            optimizer.minimize(dense(x)[:, 0], dense.trainable_variables)

        first, second = batches(scheme, seed=None), batches(scheme, seed=None)
        ledger = accounting.Ledger(1e-5)
        ledger.begin(
            noise_multiplier=1.0,
            sampling=first if begun == "first" else scheme,
            noise=matrix,
            horizon=12,
        )
        for element in first:
            with ledger.step():
                made(*element)
        with pytest.raises(PrivacyMismatchError, match="two objects that draw"):
            with ledger.step():
                made(*next(iter(second)))
        assert "not counted" in str(ledger.statement())

    def test_elements_that_the_loop_holds_are_no_steps_left_out(self):
        data = sampling.RandomAllocation(6).batches(np.ones((RECORDS, 1)))
        ledger = self._ledger(data)
        for _ in list(data):
            with ledger.step():
                pass
        assert (ledger.steps, ledger.phases[-1].runs) == (6, [6])

    def test_steps_left_out_are_refused_where_noise_is_correlated(self):
        scheme = sampling.MinSeparation(RECORDS, 10)
        noise = dpc.correlated.SquareRootToeplitz(2)
        data = scheme.batches(np.ones((RECORDS, 1)))
        ledger = accounting.Ledger(delta=1e-5)
        ledger.begin(noise_multiplier=1.0, sampling=data, noise=noise, horizon=12)
        elements = iter(data)
        for _ in range(2):
            next(elements)
            with ledger.step():
                pass
        next(elements), next(elements)
        with pytest.raises(PrivacyMismatchError, match="1 steps were drawn"):
            with ledger.step():
                pass
        assert ledger.steps == 3


class Falls(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of noise multipliers."""

    def __call__(self, step):
        return 2.0 - tf.cast(step, tf.float32)

    def get_config(self):
        return {}


class TestNoiseOfALedger:
    """`ledger.begin` says again the settings of the optimizer, and may be wrong."""

    def _train(self, counted=None, steps=1, data=None, **options):
        data = batches(seed=None) if data is None else data
        ledger, step = accounting.Ledger(delta=1e-5), Counting()
        step.optimizer = dpc.keras.DPSGD(
            1.0, clip=dpc.FixedClip(1.0), expected_batch_size=SIZE, **options
        )
        made = tf.function(lambda x, y, w: step.take_step(x))
        ledger.begin(noise_multiplier=2.0, sampling=data, **(counted or {}))
        self.ledger = ledger
        for element in data.take(steps):
            with ledger.step():
                made(*element)

    @pytest.mark.parametrize("z", [0.0, 1.0, 1.99])
    def test_less_than_is_counted_is_refused_and_counted(self, z):
        with pytest.raises(PrivacyMismatchError, match="The ledger counts noise of"):
            self._train(noise_multiplier=z)
        worst = accounting.epsilon(z, 1, sampling.FullBatch(), delta=1e-5) if z else 0
        assert self.ledger.epsilon() >= (worst or np.inf)

    def test_as_much_and_more_is_taken(self):
        for z in (2.0, 3.0):
            self._train(noise_multiplier=z, steps=3)
            assert self.ledger.steps == 3

    def test_of_a_schedule_each_step_is_compared(self):
        with pytest.raises(
            PrivacyMismatchError, match="step had noise of multiplier 1"
        ):
            self._train(noise_multiplier=Falls(), steps=2)
        assert self.ledger.steps == 3

    def test_a_batch_that_is_clipped_is_no_example(self):
        options = {"noise_multiplier": 2.0, "unit": "batch"}
        with pytest.raises(PrivacyMismatchError, match="on each clipped batch"):
            self._train(**options)
        self._train({"unit": "batch"}, **options)

    def test_correlated_noise_that_is_counted_as_independent_is_refused(self):
        scheme = sampling.MinSeparation(40, 10)
        matrix = dpc.correlated.SquareRootToeplitz(4)
        noise = dpc.CorrelatedNoise(matrix, 8, scheme)
        with pytest.raises(PrivacyMismatchError, match="step had correlated noise"):
            self._train(noise_multiplier=2.0, noise=noise)
        assert self.ledger.epsilon() == np.inf

    def test_a_fixed_seed_is_noted(self):
        self._train(noise_multiplier=2.0, seed=1)
        assert "not private" in str(self.ledger.statement())


def test_a_function_of_the_users_is_not_keras_train_on_batch():
    """Traced in a function of that name, a step knows its records elsewhere, too."""
    step = Counting()
    made = tf.function(lambda x: step.take_step(x))

    def train_on_batch(x):
        made(x)

    for number, (x, _, _) in enumerate(batches()):
        if number:
            made(x)
        else:
            train_on_batch(x)
    assert step.moved == pytest.approx(drawn(), abs=1e-3)


@pytest.mark.parametrize("name", ["run_step", "one_step_on_data", "step"])
def test_a_step_named_like_keras_own_is_of_the_element_around_it(name):
    """Keras feeds functions of these names from iterators; a user's loop, too."""
    counting = Counting()

    def inner(x):
        counting.take_step(x)

    inner.__name__ = name
    step = tf.function(inner, autograph=False)

    @tf.function
    def loop(iterator):
        x, _, weights = next(iterator)
        step(x)
        return tf.reduce_sum(weights)

    iterator, count = iter(batches()), 0.0
    for _ in range(4):
        count += float(loop(iterator))
        assert counting.moved == pytest.approx(count)
