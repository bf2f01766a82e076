"""FiLM trains the documented variables only; batch normalisation is kept apart."""

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, DPAdam, L, gradients_one_at_a_time
from tests.keras.normalized_models import (
    Block,
    batchnorm_model,
    images,
    small_vit,
    vision_transformer,
)
from tests.stack import KERAS_3, keras2_only
from tfdpclip._variables import unwrapped
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import PerExampleGradients, clipped_sum, per_example_norms
from tfdpclip.keras.isolation import check_isolation
from tfdpclip.keras.normalization import FrozenBatchNormalization
from tfdpclip.keras.transfer import film


class Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.shift = tf.Variable(1.0, name="shift")
        self.blocks = [Block(), Block()]
        self.head = L.Dense(2)

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.shift)


class Plain(tf.keras.Model):
    """A subclassed model that does not say which layer is its head."""

    def __init__(self):
        super().__init__()
        self.norm = L.LayerNormalization()
        self.one = L.Dense(3)
        self.two = L.Dense(3)

    def call(self, x):
        return self.two(self.one(self.norm(x)))


def names_of(variables):
    return {unwrapped(v).name.split(":")[0] for v in variables}


# The trained variables.

# Classes, trainable and total parameters of ViT-Tiny/16: known figures.
_TINY = [
    (5, 10_565, 5_525_381, 0.191),
    (100, 28_900, 5_543_716, 0.521),
    (397, 86_221, 5_601_037, 1.539),
]


@pytest.mark.parametrize(("classes", "trainable", "total", "percent"), _TINY)
@pytest.mark.slow
def test_counts_of_vit_tiny(classes, trainable, total, percent):
    counts = film(vision_transformer(224, 16, 192, 12, 3, classes))
    assert (counts.trainable, counts.total) == (trainable, total)
    assert counts.normalization == 9_600 and len(counts.layers) == 25
    assert counts.head == trainable - 9_600
    assert counts.percent == pytest.approx(percent, abs=5e-4)
    assert f"{trainable:,} of {total:,} parameters" in str(counts)


def test_functional_model_trains_norms_and_head_only():
    model = small_vit()
    film(model)
    names = names_of(model.trainable_variables)
    norms = [f"norm{i}{part}" for i in range(2) for part in "ab"] + ["norm"]
    expected = {f"{n}/{v}" for n in norms for v in ("gamma", "beta")}
    assert names == expected | {"head/kernel", "head/bias"}


