"""FiLM trains what it says and nothing else; batch normalisation is kept apart."""

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import DPSGD, DPAdam, L, gradients_one_at_a_time
from tests.stack import KERAS_3, keras2_only
from tfdpclip._variables import unwrapped
from tfdpclip.clipping import FixedClip
from tfdpclip.gradients import PerExampleGradients, clipped_sum, per_example_norms
from tfdpclip.keras.isolation import check_isolation
from tfdpclip.keras.normalization import (
    FrozenBatchNormalization,
    convert_batchnorm,
)
from tfdpclip.keras.transfer import film


class ClassToken(L.Layer):
    """Puts a trained token in front, and adds trained positions."""

    def build(self, shape):
        self.token = self.add_weight(name="token", shape=(1, 1, shape[-1]))
        self.positions = self.add_weight(
            name="positions", shape=(1, shape[1] + 1, shape[-1])
        )

    def call(self, x):
        token = tf.tile(self.token, [tf.shape(x)[0], 1, 1])
        return tf.concat([token, x], 1) + self.positions


class First(L.Layer):
    def call(self, x):
        return x[:, 0]


def vision_transformer(size, patch, width, depth, heads, classes):
    """The architecture of Dosovitskiy et al. (2021), without dropout."""
    inputs = tf.keras.Input((size, size, 3))
    x = L.Conv2D(width, patch, patch, name="embedding")(inputs)
    x = ClassToken(name="tokens")(L.Reshape((-1, width))(x))
    for i in range(depth):
        y = L.LayerNormalization(epsilon=1e-6, name=f"norm{i}a")(x)
        x = x + L.MultiHeadAttention(heads, width // heads, name=f"attention{i}")(y, y)
        y = L.LayerNormalization(epsilon=1e-6, name=f"norm{i}b")(x)
        y = L.Dense(4 * width, tf.nn.gelu, name=f"in{i}")(y)
        x = x + L.Dense(width, name=f"out{i}")(y)
    x = First()(L.LayerNormalization(epsilon=1e-6, name="norm")(x))
    return tf.keras.Model(inputs, L.Dense(classes, name="head")(x))


def small_vit():
    return vision_transformer(8, 2, 16, 2, 2, 3)


class Block(L.Layer):
    """A layer with a variable of its own around a normalisation layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = L.LayerNormalization()
        self.dense = L.Dense(4)

    def build(self, shape):
        self.gain = self.add_weight(name="gain", shape=(), initializer="ones")
        self.count = self.add_weight(name="count", shape=(), trainable=False)

    def call(self, x):
        return self.dense(self.norm(x)) * self.gain


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


def batchnorm_model(last="softmax"):
    inputs = tf.keras.Input((6, 6, 3))
    x = L.Conv2D(32, 3, use_bias=False, name="conv")(inputs)
    x = L.BatchNormalization(name="bn")(x)
    x = L.ReLU()(x)
    x = L.GlobalAveragePooling2D()(x)
    x = L.Dense(4, name="dense")(x)
    return tf.keras.Model(inputs, L.Activation(last)(x) if last else x)


def images(count=8, size=6, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, size, size, 3)).astype("float32")
    return x, rng.integers(3, size=count)


# What trains.

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


# What is refused.


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
    with pytest.raises(ValueError, match="head: which layer.*Pass head="):
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


# What it costs.


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
        return clipped_sum(losses, variables, clip, check_isolation="never")[0]

    ops = [op.type for op in sums.get_concrete_function(x, y).graph.get_operations()]
    assert ops.count("Conv2D") == 1
    assert not any(kind.startswith("Conv2DBackprop") for kind in ops)


# From batch to group normalisation.


@pytest.mark.slow
def test_conversion_copies_weights_and_leaves_the_model_alone():
    model = batchnorm_model()
    bn = model.get_layer("bn")
    bn.gamma.assign(np.linspace(0.5, 2, 32))
    bn.beta.assign(np.linspace(-1, 1, 32))
    weights = model.get_weights()
    new = convert_batchnorm(model)
    layer = new.get_layer("bn")
    assert type(layer) is L.GroupNormalization
    # 4x4 positions: one channel in a group has 16 elements.
    assert layer.groups == 32 and layer.epsilon == bn.epsilon
    np.testing.assert_array_equal(layer.gamma, bn.gamma)
    np.testing.assert_array_equal(layer.beta, bn.beta)
    for name in ("conv", "dense"):
        pairs = zip(
            new.get_layer(name).weights, model.get_layer(name).weights, strict=True
        )
        for ours, theirs in pairs:
            assert ours is not theirs
            np.testing.assert_array_equal(ours, theirs)
    for now, before in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(now, before)
    assert type(model.get_layer("bn")) is L.BatchNormalization
    x, y = images()
    loss = tf.keras.losses.sparse_categorical_crossentropy
    check_isolation(new, x, y, loss=loss)
    # By hand: each channel is its own group here.
    z = tf.nn.conv2d(x, model.get_layer("conv").kernel, 1, "VALID").numpy()
    z = (z - z.mean((1, 2), keepdims=True)) / np.sqrt(
        z.var((1, 2), keepdims=True) + bn.epsilon
    )
    z = np.maximum(z * bn.gamma.numpy() + bn.beta.numpy(), 0).mean((1, 2))
    kernel, bias = model.get_layer("dense").get_weights()
    expected = tf.nn.softmax(z @ kernel + bias)
    np.testing.assert_allclose(new(x), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "groups", "expected"),
    [
        ((8, 8, 48), 32, 24),
        ((8, 8, 7), 32, 7),
        ((8, 8, 64), 4, 4),
        ((None, None, 64), 32, 32),
        ((1, 1, 64), 32, 4),
        ((64,), 32, 4),
        ((8,), 32, 1),
        ((5, 64), 32, 16),
    ],
)
def test_groups_fit_the_channels(shape, groups, expected):
    inputs = tf.keras.Input(shape)
    model = tf.keras.Model(inputs, L.BatchNormalization(name="bn")(inputs))
    layer = convert_batchnorm(model, groups).get_layer("bn")
    assert layer.groups == expected
    x = np.random.default_rng(0).normal(size=[4, *(n or 6 for n in shape)])
    y = layer(tf.constant(x, tf.float32)).numpy()
    assert np.abs(y).max() > 0.5 and np.all(np.isfinite(y))


def test_channels_first_and_missing_scale():
    inputs = tf.keras.Input((32, 6, 6))
    layer = L.BatchNormalization(axis=1, scale=False, name="bn")
    model = tf.keras.Model(inputs, layer(inputs))
    layer.beta.assign(np.arange(32.0))
    new = convert_batchnorm(model).get_layer("bn")
    assert new.gamma is None
    np.testing.assert_array_equal(new.beta, np.arange(32.0))
    y = new(np.random.default_rng(0).normal(size=(2, 32, 6, 6)).astype("float32"))
    np.testing.assert_allclose(
        np.mean(y, (2, 3)), np.tile(np.arange(32), (2, 1)), atol=1e-4
    )


def test_conversion_of_nested_and_sequential_models():
    body = tf.keras.Sequential(
        [tf.keras.Input((6, 6, 3)), L.Conv2D(16, 3), L.BatchNormalization(), L.ReLU()],
        name="body",
    )
    tail = tf.keras.Sequential(
        [tf.keras.Input((16,)), Block(name="block"), L.Dense(2)], name="tail"
    )
    tail.get_layer("block").gain.assign(3.0)
    tail.get_layer("block").dense.trainable = False
    inputs = tf.keras.Input((6, 6, 3))
    outputs = tail(L.GlobalAveragePooling2D()(body(inputs)))
    model = tf.keras.Model(inputs, outputs)
    new = convert_batchnorm(model)
    kinds = [type(layer) for layer in new._flatten_layers()]
    assert L.BatchNormalization not in kinds and L.GroupNormalization in kinds
    assert new.get_layer("body") is not body
    block = new.get_layer("tail").get_layer("block")
    assert float(block.gain) == 3.0 and not block.dense.trainable
    np.testing.assert_array_equal(
        block.dense.kernel, tail.get_layer("block").dense.kernel
    )
    np.testing.assert_array_equal(
        new.get_layer("body").layers[0].kernel, body.layers[0].kernel
    )
    sequential = convert_batchnorm(body)
    assert isinstance(sequential, tf.keras.Sequential)
    assert film(convert_batchnorm(batchnorm_model())).normalization == 64


def test_a_layer_used_twice_is_converted_once():
    inputs = tf.keras.Input((4, 16))
    bn = L.BatchNormalization(name="bn")
    model = tf.keras.Model(inputs, bn(bn(inputs)))
    new = convert_batchnorm(model)
    assert len(new.trainable_variables) == 2
    assert [type(layer) for layer in new.layers[1:]] == [L.GroupNormalization]


@pytest.mark.slow
def test_conversion_of_a_residual_network():
    model = tf.keras.applications.ResNet50(
        weights=None, input_shape=(64, 64, 3), classes=5
    )
    new = convert_batchnorm(model)
    counts = film(new)
    assert counts.normalization == 53_120 and len(counts.layers) == 53
    assert counts.heads == ("predictions",)
    assert new(np.zeros((2, 64, 64, 3), "float32")).shape == (2, 5)


def test_refuses_models_that_it_cannot_rebuild():
    with pytest.raises(ValueError, match="model has no BatchNormalization"):
        convert_batchnorm(small_vit())
    for wrong in (0, -1, 2.5, True, float("nan")):
        with pytest.raises(ValueError, match="groups must be an integer"):
            convert_batchnorm(batchnorm_model(), wrong)

    class Hidden(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.bn = L.BatchNormalization()

        def call(self, x):
            return self.bn(x)

    model = Hidden()
    with pytest.raises(ValueError, match="no variables yet"):
        convert_batchnorm(model)
    model(tf.ones((2, 3)))
    with pytest.raises(ValueError, match="subclass of tf.keras.Model.*GroupNorm"):
        convert_batchnorm(model)

    wrapped = tf.keras.Sequential(
        [tf.keras.Input((2, 3)), L.TimeDistributed(L.BatchNormalization())]
    )
    with pytest.raises(ValueError, match="BatchNormalization inside.*GroupNorm"):
        convert_batchnorm(wrapped)

    class Argument(L.Layer):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def call(self, x):
            return x

    shared = L.Dense(3)
    inner = tf.keras.Sequential([tf.keras.Input((3,)), shared, L.BatchNormalization()])
    inputs = tf.keras.Input((3,))
    siamese = tf.keras.Model(inputs, shared(inner(inputs)))
    with pytest.raises(ValueError, match="in more than one model"):
        convert_batchnorm(siamese)

    odd = tf.keras.Sequential(
        [tf.keras.Input((3,)), Argument(lambda x: x), L.BatchNormalization()]
    )
    with pytest.raises(ValueError, match="cannot be made again.*get_config"):
        convert_batchnorm(odd)


def test_arithmetic_between_layers_is_kept_by_the_conversion():
    """As MobileNetV3 has it: `x + 3` is no layer in Keras 3."""
    inputs = tf.keras.Input((4, 4, 3))
    x = tf.keras.layers.Conv2D(4, 1)(inputs)
    x = tf.keras.layers.BatchNormalization()(x)
    model = tf.keras.Model(inputs, tf.keras.layers.ReLU()(x + 3.0) * 2.0)
    converted = convert_batchnorm(model)
    kinds = [type(layer).__name__ for layer in converted.layers]
    assert "GroupNormalization" in kinds and "BatchNormalization" not in kinds
    x = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype("float32")
    assert float(tf.reduce_mean(converted(x))) == pytest.approx(6.0, abs=0.5)
