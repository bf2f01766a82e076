"""Users are told the right thing: the lines of messages, copied here, run."""

import copy
import re

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.keras.helpers import L
from tfdpclip.gradients import ExampleIsolationError, LossStructureError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 6)).astype("float32")
Y = RNG.normal(size=(64, 2)).astype("float32")
IMAGES = RNG.normal(size=(64, 4, 4, 1)).astype("float32")


def fit(model, loss, x, y, **options):
    plan = dpc.keras.PrivacyPlan(8, 1e-3, examples=len(y), batch_size=16, epochs=1)
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1), loss)
    batches = plan.batches((x, y))
    model.fit(batches, verbose=0, callbacks=plan.callbacks, **options)
    return plan


def dense(units=2):
    return tf.keras.Sequential([tf.keras.Input((6,)), L.Dense(units)])


def picture():
    convolution = L.Conv2D(1, 3, padding="same", activation="sigmoid")
    return tf.keras.Sequential([tf.keras.Input((4, 4, 1)), convolution])


def dice(axis):
    def loss(y, y_pred):
        both = tf.reduce_sum(y * y_pred, axis=axis)
        total = tf.reduce_sum(y, axis=axis) + tf.reduce_sum(y_pred, axis=axis)
        return 1 - (2 * both + 1) / (total + 1)

    return loss


def cross_entropy(axis):
    def loss(y, y_pred):
        each = tf.keras.losses.binary_crossentropy(y, y_pred)
        return tf.reduce_mean(each, axis=axis)

    return loss


def both(axes, of_dice):
    """Cross-entropy plus a Dice loss."""
    return lambda y, z: cross_entropy(axes)(y, z) + dice(of_dice)(y, z)


