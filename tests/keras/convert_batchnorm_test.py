"""A model's batch normalisation is converted to group normalisation, or refused."""

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.helpers import L
from tests.keras.normalized_models import Block, batchnorm_model, images, small_vit
from tfdpclip.keras.isolation import check_isolation
from tfdpclip.keras.normalization import convert_batchnorm
from tfdpclip.keras.transfer import film


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
    # 4x4 positions: a channel in a group has 16 elements.
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

    # Before variables are made as well: making them would lead to no conversion.
    model = Hidden()
    with pytest.raises(ValueError, match="subclass of tf.keras.Model.*GroupNorm"):
        convert_batchnorm(model)
    model(tf.ones((2, 3)))
    with pytest.raises(ValueError, match="subclass of tf.keras.Model.*GroupNorm"):
        convert_batchnorm(model)
    with pytest.raises(ValueError, match=r"no variables yet.*model\(x\[:1\]\)"):
        convert_batchnorm(tf.keras.Sequential([L.BatchNormalization()]))

    wrapped = tf.keras.Sequential(
        [tf.keras.Input((2, 3)), L.TimeDistributed(L.BatchNormalization())]
    )
    with pytest.raises(ValueError, match="BatchNormalization inside.*GroupNorm"):
        convert_batchnorm(wrapped)


def _with(method):
    """Models whose classes have a method of their own, and their classes' names."""

    def own(self, *args, **options):
        return getattr(super(type(self), self), method)(*args, **options)

    class Chain(tf.keras.Sequential):
        pass

    class Task(tf.keras.Model):
        def __init__(self, units):
            inputs = tf.keras.Input((4,))
            super().__init__(inputs, L.Dense(units)(L.BatchNormalization()(inputs)))
            self.units = units

        def get_config(self):
            return {"units": self.units}

    for made in (Chain, Task):
        setattr(made, method, own)
    return Chain([tf.keras.Input((4,)), L.BatchNormalization()]), Task(2)


@pytest.mark.parametrize(
    "method", ["train_step", "compute_loss", "fit", "predict", "predict_step"]
)
def test_a_copy_that_would_train_or_predict_otherwise_is_refused(method):
    for model in _with(method):
        name = type(model).__name__
        with pytest.raises(ValueError, match=f"a {name} with its own {method}.*Group"):
            convert_batchnorm(model)


