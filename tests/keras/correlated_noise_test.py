"""Correlated noise under Keras: the releases, the saved state and the counted steps."""

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.covariance import assert_covariance
from tfdpclip import correlated
from tfdpclip.accounting import PrivacyMismatchError

N, BATCH = 40, 10
SCHEME = dpc.sampling.MinSeparation(N, BATCH)
STEPS = 8
X = np.zeros((N, 3), np.float32)
Y = np.zeros((N, 1), np.float32)


def noise_of(matrix=None, steps=STEPS, scheme=SCHEME):
    matrix = matrix or correlated.BufferedToeplitz(2, steps, scheme)
    return dpc.CorrelatedNoise(matrix, steps, scheme)


def model_of(width=1, clip=1.0, z=1.0, optimizer=dpc.keras.DPSGD, **options):
    layer = tf.keras.layers.Dense(width, use_bias=False)
    model = tf.keras.Sequential([tf.keras.Input((3,)), layer])
    made = optimizer(
        1.0, clip=clip, noise_multiplier=z, expected_batch_size=BATCH, **options
    )
    model.compile(made, "mse")
    return model


def fitted(model, epochs=2, batches=None, budget=None, callbacks=()):
    batches = batches or SCHEME.batches((X, np.zeros((N, model.output_shape[1]))))
    budget = budget or dpc.keras.PrivacyBudget(1e6, 1e-5, batches)
    model.fit(batches, epochs=epochs, callbacks=[budget, *callbacks], verbose=0)
    return budget


class Recorder(tf.keras.callbacks.Callback):
    """The weights after every step, and the noise stddev of the next."""

    def __init__(self):
        super().__init__()
        self.weights, self.stddevs = [], []

    def look(self):
        self.weights.append(self.model.get_weights()[0].ravel())
        self.stddevs.append(self.model.optimizer.noise_stddevs["all"])

    def on_train_begin(self, logs=None):
        self.look()

    def on_train_batch_end(self, batch, logs=None):
        self.look()


@pytest.mark.parametrize(
    "clip",
    [
        0.5,
        # Gradients are 0, so the clip norm falls, and the noise with it.
        dpc.QuantileClip(0.5, 2.0, learning_rate=0.4, count_stddev=1.5),
        dpc.QuantileClip(0.65, 2.0, normalize=True, count_stddev=100.0),
    ],
    ids=["fixed", "quantile", "normalized"],
)
@pytest.mark.slow
def test_released_prefix_sums_have_the_covariance_of_the_matrix(clip):
    """Cov of the sums of normalised noise is B B^T (z s)^2, B = A C^-1."""
    noise = noise_of(correlated.SquareRootToeplitz(4))
    model, seen = model_of(20_000, clip, z=1.5, noise=noise), Recorder()
    fitted(model, callbacks=[seen])
    # Gradients are 0 and the rate is 1: weights move by the noise. `stddevs` are the
    # stddevs of independent noise.
    moved = -np.diff(np.array(seen.weights), axis=0)
    normalised = moved / np.array(seen.stddevs[:-1])[:, np.newaxis]
    sums = np.tril(np.ones([STEPS] * 2)) @ noise.matrix.noising(STEPS)
    expected = noise.sensitivity**2 * sums @ sums.T
    assert_covariance(np.cumsum(normalised.astype(float), 0), expected)
    if isinstance(clip, dpc.QuantileClip) and not clip.normalize:
        assert len(set(seen.stddevs)) > STEPS // 2