# Losses of one's own: as they are usually written, and with the line of the message.
LOSSES = {
    "square": (
        lambda y, y_pred: tf.reduce_mean(tf.square(y - y_pred)),
        lambda y, y_pred: tf.reduce_mean(tf.square(y - y_pred), axis=-1),
    ),
    "absolute": (
        lambda y, y_pred: tf.reduce_sum(tf.abs(y - y_pred)),
        lambda y, y_pred: tf.reduce_sum(tf.abs(y - y_pred), axis=-1),
    ),
    "root": (
        lambda y, y_pred: tf.sqrt(tf.reduce_mean(tf.square(y - y_pred))),
        lambda y, y_pred: tf.sqrt(tf.reduce_mean(tf.square(y - y_pred), axis=-1)),
    ),
    "dice": (dice(None), dice((1, 2, 3))),
    "both": (both(None, None), both((1, 2), (1, 2, 3))),
    "dice of the batch": (both((1, 2), None), both((1, 2), (1, 2, 3))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_ones_own_is_told_of_its_axes(name):
    usual, written = LOSSES[name]
    images = "dice" in name or name == "both"
    make, x = (picture, IMAGES) if images else (dense, X)
    y = (IMAGES > 0).astype("float32") if images else Y
    losses = [usual]
    if name != "dice of the batch":
        losses.append(dpc.keras.PerExampleLoss(usual))
    for loss in losses:
        with pytest.raises(ValueError, match=r"axis=-1") as info:
            fit(make(), loss, x, y)
        text = str(info.value)
        assert r"axis=(1, 2, 3)" in text
        assert "mask_zero" not in text
        sentence = text.split("in user code")[0].strip()
        assert len(sentence.split()) < 75
        # The sentence is first, and last.
        assert text.rstrip().endswith(sentence[-60:])
        assert not text.startswith("in user code")
    fit(make(), written, x, y)


class Union(tf.keras.Model):
    """Graphs of five nodes; in the usual way, one large graph of all the batch."""

    def __init__(self, usual):
        super().__init__()
        self.usual, self.hidden, self.last = usual, L.Dense(4), L.Dense(1)

    def call(self, inputs):
        nodes, edges = self.hidden(inputs["nodes"]), inputs["edges"]
        if not self.usual:
            senders, receivers = edges[..., 0], edges[..., 1]
            messages = tf.gather(nodes, senders, batch_dims=1)
            sums = tf.matmul(tf.one_hot(receivers, 5), messages, transpose_a=True)
            return self.last(tf.reduce_mean(nodes + sums, axis=1))
        count = tf.shape(nodes)[0]
        edges = tf.reshape(edges + tf.range(count)[:, None, None] * 5, [-1, 2])
        nodes = tf.reshape(nodes, [-1, 4])
        found = tf.gather(nodes, edges[:, 0])
        nodes += tf.math.unsorted_segment_sum(found, edges[:, 1], tf.shape(nodes)[0])
        return self.last(tf.reduce_mean(tf.reshape(nodes, [count, 5, 4]), axis=1))


@pytest.mark.slow
def test_a_union_of_graphs_is_told_of_its_indices():
    x = {
        "nodes": RNG.normal(size=(64, 5, 3)).astype("float32"),
        "edges": RNG.integers(5, size=(64, 7, 2)).astype("int32"),
    }
    with pytest.raises(ExampleIsolationError, match=r"batch_dims=1\)") as info:
        fit(Union(usual=True), "mse", x, Y[:, :1])
    assert "LayerNormalization" not in str(info.value)
    fit(Union(usual=False), "mse", x, Y[:, :1])


def batches(data):
    plan = dpc.keras.PrivacyPlan(8, 1e-3, examples=64, batch_size=16, epochs=1)
    return plan.batches(data)


@pytest.mark.parametrize("batch_size", [16, None])
def test_windows_of_a_series_are_told_how_to_be_made(batch_size):
    series, length = RNG.normal(size=(74, 3)).astype("float32"), 10
    data = tf.keras.utils.timeseries_dataset_from_array(
        series, series[length:, 0], length, batch_size=batch_size
    )
    with pytest.raises(ValueError, match="timeseries") as info:
        batches(data)
    line = re.search(r"x = (np.stack\(.*\]\))\.", str(info.value)).group(1)
    x = eval(line, {"np": np, "series": series, "length": length})
    assert x.shape == (64, length, 3)
    batches((x, series[length:, 0]))


def test_datasets_that_are_mixed_are_told_of_class_weights():
    half = tf.data.Dataset.from_tensor_slices((X[:32], Y[:32]))
    mixed = [
        tf.data.Dataset.sample_from_datasets([half, half], [0.5, 0.5]),
        tf.data.Dataset.choose_from_datasets(
            [half, half], tf.data.Dataset.range(2).repeat(32)
        ),
    ]
    for data in mixed:
        with pytest.raises(ValueError, match="class_weight={0: 1.0") as info:
            batches(data)
        assert "sample_from_datasets" in str(info.value)
        assert "directed" not in str(info.value)
    batches(half.concatenate(tf.data.Dataset.from_tensor_slices((X[32:], Y[32:]))))


SETTINGS = {"noise_multiplier": 1.1, "expected_batch_size": 16}


@pytest.mark.parametrize(
    "name", ["noise_multiplier", "clip", "unit", "seed", "expected_batch_size"]
)
def test_a_setting_that_cannot_be_set_says_what_to_do(name):
    optimizer = dpc.keras.DPSGD(0.1, **SETTINGS)
    with pytest.raises(AttributeError, match=f"{name} of a private.*DPSGD\\("):
        setattr(optimizer, name, 0)
    optimizer.learning_rate = 0.2
    plan = dpc.keras.PrivacyPlan(8, 1e-3, examples=64, batch_size=16, epochs=1)
    with pytest.raises(AttributeError, match=r"plan.replace\(epsilon=8\)"):
        plan.noise_multiplier = 0.0


LINES = {
    "l2_norm_clip": {"clip": 1.0},
    "num_microbatches": {"unit": "batch", "clip": 1.0},
    "gradient_accumulation_steps": {"accumulation_steps": 4},
    "dp_sum_query": {"clip": dpc.FixedClip(1.0)},
}


@pytest.mark.parametrize("name", LINES)
def test_an_argument_of_tensorflow_privacy_names_its_counterpart(name):
    counterpart = next(iter(LINES[name]))
    with pytest.raises(ValueError, match=rf"{name} is no.*{counterpart}=") as info:
        dpc.keras.DPSGD(**{name: 2})
    assert len(str(info.value).split()) < 60
    with pytest.raises(ValueError, match=rf"{name} is no.*plan.opt.*{counterpart}="):
        dpc.keras.PrivacyPlan(3, 1e-5, examples=1000, **{name: 2})
    dpc.keras.DPSGD(0.1, **SETTINGS, **LINES[name])
    with pytest.raises(ValueError, match=f"{counterpart}="):
        setattr(dpc.keras.DPSGD(0.1, **SETTINGS), name, 2)


@pytest.mark.parametrize("name", ["clip", "learning_rate", "noise_multiplier"])
def test_a_setting_of_an_optimizer_that_a_plan_gets_is_told_its_place(name):
    with pytest.raises(ValueError, match=f"{name} .* plan.*dpc.keras.DPAdam.*1e-3"):
        dpc.keras.PrivacyPlan(3, 1e-5, examples=1000, **{name: 1.0})
    with pytest.raises(TypeError, match="no argument 'epsilonn'"):
        dpc.keras.PrivacyPlan(3, 1e-5, examples=1000, epsilonn=3)


CLASSES = """DPKerasSGDOptimizer DPKerasAdamOptimizer DPKerasAdagradOptimizer
VectorizedDPKerasSGDOptimizer VectorizedDPKerasAdamOptimizer GenericDPSGDOptimizer
DPGradientDescentGaussianOptimizer DPSequential DPModel GaussianSumQuery
QuantileAdaptiveClipSumQuery NestedQuery NoPrivacySumQuery TreeResidualSumQuery
DPFTRLTreeAggregationOptimizer DistributedDiscreteGaussianSumQuery
make_keras_optimizer_class compute_dp_sgd_privacy_statement""".split()


@pytest.mark.parametrize("name", CLASSES)
def test_a_name_of_tensorflow_privacy_names_its_counterpart(name):
    for module in (dpc, dpc.keras):
        with pytest.raises(AttributeError, match=f"{name} is tensorflow") as info:
            getattr(module, name)
        assert len(str(info.value).split()) < 60
    line = re.search(r"Write (.*?)(, compiled.*|, with.*)?\. See", str(info.value))
    line, rest = line.group(1), line.group(2) or ""
    names = {"dpc": dpc, "tf": tf, "layers": [L.Dense(1)]}
    if line.startswith("clip="):
        dpc.keras.DPSGD(0.1, **SETTINGS, clip=eval(line[5:], names))
    elif "federated" not in line and "plan." not in line:
        eval(line, names)
    if "compiled with " in rest:
        eval(rest.split("compiled with ")[1], names)
    assert not hasattr(dpc.keras, "Unknown")


class DPQuery:
    pass


class GaussianSumQuery(DPQuery):
    pass


class OfOnesOwn(DPQuery):
    pass


@pytest.mark.parametrize("kind", [GaussianSumQuery, OfOnesOwn])
def test_a_query_in_the_place_of_a_clip_names_its_rule(kind):
    with pytest.raises(ValueError, match=r"clip=dpc.FixedClip\(1.0\)"):
        dpc.keras.DPSGD(0.1, **SETTINGS, clip=kind())


def step_of(model, optimizer):
    @tf.function
    def step(x, y, w):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y), axis=-1) * w
        optimizer.minimize(loss, model.trainable_variables, tape=tape)

    return step