def test_a_class_that_the_copy_keeps_is_converted_with_its_methods():
    class Custom(tf.keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    inputs = tf.keras.Input((4,))
    model = Custom(inputs, L.Dense(2)(L.BatchNormalization()(inputs)))
    assert isinstance(convert_batchnorm(model), Custom)
    # A part has no training of its own: its class has further methods only.
    chain, task = _with("describe")
    for part in (chain, task):
        assert convert_batchnorm(part).output_shape == part.output_shape


class Hinge(tf.keras.regularizers.Regularizer):
    """A regularizer that no file can hold: it has no get_config."""

    def __call__(self, x):
        return 0.1 * tf.reduce_sum(tf.nn.relu(x))


def doubled(x):
    return 2.0 * x


class Argument(L.Layer):
    """A layer with a function and a number of units as arguments, and no get_config."""

    def __init__(self, function, units):
        super().__init__()
        self.function, self.dense = function, L.Dense(units)

    def call(self, x):
        return self.function(self.dense(x))


class Forgetful(L.Layer):
    """A layer whose config forgets how many units it has."""

    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.dense = L.Dense(units)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return L.Layer.get_config(L.Layer(name=self.name))


class Inner(tf.keras.Model):
    def __init__(self, function, units):
        super().__init__()
        self.inner = Argument(function, units)

    def call(self, x):
        return self.inner(x)


ODD = {
    "lambda": (lambda: L.Lambda(lambda x: x * 2.0), False),
    "activity regulariser": (lambda: L.Dense(4, activity_regularizer=Hinge()), True),
    "activation": (lambda: L.Dense(4, activation=lambda x: 2.0 * x), True),
    "layer": (lambda: Argument(doubled, 4), None),
    "layer of a lambda": (lambda: Argument(lambda x: 2.0 * x, 4), True),
    "model": (lambda: Inner(lambda x: 2.0 * x, 4), True),
    "wrong config": (lambda: Forgetful(4), True),
}


@pytest.mark.filterwarnings("ignore:convert_batchnorm shares")
@pytest.mark.parametrize("place", ["functional", "sequential", "nested"])
@pytest.mark.parametrize("kind", ODD)
def test_layers_that_cannot_be_made_again_are_kept_as_they_are(kind, place):
    """Wherever the layers are, only normalisation changes the model's outputs."""
    made, shared = ODD[kind]
    odd = made()
    x = tf.keras.Input((16,))
    if place == "functional":
        model = tf.keras.Model(x, L.BatchNormalization(name="bn")(odd(x)))
    else:
        model = tf.keras.Sequential([x, odd, L.BatchNormalization(name="bn")])
    inner = model
    if place == "nested":
        model = tf.keras.Model(x, L.Dense(2)(inner(x)))
    new = convert_batchnorm(model)
    newer = new if place != "nested" else new.get_layer(inner.name)
    assert type(newer.get_layer("bn")) is L.GroupNormalization
    if shared is not None:
        assert (newer.get_layer(odd.name) is odd) == shared or not odd.weights
    data = np.random.default_rng(0).normal(size=(3, 16)).astype("float32")
    expected = newer.get_layer("bn")(odd(data))
    np.testing.assert_allclose(newer(data), expected, rtol=1e-5)
    model(data), new(data)
    assert len(new.losses) == len(model.losses)
    np.testing.assert_allclose(new.losses, model.losses, rtol=1e-5)


def test_weights_that_two_models_share_are_named_and_all_others_copied():
    x = tf.keras.Input((16,))
    odd = L.Dense(8, activity_regularizer=Hinge(), name="odd")
    plain = L.Dense(8, name="plain")
    model = tf.keras.Model(x, L.BatchNormalization()(plain(Forgetful(4)(odd(x)))))
    with pytest.warns(UserWarning, match="'odd' .a Dense., '.*' .a Forgetful.: get"):
        new = convert_batchnorm(model)
    assert new.get_layer("odd") is odd
    assert new.get_layer("plain") is not plain
    np.testing.assert_array_equal(new.get_layer("plain").kernel, plain.kernel)


@pytest.mark.filterwarnings("error:convert_batchnorm shares")
def test_nothing_is_said_of_layers_that_have_no_weights_to_share():
    x = tf.keras.Input((16,))
    model = tf.keras.Model(x, L.BatchNormalization()(L.Lambda(lambda x: -x)(x)))
    assert convert_batchnorm(model)(tf.ones([2, 16])).shape == (2, 16)


def test_a_layer_in_two_models_is_one_layer_in_the_new_ones():
    shared = L.Dense(3, name="shared")
    inner = tf.keras.Sequential([tf.keras.Input((3,)), shared, L.BatchNormalization()])
    inputs = tf.keras.Input((3,))
    siamese = tf.keras.Model(inputs, shared(inner(inputs)))
    new = convert_batchnorm(siamese)
    assert new.get_layer("shared") is new.get_layer(inner.name).get_layer("shared")
    assert new.get_layer("shared") is not shared
    assert len(new.trainable_variables) == len(siamese.trainable_variables) == 4
    np.testing.assert_array_equal(new.get_layer("shared").kernel, shared.kernel)


def test_arithmetic_between_layers_is_kept_by_the_conversion():
    """As MobileNetV3 has `x + 3`, which is no layer in Keras 3."""
    inputs = tf.keras.Input((4, 4, 3))
    x = tf.keras.layers.Conv2D(4, 1)(inputs)
    x = tf.keras.layers.BatchNormalization()(x)
    model = tf.keras.Model(inputs, tf.keras.layers.ReLU()(x + 3.0) * 2.0)
    converted = convert_batchnorm(model)
    kinds = [type(layer).__name__ for layer in converted.layers]
    assert "GroupNormalization" in kinds and "BatchNormalization" not in kinds
    x = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype("float32")
    assert float(tf.reduce_mean(converted(x))) == pytest.approx(6.0, abs=0.5)
