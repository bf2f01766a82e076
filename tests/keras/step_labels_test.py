"""Every tensor of a traced step is followed, through calls, branches and loops."""

import types

import pytest
import tensorflow as tf

from tfdpclip._object_notes import note_on_new_ops
from tfdpclip.keras.watching import step_search
from tfdpclip.keras.watching.step_labels import StepLabels
from tfdpclip.keras.watching.weight_watch import marked_updates

pytestmark = pytest.mark.unchecked
PRIVATE = types.SimpleNamespace(identity="private")


class Step:
    """A step that takes one private step; cases add what else happens."""

    def __init__(self):
        self.weight = tf.Variable(tf.ones([3]), name="weight")
        self.seen = tf.Variable(0.0, trainable=False, name="seen")

    def take(self, x):
        with note_on_new_ops(updates=PRIVATE.identity):
            self.weight.assign_sub(tf.reduce_sum(x, axis=0))

    def step(self, iterator):
        self.take(next(iterator))

    def labels(self):
        data = tf.data.Dataset.from_tensor_slices(tf.ones([8, 3])).batch(4)
        function = tf.function(lambda iterator: self.step(iterator))
        self.graph = function.get_concrete_function(iter(data)).graph
        return StepLabels(self.graph, "private")

    def given_data(self):
        return step_search.find_variables_given_data(self.labels(), [self.seen])

    def others(self):
        return step_search.find_other_updates(self.labels(), [self.weight, self.seen])

    def altered(self):
        return step_search.find_altered_data(self.labels(), [self.weight])


class OfAFunction(Step):
    """The function takes the iterator, and no data."""

    def step(self, iterator):
        self.seen.assign(tf.reduce_sum(tf.function(lambda: next(iterator))()))


class OfABranch(Step):
    def step(self, iterator):
        x = next(iterator)
        value = tf.cond(self.seen > 0, lambda: tf.reduce_sum(x), lambda: 0.0)
        self.seen.assign(value)


class OfTheLastTurn(Step):
    def step(self, iterator):
        x, held = next(iterator), 0.0
        for _ in tf.range(3):
            self.seen.assign(held)
            held = tf.reduce_sum(x)


class OfTheNumber(Step):
    def step(self, iterator):
        self.seen.assign(tf.cast(tf.shape(next(iterator))[0], tf.float32))


class OfWeights(Step):
    def step(self, iterator):
        self.take(next(iterator))
        self.seen.assign(tf.reduce_sum(self.weight))


class OfAnotherResult(Step):
    """One result of the function is data, and the variable gets the other."""

    def step(self, iterator):
        x = next(iterator)
        _, number = tf.function(lambda: (tf.reduce_sum(x), self.seen + 1.0))()
        self.seen.assign(number)


@pytest.mark.parametrize("kind", [OfAFunction, OfABranch, OfTheLastTurn, OfTheNumber])
def test_data_are_followed_to_a_variable(kind):
    assert kind().given_data()


@pytest.mark.parametrize("kind", [Step, OfWeights, OfAnotherResult])
def test_values_without_data_are_none(kind):
    assert not kind().given_data()


class InALoop(Step):
    def step(self, iterator):
        for _ in tf.range(2):
            tf.function(lambda: self.weight.assign_add(tf.ones([3])))()


class InABranch(Step):
    def step(self, iterator):
        def add():
            self.weight.assign_add(tf.ones([3]))
            return 0.0

        tf.cond(self.seen > 0, add, lambda: 0.0)


@pytest.mark.parametrize("kind", [InALoop, InABranch])
def test_a_write_beside_the_private_step_is_found(kind):
    step = kind()
    assert [variable for variable, _ in step.others()] == [step.weight]


def test_the_private_step_is_no_other_write():
    assert not Step().others()


class Within(Step):
    """The private step is in a function or in the turns of a loop."""

    def step(self, iterator):
        x = next(iterator)
        for _ in tf.range(2):
            tf.function(self.take)(x)


class Normalised(Step):
    def step(self, iterator):
        x = next(iterator)
        tf.function(self.take)(x - tf.reduce_mean(x, axis=0))


class ByABranch(Step):
    def step(self, iterator):
        x = next(iterator)
        x = tf.cond(self.seen > 0, lambda: x[::-1], lambda: x)
        tf.function(self.take)(x)


class HandedOn(Step):
    """A turn's private step gets what the last turn computed of the batch."""

    def step(self, iterator):
        x, mean = next(iterator), tf.zeros([3])
        for _ in tf.range(2):
            self.take(x - mean)
            mean = tf.reduce_mean(x, axis=0)


class Held(Step):
    """The step writes data to a variable, and hands the value to the private step."""

    def step(self, iterator):
        x = next(iterator)
        self.seen.assign(tf.reduce_sum(x))
        held = self.seen.read_value()
        tf.function(lambda x, by: self.take(x * by))(x, held)


class Reported(Step):
    """What a turn reports of its batch goes to no private step."""

    def step(self, iterator):
        x, loss = next(iterator), 0.0
        for _ in tf.range(2):
            self.take(x)
            loss = tf.reduce_sum(x) + 0.0 * loss


@pytest.mark.parametrize("kind", [Normalised, ByABranch, HandedOn, Held])
def test_altered_data_around_the_private_step_are_found(kind):
    assert kind().altered()


@pytest.mark.parametrize("kind", [Step, Within, Reported])
def test_data_that_reach_the_private_step_unchanged_are_not(kind):
    assert kind().altered() is None


class ReadsMore(Step):
    def step(self, iterator):
        more = tf.data.Dataset.from_tensor_slices(tf.ones([8, 3])).batch(4)
        tf.function(lambda: self.take(next(iter(more))))()


class CallsPython(Step):
    def step(self, iterator):
        tf.cond(
            self.seen > 0,
            lambda: tf.py_function(lambda: 1.0, [], tf.float32),
            lambda: 0.0,
        )


def test_a_data_set_of_the_steps_own_and_python_are_found():
    assert Step().labels().other_data is None
    assert Step().labels().python is None
    assert ReadsMore().labels().other_data
    assert CallsPython().labels().python


class Reads(Step):
    """The update depends on a value that the step makes of data."""

    def take(self, x):
        with marked_updates(PRIVATE):
            self.weight.assign_sub(self.seen * tf.ones([3]))
        self.seen.assign(tf.reduce_sum(x))


def test_a_value_that_the_update_reads_and_the_step_writes_is_named():
    step = Reads()
    labels = step.labels()
    find = step_search.find_private_read
    assert find(labels, step.graph, [step.weight], lambda *_: False) == "seen"
    assert find(labels, step.graph, [step.weight], lambda *_: True) is None


def test_a_step_that_is_still_traced_is_labelled_so_far():
    step, during = Step(), []

    @tf.function
    def function(x, by=step.seen):
        by.assign(tf.reduce_sum(x))
        during.append(StepLabels(tf.compat.v1.get_default_graph(), "private"))

    function(tf.ones([2, 3]))
    (labels,) = during
    assert step_search.find_variables_given_data(labels, [step.seen])