def test_a_plan_in_a_loop_of_ones_own_gives_lines_that_run():
    plan = dpc.keras.PrivacyPlan(8, 1e-3, examples=64, batch_size=16, epochs=1)
    step = step_of(dense(), plan.optimizer(dpc.keras.DPSGD, 0.1))
    for x, y, w in plan.batches((X, Y)):
        step(x, y, w)
    with pytest.raises(dpc.accounting.PrivacyMismatchError) as info:
        plan.statement()
    lines = re.search(r"    plan\.ledger.*step\(x, y, w\)", str(info.value), re.S)
    lines = re.sub("(?m)^    ", "", lines.group(0))
    plan = plan.replace()
    step = step_of(dense(), plan.optimizer(dpc.keras.DPSGD, 0.1))
    exec(lines, {"plan": plan, "batches": plan.batches((X, Y)), "step": step})
    assert plan.statement().steps == plan.steps


def test_an_earlier_laplace_event_is_taken():
    event = dp_accounting.LaplaceDpEvent(2.0)
    assert dpc.accounting.event_epsilon(event, 1e-9) == pytest.approx(0.5, rel=1e-3)


def test_errors_of_traced_code_keep_their_type():
    assert issubclass(LossStructureError, ValueError)


class Scheduled(tf.keras.callbacks.Callback):
    """Sets a variable at the beginning of each epoch."""

    def __init__(self, variable):
        super().__init__()
        self.variable = variable

    def on_epoch_begin(self, epoch, logs=None):
        self.variable.assign(0.5 / (epoch + 1))


