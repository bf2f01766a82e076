"""Wrappers that may surround a `clipped_mean`, and wrappers that void its guarantee."""

import collections
import re

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.federated.helpers import NESTED, flat, nested, updates
from tfdpclip import federated
from tfdpclip.federated import _wrappers

FLOAT = tff.TensorType(np.float32)
SGD = tff.learning.optimizers.build_sgdm(0.1)
SPEC = collections.OrderedDict(
    x=tf.TensorSpec([None, 2], tf.float32), y=tf.TensorSpec([None, 1], tf.float32)
)


def model_fn():
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    loss = tf.keras.losses.MeanSquaredError()
    return tff.learning.models.from_keras_model(model, loss=loss, input_spec=SPEC)


def plain(**options):
    return federated.clipped_mean(0.0, 5, 0.5, **options)


def weighted():
    return plain(weight_cap=10)


def client_norms(value, *weight):
    del weight

    @tff.tensorflow.computation
    def norm(x):
        return tf.linalg.global_norm(tf.nest.flatten(x))

    total = tff.federated_sum(tff.federated_map(norm, value))
    return tff.federated_zip(collections.OrderedDict(norms=total))


def largest(result):
    @tff.tensorflow.computation
    def of(x):
        leaves = [tf.reduce_max(leaf) for leaf in tf.nest.flatten(x)]
        return collections.OrderedDict(largest=tf.reduce_max(leaves))

    return tff.federated_map(of, result)


def adaptive_norm():
    return tff.aggregators.PrivateQuantileEstimationProcess.no_noise(1.0, 0.5, 0.1)


def gaussian_query():
    # A dependency of TensorFlow Federated.
    return pytest.importorskip("tensorflow_privacy").GaussianSumQuery(1.0, 1.0)


AGGREGATORS = tff.aggregators
REFUSED = {
    "MeanFactory": (AGGREGATORS.MeanFactory, "exact sum of the clients' weights"),
    "weights of a MeanFactory": (
        lambda ours: AGGREGATORS.MeanFactory(weight_sum_factory=ours),
        "exact sum of the clients' weights",
    ),
    "UnweightedMeanFactory": (
        AGGREGATORS.UnweightedMeanFactory,
        "exact number of clients",
    ),
    "counts of an UnweightedMeanFactory": (
        lambda ours: AGGREGATORS.UnweightedMeanFactory(count_sum_factory=ours),
        "exact number of clients",
    ),
    "zeroing": (
        lambda ours: AGGREGATORS.zeroing_factory(9.0, ours),
        "exact counts of clients",
    ),
    "adaptive zeroing": (
        lambda ours: AGGREGATORS.zeroing_factory(adaptive_norm(), ours),
        "exact counts of clients",
    ),
    "clipping": (
        lambda ours: AGGREGATORS.clipping_factory(9.0, ours),
        "exact counts of clients",
    ),
    "measurements of clients": (
        lambda ours: AGGREGATORS.add_measurements(
            ours, client_measurement_fn=lambda value: client_norms(value)
        ),
        "numbers of the clients without noise",
    ),
    "debug measurements": (
        tff.learning.add_debug_measurements,
        "numbers of the clients without noise",
    ),
    "debug measurements, mixed": (
        tff.learning.add_debug_measurements_with_mixed_dtype,
        "numbers of the clients without noise",
    ),
    "DifferentiallyPrivateFactory": (
        lambda ours: AGGREGATORS.DifferentiallyPrivateFactory(gaussian_query(), ours),
        "adds noise a second time",
    ),
    "clipped_mean": (
        lambda ours: plain(inner=federated.InnerSum(ours)),
        "adds noise a second time",
    ),
    "one within another": (
        lambda ours: AGGREGATORS.concat_factory(
            AGGREGATORS.HadamardTransformFactory(
                AGGREGATORS.UnweightedMeanFactory(AGGREGATORS.concat_factory(ours))
            )
        ),
        "exact number of clients",
    ),
}


def create(factory):
    kinds = [NESTED]
    if isinstance(factory, tff.aggregators.WeightedAggregationFactory):
        kinds.append(FLOAT)
    return factory.create(*kinds)


@pytest.mark.parametrize("name", REFUSED)
def test_wrappers_that_release_what_has_no_noise_are_refused(name):
    around, why = REFUSED[name]
    with pytest.raises(ValueError, match=why) as info:
        create(around(plain()))
    text = str(info.value)
    assert "around clipped_mean" in text and re.search("Leave|Give", text)
    assert len(text.split()) < 60


@pytest.mark.parametrize(
    "around",
    [
        lambda ours: AGGREGATORS.zeroing_factory(9.0, ours),
        lambda ours: AGGREGATORS.clipping_factory(9.0, ours),
        lambda ours: AGGREGATORS.add_measurements(
            ours, client_measurement_fn=lambda value, weight: client_norms(value)
        ),
        tff.learning.add_debug_measurements,
    ],
)
def test_wrappers_of_a_weighted_mean_are_refused_alike(around):
    with pytest.raises(ValueError, match="around clipped_mean"):
        create(around(weighted()))


def test_a_quantile_of_noised_means_is_refused():
    privacy = pytest.importorskip("tensorflow_privacy")
    query = privacy.NoPrivacyQuantileEstimatorQuery(1.0, 0.5, 0.1, True)
    with pytest.raises(ValueError, match="PrivateQuantileEstimationProcess around"):
        AGGREGATORS.PrivateQuantileEstimationProcess(query, plain())


