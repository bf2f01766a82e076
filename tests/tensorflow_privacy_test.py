"""Queries and runs of tensorflow-privacy: equal numbers here, where it is installed."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tfdpclip.clipping import as_rule
from tfdpclip.mechanism import Mechanism
from tfdpclip.noise import GaussianNoise
from tfdpclip.tensorflow_privacy import from_query, optimizer_arguments

tfp = pytest.importorskip("tensorflow_privacy")
nested_query = pytest.importorskip("tensorflow_privacy.privacy.dp_query.nested_query")


def adaptive(z=0.0, stddev=0.0, geometric=True):
    return tfp.QuantileAdaptiveClipSumQuery(
        initial_l2_norm_clip=0.5,
        noise_multiplier=z,
        target_unclipped_quantile=0.7,
        learning_rate=0.2,
        clipped_count_stddev=stddev,
        expected_num_records=20,
        geometric_update=geometric,
    )


def mechanism_of(query, records=None):
    settings = from_query(query, records)
    rule = as_rule(settings.clip)
    return Mechanism(rule, settings.noise_multiplier, settings.records)


@pytest.mark.slow
@pytest.mark.parametrize(
    "query",
    [
        adaptive(),
        adaptive(geometric=False),
        tfp.GaussianSumQuery(0.8, 0.0),
        tfp.NormalizedQuery(tfp.GaussianSumQuery(0.8, 0.0), 20.0),
    ],
    ids=["geometric", "linear", "gaussian", "normalized"],
)
def test_thirty_rounds_without_noise_give_the_same_numbers(query):
    mechanism = mechanism_of(query, 20.0)
    state, theirs = mechanism.rule.initial_state(), query.initial_global_state()
    divisor = 1.0 if isinstance(query, tfp.NormalizedQuery) else 20.0
    rng = np.random.default_rng(0)
    for _ in range(30):
        records = rng.normal(size=(20, 3)).astype(np.float32)
        params = query.derive_sample_params(theirs)
        sample = query.initial_sample_state(tf.zeros(3))
        for record in records:
            sample = query.accumulate_record(params, sample, tf.constant(record))
        result, theirs, _ = query.get_noised_result(sample, theirs)
        weights, bits = mechanism.clip(tf.norm(records, axis=1), state)
        total = tf.linalg.matvec(records, weights, transpose_a=True)
        counts = tf.reduce_sum(bits, axis=0)
        release = mechanism.release(state, [total], counts, GaussianNoise())
        state = release.next_state
        np.testing.assert_allclose(release.means[0], result / divisor, atol=5e-7)
    if isinstance(query, tfp.QuantileAdaptiveClipSumQuery):
        clip = float(query.derive_metrics(theirs)["clip"])
        assert float(mechanism.rule.clip_norm(state)) == pytest.approx(clip, rel=5e-6)


def test_a_query_with_two_divisors_is_refused():
    with pytest.raises(ValueError, match="denominator=10 .*expected_num_records=20"):
        from_query(tfp.NormalizedQuery(adaptive(), 10.0))
    assert from_query(tfp.NormalizedQuery(adaptive(), 20.0)).records == 20


def test_the_noise_of_sum_and_count_is_that_of_the_query():
    mechanism = mechanism_of(adaptive(z=1.1, stddev=3.0))
    assert mechanism.count_stddevs == (3.0,)
    assert mechanism.gradient_noise_multiplier() == pytest.approx(1.1, rel=1e-9)
    assert mechanism.noise_multiplier < 1.1
    fixed = mechanism_of(tfp.GaussianSumQuery(2.0, 2.2), 10)
    assert fixed.noise_stddevs(()).numpy() == pytest.approx([2.2])


def test_an_exact_count_is_refused():
    with pytest.raises(ValueError, match="clipped_count_stddev=expected_num_records"):
        from_query(adaptive(z=1.0))


def tree(kind, efficient=True):
    return kind.build_l2_gaussian_query(
        2.0, 1.5, tf.TensorSpec([3]), use_efficient=efficient
    )


@pytest.mark.parametrize("efficient", [True, False])
def test_tree_and_restart_queries_give_clip_noise_and_a_line(efficient):
    query = tree(tfp.TreeResidualSumQuery, efficient)
    restart = tfp.RestartQuery(
        query, tfp.restart_query.PeriodicRoundRestartIndicator(3)
    )
    for each in (query, restart, tree(tfp.TreeCumulativeSumQuery, efficient)):
        settings = from_query(each, 10)
        assert (as_rule(settings.clip).norm, settings.noise_multiplier) == (2.0, 1.5)
        for name, line in (("optimizer", "PrivacyPlan"), ("aggregator", "noise=")):
            with pytest.raises(ValueError, match=line):
                getattr(settings, name)


def test_a_distributed_query_has_the_noise_of_all_its_clients():
    query = tfp.DistributedDiscreteGaussianSumQuery(10.0, 2.0)
    settings = from_query(query, 100).aggregator
    assert settings["noise_multiplier"] == pytest.approx(2.0)
    assert (settings["noise"], settings["secure"]) == ("distributed", True)
    with pytest.raises(ValueError, match="records=100"):
        from_query(query)


def test_a_query_without_a_counterpart_or_records_names_what_to_write():
    with pytest.raises(ValueError, match="records=100"):
        _ = from_query(tfp.GaussianSumQuery(1.0, 1.0)).optimizer
    nested = nested_query.NestedSumQuery([tfp.GaussianSumQuery(1.0, 1.0)])
    for call in (from_query, as_rule):
        with pytest.raises(ValueError, match=r"dpc\.LayerwiseClip"):
            call(nested)


@pytest.mark.slow
def test_clip_takes_a_query_in_optimizers_and_aggregators():
    settings = {"noise_multiplier": 1.0, "expected_batch_size": 20}
    optimizer = dpc.keras.DPSGD(0.1, clip=adaptive(1.1, 3.0), **settings)
    assert optimizer.clip == dpc.QuantileClip(0.7, 0.5, 0.2, count_stddev=3.0)
    pytest.importorskip("tensorflow_federated")
    for query in (adaptive(1.1, 3.0), tfp.GaussianSumQuery(1.0, 1.1)):
        factory = dpc.federated.clipped_mean(1.0, 20, clip=query)
        assert factory.noise_multiplier == 1.0
        dpc.federated.clipped_mean(**from_query(query, 20).aggregator)


@pytest.mark.slow
@pytest.mark.parametrize("m", [None, 4, 2, 1])
def test_microbatches_are_clipped_as_their_optimizer_does(m):
    """One SGD step of a linear model at rate 1, from weights of 0."""
    x = np.array([[3, 4], [0.3, 0.4], [0, 1], [1, 0]], "float32")
    y = np.full((4, 1), -0.5, "float32")

    def step(optimizer, loss, size):
        layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = tf.keras.Sequential([layer])
        model.compile(optimizer, loss)
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
        return model.get_weights()[0]

    theirs = step(
        tfp.DPKerasSGDOptimizer(1.0, 0.0, num_microbatches=m, learning_rate=1.0),
        tf.keras.losses.MeanSquaredError(reduction="none"),
        4,
    )
    settings = optimizer_arguments(1.0, 0.0, m, batch_size=4)
    size = 4 // settings.get("accumulation_steps", 1)
    ours = step(dpc.keras.DPSGD(1.0, **settings), "mse", size)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["old.keras", "old.h5", "old"])
def test_a_saved_model_continues_here_in_every_format(tmp_path, name):
    """With the outputs that it had; its optimizer is not loaded."""
    x, y = np.ones([40, 3], "float32"), np.zeros(40)
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
    theirs = tfp.DPKerasSGDOptimizer(1.0, 1.1, num_microbatches=20, learning_rate=0.1)
    entropy = tf.keras.losses.SparseCategoricalCrossentropy
    model.compile(theirs, entropy(from_logits=True, reduction="none"))
    model.fit(x, y, batch_size=20, verbose=0)
    model.save(tmp_path / name)
    loaded = tf.keras.models.load_model(tmp_path / name, compile=False)
    np.testing.assert_array_equal(loaded.predict(x), model.predict(x))
    ours = dpc.keras.DPSGD(**optimizer_arguments(1.0, 1.1, batch_size=20))
    loaded.compile(ours, entropy(from_logits=True))
    loaded.fit(x, y, batch_size=20, verbose=0)
    assert int(ours.iterations) == 2
    assert not np.allclose(loaded.get_weights()[0], model.get_weights()[0])


@pytest.mark.parametrize("m", [0, 3, 5])
def test_microbatches_that_do_not_divide_a_batch_are_refused(m):
    with pytest.raises(ValueError, match="num_microbatches=None"):
        optimizer_arguments(1.0, 1.1, m, batch_size=4)


PAGE = pathlib.Path(__file__).parents[1] / "docs" / "from_tensorflow_privacy.md"


@pytest.mark.slow
def test_the_lines_of_the_migration_page_that_need_the_package_run(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tff = pytest.importorskip("tensorflow_federated")
    lib = pytest.importorskip(
        "tensorflow_privacy.privacy.analysis.compute_dp_sgd_privacy_lib"
    )
    fitted, continued, queries = re.findall(r"(?ms)^```py\n(.*?)^```", PAGE.read_text())
    model = tf.keras.Sequential([tf.keras.layers.Dense(10)])
    names = {"tensorflow_privacy": tfp, "tf": tf, "model": model, "tff": tff, "np": np}
    names |= {"x": np.zeros([500, 20], "float32"), "y": np.zeros(500), "dpc": dpc}
    statement = lib.compute_dp_sgd_privacy_statement
    names["compute_dp_sgd_privacy_statement"] = statement
    exec(fitted.replace("epochs=15", "epochs=1, verbose=0"), names)
    assert "Poisson sampling" in capsys.readouterr().out
    weights = model.get_weights()
    exec(continued.replace("epochs=2", "epochs=2, verbose=0"), names)
    ledger = names["ledger"]
    assert [sum(phase.runs) for phase in ledger.phases] == [15 * 2, 2 * 2]
    assert "ShuffledEpochs" in str(ledger.phases[0].sampling)
    assert not np.allclose(names["model"].get_weights()[0], weights[0])
    spent = float(re.search(r"\((\S+), 1e-05\)", capsys.readouterr().out)[1])
    old = dpc.accounting.past_run(500, 250, 15, 1.1, 1e-5, used_microbatching=False)
    assert spent > old.shuffled
    exec(queries, names)
    assert float(capsys.readouterr().out) == pytest.approx(1.0934, abs=1e-4)
    assert isinstance(names["process"], tff.templates.AggregationProcess)
    assert names["optimizer"].gradient_noise_multiplier == pytest.approx(1.1)


def test_the_names_of_the_migration_page_are_those_of_both_packages():
    sparse = pytest.importorskip(
        "tensorflow_privacy.privacy.optimizers.dp_optimizer_keras_sparse"
    )
    page = PAGE.read_text()
    for name in re.findall(r"\b(\w+(?:SumQuery|KerasSGDOptimizer))\b", page):
        homes = (tfp, nested_query, sparse)
        assert any(hasattr(home, name) for home in homes), name
    for name in set(re.findall(r"\bdpc((?:\.\w+)+)", page)):
        found = dpc
        for part in name[1:].split("."):
            found = getattr(found, part)