@pytest.mark.slow
def test_head_is_zero_and_the_first_step_moves_the_head_alone():
    model = small_vit()
    film(model)
    head = model.get_layer("head")
    assert not any(np.any(w) for w in head.get_weights())
    model.compile(
        DPSGD(0.1, clip=1.0, noise_multiplier=0.0, expected_batch_size=8),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    before = model.get_weights()
    model.fit(*images(size=8), batch_size=8, verbose=0)
    moved = [
        v
        for v, w in zip(model.weights, before, strict=True)
        if not np.array_equal(v.numpy(), w)
    ]
    assert names_of(head.weights) == names_of(moved)


@pytest.mark.slow
def test_frozen_weights_keep_their_values_while_training():
    model = small_vit()
    film(model, zero_head=False)
    assert np.any(model.get_layer("head").get_weights()[0])
    frozen = [(v, v.numpy()) for v in model.non_trainable_variables]
    trained = [(v, v.numpy()) for v in model.trainable_variables]
    model.compile(
        DPAdam(0.01, clip=1.0, noise_multiplier=1.0, expected_batch_size=4),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(*images(size=8), batch_size=4, verbose=0)
    assert all(np.array_equal(v.numpy(), w) for v, w in frozen)
    assert not any(np.array_equal(v.numpy(), w) for v, w in trained)


def test_variables_of_containers_freeze_around_a_trained_norm():
    model = Subclassed()
    model(tf.ones((2, 4)))
    counts = film(model)
    assert counts.trainable == 2 * 8 + 4 * 2 + 2
    frozen = names_of(model.non_trainable_variables)
    assert any(name.endswith("gain") for name in frozen)
    assert KERAS_3 or "shift" in frozen  # Keras 3 trains no tf.Variable.
    assert counts.heads == (model.head.name,)
    assert counts.total == sum(int(np.prod(v.shape)) for v in model.variables)


def test_freezing_keeps_the_order_of_variables_in_files(tmp_path):
    def built():
        model = Subclassed()
        model(tf.ones((2, 4)))
        return model

    saved, restored = built(), built()
    film(saved)
    saved.blocks[0].gain.assign(7.0)
    saved.blocks[0].count.assign(3.0)
    saved.save_weights(str(tmp_path / "some.weights.h5"))
    restored.load_weights(str(tmp_path / "some.weights.h5"))
    assert float(restored.blocks[0].gain) == 7.0
    assert float(restored.blocks[0].count) == 3.0


def test_nested_models():
    body = tf.keras.Sequential(
        [tf.keras.Input((4,)), L.Dense(6), L.LayerNormalization()], name="body"
    )
    top = tf.keras.Sequential([tf.keras.Input((6,)), L.Dense(3, name="last")])
    inputs = tf.keras.Input((4,))
    outputs = L.Softmax()(top(body(inputs)))
    model = tf.keras.Model(inputs, outputs)
    counts = film(model)
    assert (counts.trainable, counts.heads) == (12 + 21, ("last",))


def test_several_outputs_have_several_heads():
    inputs = tf.keras.Input((4,))
    x = L.LayerNormalization()(inputs)
    model = tf.keras.Model(inputs, [L.Dense(2, name="a")(x), L.Dense(3, name="b")(x)])
    counts = film(model)
    assert counts.heads == ("a", "b") and counts.head == 10 + 15


def test_deferred_sequential_model():
    model = tf.keras.Sequential([L.Dense(4), L.LayerNormalization(), L.Dense(2)])
    model.build((None, 3))
    assert film(model).trainable == 8 + 10


def test_a_part_of_the_norms():
    model = small_vit()
    counts = film(model, normalization=lambda layer: layer.name == "norm")
    assert counts.layers == ("norm",) and counts.normalization == 32


def test_filming_again_changes_nothing():
    model = Subclassed()
    model(tf.ones((2, 4)))
    assert film(model) == film(model)


@pytest.mark.parametrize("give", ["name", "layer", "list"])
def test_head_by_name_layer_or_list(give):
    model = Plain()
    model(tf.ones((2, 4)))
    model.one.kernel.assign(tf.ones_like(model.one.kernel))
    head = {"name": model.one.name, "layer": model.one, "list": [model.one]}[give]
    counts = film(model, head=head)
    assert counts.heads == (model.one.name,)
    assert not np.any(model.one.kernel) and np.any(model.two.kernel)


def test_model_as_head_is_zero_at_its_end_only():
    head = tf.keras.Sequential([tf.keras.Input((4,)), L.Dense(5), L.Dense(2)])
    inputs = tf.keras.Input((4,))
    model = tf.keras.Model(inputs, head(L.LayerNormalization()(inputs)))
    counts = film(model, head=head)
    assert counts.head == 25 + 12
    assert np.any(head.layers[0].kernel) and not np.any(head.layers[1].kernel)


def test_compiled_model_has_to_be_compiled_again():
    model = small_vit()
    model.compile("sgd", "mse")
    film(model)
    with pytest.raises((RuntimeError, ValueError), match="compile"):
        model.fit(*images(size=8), verbose=0)


# Refused models.


def test_refuses_models_that_it_cannot_film():
    dense = tf.keras.Sequential([tf.keras.Input((4,)), L.Dense(2)])
    with pytest.raises(ValueError, match="no normalisation layer.*convert_batchnorm"):
        film(dense)
    with pytest.raises(ValueError, match="no variables yet"):
        film(Subclassed())
    with pytest.raises(ValueError, match="model must be a Keras model"):
        film(L.Dense(2))
    sync = L.BatchNormalization(name="renormed")
    sync.__class__ = type("Renormed", (L.BatchNormalization,), {})
    model = tf.keras.Sequential([tf.keras.Input((4,)), sync, L.Dense(2)])
    with pytest.raises(ValueError, match="'renormed'.*variant of BatchNorm"):
        film(model)
    assert model.trainable_variables  # nothing was changed


def test_refuses_a_head_that_is_none():
    model = Plain()
    model(tf.ones((2, 4)))
    with pytest.raises(ValueError, match="has no clear head.*Pass head="):
        film(model)
    for wrong in ("nothing", L.Dense(2), 3):
        with pytest.raises(ValueError, match="head: .*Pass head="):
            film(model, head=wrong)
    with pytest.raises(ValueError, match="head must not be empty"):
        film(model, head=[])
    with pytest.raises(ValueError, match="head must be a part"):
        film(model, head=model)
    headless = tf.keras.Sequential(
        [tf.keras.Input((4,)), L.Dense(2), L.LayerNormalization()]
    )
    with pytest.raises(ValueError, match="head: .*has no kernel"):
        film(headless)
    inputs = tf.keras.Input((4,))
    x = L.LayerNormalization()(inputs)
    summed = tf.keras.Model(inputs, L.Add()([L.Dense(2)(x), L.Dense(2)(x)]))
    with pytest.raises(ValueError, match="head: .*does not come from one layer"):
        film(summed)


def test_refuses_to_set_a_shared_kernel_to_zero():
    class Tied(L.Layer):
        def __init__(self, dense):
            super().__init__()
            self.kernel = dense.kernel

        def call(self, x):
            return tf.matmul(x, self.kernel, transpose_b=True)

    inputs = tf.keras.Input((4,))
    dense = L.Dense(4, use_bias=False)
    x = L.LayerNormalization()(dense(inputs))
    model = tf.keras.Model(inputs, Tied(dense)(x))
    with pytest.raises(ValueError, match="head: .*shares a variable"):
        film(model)


@keras2_only("it trains no tf.Variable, and none of a tf.Module")
def test_variables_that_keras_cannot_freeze_are_an_error():
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.scale = tf.Variable(1.0, name="hidden")

    class Hiding(L.Layer):
        def __init__(self):
            super().__init__()
            self.module = Module()
            self.norm = L.LayerNormalization()

        def call(self, x):
            return self.norm(x) * self.module.scale

    model = tf.keras.Sequential([tf.keras.Input((4,)), Hiding(), L.Dense(2)])
    assert "hidden" in names_of(model.trainable_variables)
    with pytest.raises(ValueError, match="model keeps variables.*'hidden:0'"):
        film(model)


# Batch normalisation under FiLM.


@pytest.mark.slow
def test_batch_statistics_are_frozen_and_examples_apart(tmp_path):
    model = batchnorm_model()
    mean = np.linspace(-1, 1, 32)
    model.get_layer("bn").moving_mean.assign(mean)
    expected = model.predict(images()[0], verbose=0)
    counts = film(model, zero_head=False)
    assert counts.normalization == 64
    x, y = images()
    loss = tf.keras.losses.sparse_categorical_crossentropy
    check_isolation(model, x, y, loss=loss)
    np.testing.assert_allclose(model(x, training=True), expected, atol=1e-6)
    model.compile(
        DPSGD(1.0, clip=1.0, noise_multiplier=1.0, expected_batch_size=8),
        "sparse_categorical_crossentropy",
    )
    gamma = model.get_layer("bn").gamma.numpy()
    model.fit(x, y, batch_size=8, verbose=0)
    layer = model.get_layer("bn")
    assert np.array_equal(layer.moving_mean.numpy(), mean.astype("float32"))
    assert np.all(layer.gamma.numpy() != gamma)

    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras", compile=False)
    assert type(loaded.get_layer("bn")) is FrozenBatchNormalization
    assert not loaded.get_layer("conv").trainable
    check_isolation(loaded, x, y, loss=loss)


def test_engine_agrees_with_gradients_one_at_a_time_after_film():
    model = batchnorm_model(None)
    film(model, zero_head=False)
    x, y = images()

    def loss_of(x, y):
        return tf.keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )

    @tf.function
    def norms(x, y):
        return per_example_norms(loss_of(x, y), model.trainable_variables)

    alone = gradients_one_at_a_time(
        lambda i: loss_of(x[i : i + 1], y[i : i + 1]), model.trainable_variables, 8
    )
    np.testing.assert_allclose(norms(x, y), np.linalg.norm(alone, axis=1), rtol=1e-5)


# Costs.


@pytest.mark.slow
def test_frozen_variables_are_unknown_to_the_engine(monkeypatch, recwarn):
    seen = []
    original = PerExampleGradients.__init__

    def spy(self, *args, **options):
        original(self, *args, **options)
        seen.append(self)

    monkeypatch.setattr(PerExampleGradients, "__init__", spy)
    model = small_vit()
    counts = film(model)
    optimizer = DPAdam(0.01, clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
    model.compile(
        optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    model.fit(*images(size=8), batch_size=8, verbose=0)
    assert seen
    for gradients in seen:
        sizes = [int(np.prod(v.shape)) for v in gradients.variables]
        assert sum(sizes) == counts.trainable
    # Adam's two slots for each trained variable, the clip state and the counters.
    slots = [v for v in optimizer.variables if v.shape.rank]
    assert sum(int(np.prod(v.shape)) for v in slots) == 2 * counts.trainable
    # No variable takes the slow path.
    assert not [w for w in recwarn if "tfdpclip" in str(w.filename)]


@pytest.mark.slow
def test_no_gradient_below_the_first_trained_layer():
    """The frozen embedding is not differentiated: no filter gradient, no products.

    A check goes on to the data, in copies that a step does not run.
    """
    model = small_vit()
    film(model, zero_head=False)
    x, y = images(size=8)

    @tf.function
    def sums(x, y):
        losses = tf.keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )
        variables, clip = model.trainable_variables, FixedClip(1.0)
        return clipped_sum(losses, variables, clip, check_gradients="never")[0]

    ops = [op.type for op in sums.get_concrete_function(x, y).graph.get_operations()]
    assert ops.count("Conv2D") == 1
    assert not any(kind.startswith("Conv2DBackprop") for kind in ops)