HARMLESS = {
    "as_weighted_aggregator": AGGREGATORS.as_weighted_aggregator,
    "concat_factory": AGGREGATORS.concat_factory,
    "Hadamard": AGGREGATORS.HadamardTransformFactory,
    "Fourier": AGGREGATORS.DiscreteFourierTransformFactory,
    "measurements of the result": lambda ours: AGGREGATORS.add_measurements(
        ours, server_measurement_fn=largest
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.thinned(5)
def test_wrappers_that_only_move_or_rotate_work(name):
    """Wrappers of each client's update alone, and of the result."""
    data = [nested(x) for x in updates(np.random.default_rng(0), 5, 11)]
    bare = create(plain())
    expected = flat(bare.next(bare.initialize(), data).result)
    process = create(HARMLESS[name](plain()))
    weights = [[np.float32(1.0)] * 5] * process.is_weighted
    output = process.next(process.initialize(), data, *weights)
    # The flat clip sees the same norm.
    np.testing.assert_allclose(flat(output.result), expected, atol=1e-6)


@pytest.mark.parametrize(
    "around",
    [
        AGGREGATORS.concat_factory,
        lambda ours: AGGREGATORS.add_measurements(ours, server_measurement_fn=largest),
    ],
)
@pytest.mark.thinned(2)
def test_a_weighted_mean_within_what_is_harmless_works(around):
    data = [nested(x) for x in updates(np.random.default_rng(0), 3, 11)]
    weights = [np.float32(w) for w in (1, 10, 500)]
    results = []
    for factory in (weighted(), around(weighted())):
        process = factory.create(NESTED, FLOAT)
        output = process.next(process.initialize(), data, weights)
        results.append(flat(output.result))
    np.testing.assert_allclose(*results, atol=1e-6)


def test_every_wrapper_of_tff_was_looked_at():
    """A new release of TFF with a new wrapper fails here."""
    kinds = (
        tff.aggregators.UnweightedAggregationFactory,
        tff.aggregators.WeightedAggregationFactory,
    )
    # They take no factory.
    alone = {"SumFactory", "SecureSumFactory", "SecureModularSumFactory"}
    alone |= {"EncodedSumFactory", "UnweightedReservoirSamplingFactory"}
    public = {
        name
        for name, value in vars(tff.aggregators).items()
        if isinstance(value, type) and issubclass(value, kinds)
    } - {kind.__name__ for kind in kinds}
    assert public - alone <= _wrappers._HARMLESS | set(_wrappers._REFUSED)


def test_an_unknown_wrapper_of_tff_is_refused():
    class Later(tff.aggregators.UnweightedAggregationFactory):
        __module__ = "tensorflow_federated.python.aggregators.later"

        def create(self, value_type):
            return plain().create(value_type)

    with pytest.raises(ValueError, match="Later around clipped_mean is not known"):
        Later().create(NESTED)


def test_a_factory_of_the_callers_own_is_its_own_affair():
    class Mine(tff.aggregators.UnweightedAggregationFactory):
        def create(self, value_type):
            return plain().create(value_type)

    assert create(Mine()).next.type_signature == create(plain()).next.type_signature
    # A process made beside a mean, not within one, is not refused either.
    assert create(AGGREGATORS.MeanFactory()).is_weighted


OF_THE_OTHER_KIND = {
    "weighted_fed_avg": (SGD,),
    "weighted_fed_prox": (0.1, SGD),
    "weighted_fed_avg_with_optimizer_schedule": (lambda rate: SGD, lambda rate: SGD),
    "unweighted_fed_avg": (SGD,),
    "unweighted_fed_prox": (0.1, SGD),
}


@pytest.mark.parametrize("name", OF_THE_OTHER_KIND)
def test_an_error_of_tff_names_weight_cap(name):
    """TensorFlow Federated refuses the kind, and shows the name of the class."""
    build = getattr(tff.learning.algorithms, f"build_{name}")
    of_weights = name.startswith("weighted")
    ours, kind = (plain(), "Without") if of_weights else (weighted(), "With")
    with pytest.raises(TypeError, match=f"found .*ClippedMean{kind}WeightCap"):
        build(model_fn, *OF_THE_OTHER_KIND[name], model_aggregator=ours)


def test_federated_sgd_needs_weight_cap():
    with pytest.raises(ValueError, match=r"clipped_mean\(..., weight_cap=100\)"):
        tff.learning.algorithms.build_fed_sgd(model_fn, model_aggregator=plain())


def test_a_second_release_in_a_round_is_refused():
    for name, ours in (("weighted", weighted()), ("unweighted", plain())):
        build = getattr(tff.learning.algorithms, f"build_{name}_mime_lite")
        with pytest.raises(ValueError, match="full gradients"):
            build(model_fn, SGD, model_aggregator=ours)


@pytest.mark.slow
def test_learning_processes_take_what_fits_them():
    make = tff.learning.algorithms
    rotated = AGGREGATORS.concat_factory(
        AGGREGATORS.HadamardTransformFactory(plain(secure=True))
    )
    for process in (
        make.build_unweighted_fed_avg(model_fn, SGD, model_aggregator=plain()),
        make.build_weighted_fed_avg(model_fn, SGD, model_aggregator=weighted()),
        make.build_weighted_fed_prox(model_fn, 0.1, SGD, model_aggregator=weighted()),
        make.build_fed_sgd(model_fn, model_aggregator=weighted()),
        make.build_fed_kmeans(3, (2,), sum_aggregator=plain()),
        make.build_unweighted_fed_avg(model_fn, SGD, model_aggregator=rotated),
    ):
        assert "clip=" in str(process.initialize.type_signature.result)