@pytest.mark.slow
def test_the_identity_is_independent_noise_with_its_sensitivity():
    """Equal draws: a Gaussian of stddev z for the run gives each step s(C) z."""
    noise, weights = noise_of(correlated.Independent()), []
    assert noise.sensitivity == pytest.approx(np.sqrt(2))  # Twice in eight steps.
    for options in ({"z": noise.sensitivity}, {"z": 1.0, "noise": noise}):
        model = model_of(500, seed=3, **options)
        model.set_weights([np.zeros((3, 500))])
        fitted(model)
        weights.append(model.get_weights()[0])
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_fit_within_fit_is_refused():
    """Otherwise several orders of the records share one matrix."""
    model = model_of(noise=noise_of())
    budget = dpc.keras.PrivacyBudget(1e6, 1e-5, SCHEME)

    class Nested(tf.keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            inner = dpc.keras.PrivacyBudget(1e6, 1e-5, SCHEME, ledger=budget.ledger)
            batches = SCHEME.batches((X, Y))
            model.fit(batches.take(1), callbacks=[inner], verbose=0)

    with pytest.raises(PrivacyMismatchError, match="in this ledger during this call"):
        fitted(model, 1, SCHEME.batches((X, Y)), budget, [Nested()])
    assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize("scheme", [SCHEME, dpc.sampling.ShuffledEpochs(BATCH, N)])
def test_arrays_that_are_shuffled_in_place_do_not_move_records(scheme):
    x = np.arange(N, dtype=np.float32)[:, np.newaxis].copy()
    batches = scheme.batches(x, seed=1) if scheme is not SCHEME else scheme.batches(x)
    first = np.concatenate([part[0].numpy() for part in batches])
    x[:] = x[::-1].copy()
    second = np.concatenate([part[0].numpy() for part in batches])
    assert sorted(first.ravel()) == sorted(second.ravel()) == list(range(N))
    if scheme is SCHEME:
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("optimizer", [dpc.keras.DPSGD, dpc.keras.DPAdam])
@pytest.mark.parametrize(
    "options",
    [
        {"clip": dpc.LayerwiseClip(0.5)},
        {"clip": dpc.AutomaticClip(), "accumulation_steps": 2},
        {"clip": dpc.QuantileClip(0.5, count_stddev=3.0), "perturbation": 0.1},
    ],
    ids=lambda o: type(o["clip"]).__name__,
)
@pytest.mark.thinned(3)
def test_every_clip_and_accumulation_train_and_are_counted(optimizer, options):
    matrix = correlated.BufferedToeplitz(2, STEPS, SCHEME)
    z = dpc.accounting.noise_multiplier(3.0, 1e-5, STEPS, SCHEME, matrix=matrix)
    model = model_of(z=z, optimizer=optimizer, noise=noise_of(matrix), **options)
    pieces = options.get("accumulation_steps", 1)
    batches = SCHEME.batches((X, Y), accumulation_steps=pieces)
    budget = dpc.keras.PrivacyBudget(3.0, 1e-5, batches)
    fitted(model, epochs=5, batches=batches, budget=budget)
    # The budget has room for the matrix, and for no step more.
    assert budget.ledger.steps == STEPS == int(model.optimizer.iterations)
    assert 2.99 < budget.statement().epsilon <= 3
    assert "correlated" in str(budget.statement())
    assert not any("noise_stddev" in name for name in model.history.history)


@pytest.mark.slow
def test_kept_noise_is_in_no_file(tmp_path):
    model = model_of(50, noise=noise_of())
    fitted(model, epochs=1)
    kept = model.optimizer._noise._streams[0].kept
    assert np.any(kept.numpy())
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "only.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "ckpt")
    tf.saved_model.save(model, str(tmp_path / "saved"))
    secret = kept.numpy()[0].ravel()[:6]
    released = model.get_weights()[0].ravel()[:6]
    files = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert secret.tobytes() not in files
    assert released.tobytes() in files  # The search works.
    ids = {id(v) for v in model.optimizer.variables}
    assert id(kept) not in ids


def test_every_fit_is_a_matrix_of_its_own():
    model, batches = model_of(noise=noise_of()), SCHEME.batches((X, Y))
    budget = dpc.keras.PrivacyBudget(1e6, 1e-5, batches)
    for _ in range(2):
        fitted(model, 1, batches, budget)
    assert budget.ledger.phases[-1].runs == [4, 4]
    one = dpc.accounting.correlated_event(
        noise_of().matrix, 1.0, 4, SCHEME, horizon=STEPS
    )
    both = dp_accounting.ComposedDpEvent([one, one])
    expected = dpc.accounting.event_epsilon(both, 1e-5)
    assert budget.ledger.epsilon() == pytest.approx(expected)


@pytest.mark.slow
def test_a_loaded_model_begins_another_matrix(tmp_path):
    model, path = model_of(noise=noise_of()), tmp_path / "ledger.json"
    batches = SCHEME.batches((X, Y))
    first = dpc.keras.PrivacyBudget(1e6, 1e-5, batches, ledger=path)
    fitted(model, 1, batches, first)
    model.save(tmp_path / "model.keras")
    again = tf.keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.noise == model.optimizer.noise
    assert again.optimizer._noise.made == 0
    second = dpc.keras.PrivacyBudget(1e6, 1e-5, batches, ledger=path)
    fitted(again, 1, batches, second)
    assert [p.runs for p in second.ledger.phases] == [[4, 4]]


def test_steps_without_the_ledger_cannot_be_counted_afterwards():
    model, batches = model_of(noise=noise_of()), SCHEME.batches((X, Y))
    model.fit(batches, verbose=0)
    with pytest.raises(PrivacyMismatchError, match="correlated"):
        fitted(model, 1, batches)


@pytest.mark.slow
def test_they_are_worth_nothing_in_a_ledger_of_independent_noise():
    model, batches = model_of(noise=noise_of()), SCHEME.batches((X, Y))
    model.fit(batches, verbose=0)
    model.compile(
        dpc.keras.DPSGD(0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=BATCH),
        "mse",
    )
    budget = dpc.keras.PrivacyBudget(float("inf"), 1e-5, batches)
    fitted(model, 1, batches, budget)
    assert budget.ledger.epsilon() == float("inf")


def test_draws_for_something_else_are_refused():
    model, batches = model_of(noise=noise_of()), SCHEME.batches((X, Y))

    class Between(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            next(iter(batches.repeat()))

    with pytest.raises(PrivacyMismatchError, match="closer to each other"):
        fitted(model, 2, batches, callbacks=[Between()])


def test_noise_for_another_scheme_is_refused():
    other = dpc.sampling.MinSeparation(N, 5)
    model = model_of(noise=noise_of(scheme=other))
    with pytest.raises(PrivacyMismatchError, match="make both from the same scheme"):
        fitted(model, 1, SCHEME.batches((X, Y)))
    assert int(model.optimizer.iterations) == 0
    with pytest.raises(
        PrivacyMismatchError, match="cannot be used with correlated noise"
    ):
        budget = dpc.keras.PrivacyBudget(9.0, 1e-5, SCHEME, check_data=False)
        fitted(model_of(noise=noise_of()), 1, SCHEME.batches((X, Y)), budget)


def test_what_has_no_proof_is_refused():
    with pytest.raises(ValueError, match="noise must be a CorrelatedNoise"):
        model_of(noise=correlated.Tree())
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(1.0, 10, 0.9)
    with pytest.raises(ValueError, match="noise_multiplier must be a number"):
        model_of(z=schedule, noise=noise_of())


@pytest.mark.slow
def test_layers_that_are_frozen_between_steps_are_refused():
    layers = [tf.keras.Input((3,)), tf.keras.layers.Dense(2), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential(layers)
    optimizer = dpc.keras.DPSGD(
        0.1, clip=1.0, noise_multiplier=1.0, expected_batch_size=BATCH, noise=noise_of()
    )
    model.compile(optimizer, "mse")
    batches = SCHEME.batches((X, Y))
    budget = fitted(model, 1, batches)
    model.layers[0].trainable = False
    model.compile(optimizer, "mse")
    with pytest.raises(Exception, match="other\\s+variables"):
        fitted(model, 1, batches, budget)