class Weighted(tf.keras.Model):
    """The weight of the loss is a variable of the model, as of annealed terms."""

    def __init__(self, weight):
        super().__init__()
        self.dense, self.weight = L.Dense(2), weight

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return self.weight * tf.reduce_mean(tf.square(y - y_pred), axis=-1)


def scheduled_fit(kind, declared):
    """Trains with a scheduled weight of a loss; returns the plan."""
    weight = tf.Variable(0.5, trainable=False, name="anneal")
    options = {"public_variables": [weight]} if declared else {}
    plan = dpc.keras.PrivacyPlan(8, 1e-3, examples=64, batch_size=16, epochs=2)
    optimizer = plan.optimizer(dpc.keras.DPSGD, 0.1, **options)
    if kind == "of the model":
        model, y = Weighted(weight), Y
        model(X[:2])
        model.compile(optimizer)
    else:
        inputs = tf.keras.Input((6,))
        outputs = [L.Dense(2, name=name)(inputs) for name in "ab"]
        model, y = tf.keras.Model(inputs, outputs), (Y, Y)
        weights = {"a": 1.0, "b": weight} if kind == "by name" else [weight, 1.0]
        losses = {"a": "mse", "b": "mse"} if kind == "by name" else ["mse", "mse"]
        model.compile(optimizer, losses, loss_weights=weights)
    own = Scheduled(weight)
    if kind == "by a function":
        own = tf.keras.callbacks.LambdaCallback(on_epoch_begin=own.on_epoch_begin)
    batches = plan.batches((X, y))
    callbacks = [*plan.callbacks, own]
    try:
        model.fit(batches, epochs=2, verbose=0, callbacks=callbacks)
    finally:
        assert plan.ledger.steps == (8 if declared else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["by name", "in order", "by a function", "of the model"]
)
def test_a_weight_that_a_callback_changes_is_asked_for_before_the_first_step(kind):
    error = "may change the variable 'anneal.*plan.optimizer.*public_variables="
    with pytest.raises(ExampleIsolationError, match=error) as raised:
        scheduled_fit(kind, declared=False)
    assert ("loss_weights may" in str(raised.value)) == (kind != "of the model")
    scheduled_fit(kind, declared=True)


class Captions(tf.keras.Model):
    """Several texts of a picture: a private step for each, or one for all."""

    def __init__(self, together):
        super().__init__()
        self.dense, self.together = L.Dense(3), together

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        losses = []
        for i in range(y.shape[1]):
            with tf.GradientTape() as tape:
                found = self(x, training=True)
                losses.append(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(y[:, i], found)
                )
            if not self.together:
                weights = self.trainable_variables
                self.optimizer.minimize(losses[-1], weights, tape=tape)
        if self.together:
            loss = tf.add_n(losses)
            self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": tf.add_n(losses)}


@pytest.mark.slow
def test_several_steps_on_a_batch_are_told_while_the_step_is_traced():
    texts = RNG.integers(0, 3, (64, 4)).astype("int32")
    for together in (False, True):
        plan = dpc.keras.PrivacyPlan(8, 1e-3, examples=64, batch_size=16, epochs=1)
        model = Captions(together)
        model(X[:2])
        model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1))
        batches = plan.batches((X, texts))
        if together:
            model.fit(batches, verbose=0, callbacks=plan.callbacks)
            assert plan.ledger.steps == 4
            continue
        error = "(?s)more than once, or in a loop.*loss = tf.add_n.losses."
        with pytest.raises(dpc.accounting.PrivacyMismatchError, match=error):
            model.fit(batches, verbose=0, callbacks=plan.callbacks)
        assert plan.ledger.steps == 0


class Looped(tf.keras.Model):
    """Steps of one batch in a loop within TensorFlow's graph."""

    def __init__(self, loop):
        super().__init__()
        self.dense, self.loop = L.Dense(2), loop

    def call(self, x):
        return self.dense(x)

    def take_step(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y), axis=-1)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)

    def train_step(self, data):
        x, y, _ = tf.keras.utils.unpack_x_y_sample_weight(data)
        self.loop(self.take_step, x, y)
        return {"loss": tf.constant(0.0)}


@tf.function
def counted(step, x, y):
    for _ in tf.range(2):
        step(x, y)


def while_loop(step, x, y):
    def again(i):
        step(x, y)
        return [i + 1]

    tf.while_loop(lambda i: i < 2, again, [tf.constant(0)])


def call_twice(step, x, y):
    """One trace of the step, and two calls."""
    step = tf.function(step)
    step(x, y)
    step(x, y)


def call_within(step, x, y):
    tf.function(call_twice)(step, x, y)


LOOPS = {
    "twice": call_twice,
    "within": call_within,
    "for": counted,
    "while": while_loop,
    "function": lambda step, x, y: while_loop(tf.function(step), x, y),
    "none": lambda step, x, y: tf.function(step)(x, y),
}


@pytest.mark.parametrize("name", LOOPS)
def test_steps_on_a_batch_in_a_loop_are_told_while_the_step_is_traced(name):
    plan = dpc.keras.PrivacyPlan(8, 1e-3, examples=64, batch_size=16, epochs=1)
    model = Looped(LOOPS[name])
    model(X[:2])
    model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1))
    batches = plan.batches((X, Y))
    arguments = {"verbose": 0, "callbacks": plan.callbacks}
    if name == "none":
        model.fit(batches, **arguments)
        return
    with pytest.raises(dpc.accounting.PrivacyMismatchError, match="or in a loop, on"):
        model.fit(batches, **arguments)
    assert plan.ledger.steps == 0 and int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("within", [call_twice, counted])
def test_two_steps_within_a_function_on_a_draw_of_a_loop_are_counted_as_such(within):
    """The function around the step hides the second call until the step has run."""
    scheme = dpc.sampling.Poisson(0.05)
    batches, model = scheme.batches((X, Y)), dense()
    ledger = dpc.accounting.Ledger(delta=1e-3)
    ledger.begin(noise_multiplier=1.1, sampling=batches)
    optimizer = dpc.keras.DPSGD(0.1, noise_multiplier=1.1, expected_batch_size=3.2)
    optimizer.build(model.trainable_variables)
    step, (x, y, w) = step_of(model, optimizer), next(iter(batches))
    error = r"private optimizers made 2.*step\(\): around one step of one optimizer"
    with pytest.raises(dpc.accounting.PrivacyMismatchError, match=error):
        with ledger.step():
            tf.function(lambda x, y: within(lambda x, y: step(x, y, w), x, y))(x, y)
    once = dpc.accounting.epsilon(1.1 / 2**0.5, 1, scheme, delta=1e-3)
    assert ledger.epsilon() >= once


def test_callbacks_that_a_tuner_copies_are_told_of_a_plan_for_each_trial():
    plan = dpc.keras.PrivacyPlan(8, 1e-3, examples=64, batch_size=16, epochs=1)
    plan.batches((X, Y))
    error = "HyperModel.fit.*search_privacy.ledgers, delta."
    for callbacks in (plan.callbacks, {"callbacks": plan.callbacks}):
        with pytest.raises(TypeError, match=error):
            copy.deepcopy(callbacks)


def discriminate(real, made):
    """The usual loop of a GAN's discriminator, on a drawn element and made rows."""
    ones, zeros = np.ones([len(real), 1]), np.zeros([len(made), 1])
    yield "two", [(real, ones), (made, zeros)]
    yield "made first", [(made, zeros), (real, ones)]
    labels = np.concatenate([ones, zeros])
    yield "both", [(tf.concat([real, made], 0), labels)]
    yield "both, made first", [(tf.concat([made, real], 0), labels)]
    yield "arrays", [(np.concatenate([real, made]), labels)]


@pytest.mark.slow
@pytest.mark.parametrize("place", range(5))
def test_a_gan_by_train_on_batch_is_sent_to_its_page(place):
    batches = dpc.sampling.Poisson(0.25).batches(X)
    ledger = dpc.accounting.Ledger(delta=1e-3)
    ledger.begin(noise_multiplier=1.0, sampling=batches)
    model = dense(1)
    model.compile(dpc.keras.DPSGD(0.1, **SETTINGS), "mse")
    real = next(iter(batches))[0]
    made = RNG.normal(size=real.shape).astype("float32")
    _, calls = list(discriminate(real, made))[place]
    with pytest.raises(
        dpc.accounting.PrivacyMismatchError, match="train_step.md#two-networks-gans"
    ):
        with ledger.step():
            for x, y in calls:
                model.train_on_batch(x, y)
