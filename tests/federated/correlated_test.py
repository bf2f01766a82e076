"""Correlated noise in federated rounds: its matrix, its memory, and their secrecy."""

import collections
import os
import pickle

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tfdpclip as dpc
from tests.covariance import assert_covariance
from tests.federated.helpers import updates, vector_type
from tfdpclip import accounting, correlated, federated, sampling
from tfdpclip.federated import _entropy

STEPS, SIZE, CLIENTS = 5, 20_000, 100
SCHEME = sampling.AvailableClients(CLIENTS, separation=2)
MOVING = dpc.QuantileClip(initial_norm=2.0, learning_rate=1.0, count_stddev=2.0)


def run_of(matrix, steps=STEPS):
    return dpc.CorrelatedNoise(matrix, steps, SCHEME)


def process_of(matrix, size=SIZE, steps=STEPS, clip=MOVING, **options):
    factory = federated.clipped_mean(
        1.0, CLIENTS, clip=clip, noise=run_of(matrix, steps), **options
    )
    return factory.create(vector_type(size))


def rounds_of(process, rounds, values=()):
    """States, noise on sums in units of the clip norm, and the measurements."""
    states, rows, measured = [process.initialize()], [], []
    for _ in range(rounds):
        output = process.next(states[-1], list(values))
        measured.append(output.measurements)
        rows.append(CLIENTS * output.result / output.measurements["clip_norm"])
        states.append(output.state)
    return states, np.array(rows, float), measured


# Each has its own way of summing, and of making noise.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("matrix", "options"),
    [
        (correlated.SquareRootToeplitz(3), {"secure": True}),
        (correlated.Tree(), {"inner": tff.aggregators.UnweightedMeanFactory()}),
        (correlated.BufferedToeplitz(2, STEPS, SCHEME), {}),
    ],
    ids=["toeplitz", "tree", "buffered"],
)
def test_the_covariance_is_that_of_the_matrix_while_the_clip_moves(matrix, options):
    """Of sums over steps: B B^T z^2 s(C)^2 in units of each step's clip norm."""
    _, rows, measured = rounds_of(process_of(matrix, **options), STEPS + 2)
    norms = [m["clip_norm"] for m in measured]
    assert len(set(norms)) > 3
    z = accounting.split_noise_multiplier(1.0, [2.0])
    scale = z * run_of(matrix).sensitivity
    assert measured[0]["sum_noise_stddev"] == pytest.approx(2.0 * scale)
    expected = np.zeros([STEPS + 2] * 2)
    # After STEPS rounds a new matrix begins, independent of the first.
    for start, stop in ((0, STEPS), (STEPS, STEPS + 2)):
        noising = matrix.noising(stop - start)
        expected[start:stop, start:stop] = scale**2 * noising @ noising.T
    assert_covariance(rows, expected)
    sums = np.tril(np.ones_like(expected))
    assert_covariance(sums @ rows, sums @ expected @ sums.T)


@pytest.mark.slow
def test_counts_and_sums_go_through_the_matrix_to_the_digit():
    """The same draws with and without a matrix: exactly the stream's noise."""
    rule = dpc.LayerwiseClip(
        dpc.QuantileClip(initial_norm=0.5, count_stddev=2.0), groups="variable"
    )
    found = {}
    matrix = correlated.SquareRootToeplitz(3)
    for used in (correlated.Independent(), matrix):
        factory = federated.clipped_mean(0.5, 100, rule, noise=run_of(used), seed=7)
        assert not factory.private and factory.epsilon(1e-5, 3) == np.inf
        process = factory.create(tff.to_type([(np.float32, [2]), (np.float32, [3])]))
        state, rows = process.initialize(), []
        for _ in range(STEPS):
            output = process.next(state, [])
            state = output.state
            norms = output.measurements["clip_norm"]
            counts = (output.measurements["unclipped_fraction"] - 0.5) * 100
            parts = [part / n for part, n in zip(output.result, norms, strict=True)]
            rows.append(np.concatenate([*parts, counts]) / run_of(used).sensitivity)
        found[used] = np.array(rows, float)
    draws = iter(found[correlated.Independent()])
    stream = matrix.stream()
    expected = [stream.next(lambda: next(draws)) for _ in range(STEPS)]
    np.testing.assert_allclose(found[matrix], expected, rtol=1e-3, atol=1e-3)
    assert np.std(found[matrix][:, -2:]) > 1


def test_independent_noise_as_a_matrix_is_scaled_by_its_sensitivity():
    matrix = correlated.Independent()
    process = process_of(matrix, clip=3.0)
    states, rows, _ = rounds_of(process, 3)
    # In five rounds a client can come three times.
    assert run_of(matrix).sensitivity == pytest.approx(np.sqrt(3))
    assert_covariance(rows, 3 * np.eye(3))
    assert not np.any(states[-1]["correlated_noise"]["kept"])


def test_a_round_that_is_run_twice_has_fresh_draws():
    process = process_of(correlated.SquareRootToeplitz(3), clip=1.0)
    states, _, _ = rounds_of(process, 2)
    first, second = (process.next(states[-1], []) for _ in range(2))
    scale = run_of(correlated.SquareRootToeplitz(3)).sensitivity
    difference = CLIENTS * (first.result - second.result)
    # Both contain the kept noise; the difference has two independent draws. 5.5
    # standard deviations of the estimate: a false alarm in 2.6e7 runs.
    assert np.std(difference) == pytest.approx(
        np.sqrt(2) * scale, rel=5.5 / np.sqrt(2 * SIZE)
    )
    tickets = [s["correlated_noise"]["ticket"] for s in (first.state, second.state)]
    assert not np.array_equal(*tickets)
    for state in (first.state, second.state):
        np.testing.assert_array_equal(
            state["correlated_noise"]["before"],
            states[-1]["correlated_noise"]["ticket"],
        )


def test_the_name_of_a_state_does_not_give_its_noise_away():
    process = process_of(correlated.Independent(), clip=1.0, size=50)
    states, rows, _ = rounds_of(process, 1)
    noise = rows[0] / run_of(correlated.Independent()).sensitivity
    for state in states:
        draws = _entropy.Draws(tf.constant(state["correlated_noise"]["ticket"]))
        (guess,) = draws.sample_all([[50]], [1.0], [tf.float32])
        # Equal draws would agree up to rounding; independent draws differ by about 1.
        assert np.max(np.abs(guess - noise)) > 0.1


def test_the_same_draws_are_the_same_noise():
    """Shows that the guess above finds the noise, given its seed."""
    factory = federated.clipped_mean(
        1.0, CLIENTS, 1.0, noise=run_of(correlated.Independent()), seed=4
    )
    process = factory.create(vector_type(50))
    result = CLIENTS * process.next(process.initialize(), []).result
    draws = _entropy.Draws(_entropy.round_seed(4, tf.constant(0)))
    (noise,) = draws.sample_all([[50]], [1.0], [tf.float32])
    scale = run_of(correlated.Independent()).sensitivity
    np.testing.assert_allclose(result, scale * noise, rtol=1e-3, atol=1e-3)


def test_the_memory_is_not_sent_to_clients():
    process = process_of(correlated.SquareRootToeplitz(3), size=7)
    own = process.initialize.type_signature.result.member["own"]
    assert [name for name, _ in tff.structure.iter_elements(own)] == ["round", "clip"]
    found = []

    def look(block):
        if "federated_broadcast" in str(getattr(block, "uri", "")):
            found.append(str(block.type_signature))
        return block, False

    tff.framework.transform_postorder(process.next.to_building_block(), look)
    assert found and not any("2,8" in kind or "ticket" in kind for kind in found)
    assert "2,8" in str(process.next.type_signature.parameter[0])


def test_a_client_with_nan_adds_nothing():
    process = process_of(correlated.Tree(), size=4, clip=1.0, seed=3)
    bad = [np.array([np.nan, 1, 2, 3], np.float32), np.full(4, np.inf, np.float32)]
    _, without, _ = rounds_of(process, 3)
    _, with_them, _ = rounds_of(process, 3, bad)
    np.testing.assert_array_equal(with_them, without)
    assert np.all(np.isfinite(without))


def test_settings_are_taken_as_a_dictionary_and_shown():
    run = run_of(correlated.SquareRootToeplitz(3))
    factory = federated.clipped_mean(1.0, CLIENTS, noise=run.to_dict())
    assert factory.noise == run and "square root of 3 bands" in repr(factory)
    assert factory.private
    # All rounds of a matrix are one Gaussian; a further round begins a new matrix.
    one = accounting.epsilon(1.0, 1, sampling.FullBatch(), 1e-5)
    assert factory.epsilon(1e-5, STEPS) == pytest.approx(one)
    assert one < factory.epsilon(1e-5, STEPS + 1) <= factory.epsilon(1e-5, 2 * STEPS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": "tree"}, "noise must be"),
        ({"noise": None}, "noise must be"),
        ({"noise": correlated.Tree()}, "noise must be"),
        ({"noise": {"matrix": {}}}, "noise must be"),
        ({"noise": run_of(correlated.Tree()), "minimum_clients": 3}, "minimum_clients"),
        ({"noise": run_of(correlated.Tree()), "clip": None}, "clip must not be None"),
    ],
)
def test_what_has_no_guarantee_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        federated.clipped_mean(1.0, CLIENTS, **options)


Learning = collections.namedtuple("Learning", ["weights", "aggregator"])


def test_the_memory_is_taken_out_and_goes_back_into_its_own_state(tmp_path):
    process = process_of(correlated.SquareRootToeplitz(3), size=6)
    values = updates(np.random.default_rng(0), 3, 6)
    states, _, _ = rounds_of(process, 3, values)
    whole = Learning([1.0], {"wrapped": states[3]})
    public, memory = federated.split_noise(whole)
    noise = public.aggregator["wrapped"]["correlated_noise"]
    assert memory.steps == 3 and noise["step"] == 0
    assert not np.any(noise["kept"])
    ticket = states[3]["correlated_noise"]["ticket"]
    assert not np.array_equal(noise["ticket"], ticket)
    np.testing.assert_array_equal(noise["before"], ticket)
    # Logs and files do not show the noise.
    assert repr(memory) == "<NoiseMemory of 3 rounds>"
    with pytest.raises(TypeError, match="secret"):
        pickle.dumps(memory)
    path = tmp_path / "noise.secret"
    path.write_text("anybody can read this")
    path.chmod(0o666)
    memory.save(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    again = federated.join_noise(public, federated.NoiseMemory.load(path))
    restored = again.aggregator["wrapped"]
    for name, part in states[3]["correlated_noise"].items():
        np.testing.assert_array_equal(restored["correlated_noise"][name], part)
    # Both can be trained on.
    assert process.next(restored, values).state["correlated_noise"]["step"] == 4
    begun = process.next(public.aggregator["wrapped"], values).state
    assert begun["correlated_noise"]["step"] == 1
    other, _ = federated.split_noise(states[2])
    with pytest.raises(ValueError, match="another state"):
        federated.join_noise(other, memory)
    with pytest.raises(ValueError, match="memory must be"):
        federated.join_noise(other, "noise.secret")
    with pytest.raises(ValueError, match="no correlated noise"):
        federated.split_noise(states[2]["own"])
    path.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        federated.NoiseMemory.load(path)
    path.chmod(0o600)
    content = path.read_bytes()
    np.savez(tmp_path / "other.npz", step=np.array(3))
    other = (tmp_path / "other.npz").read_bytes()
    np.save(tmp_path / "one.npy", np.array(3))
    one = (tmp_path / "one.npy").read_bytes()
    for wrong in (b"", b"[]", content[:-30], content[: len(content) // 2], other, one):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="noise.secret is cut or damaged, or hold"):
            federated.NoiseMemory.load(path)


def test_a_budget_follows_the_states_of_real_rounds():
    ids = list(range(CLIENTS * 2))
    matrix = correlated.SquareRootToeplitz(3)
    cohorts = sampling.AvailableCohorts(SCHEME, lambda round_num: ids)
    budget = accounting.RoundBudget(
        np.inf,
        1e-5,
        cohorts,
        federated.clipped_mean(1.0, CLIENTS, 1.0, noise=run_of(matrix)),
    )
    process = process_of(matrix, size=3, clip=1.0)
    state, (others, _, _) = process.initialize(), rounds_of(process, 3)
    for _ in range(3):
        before = state
        with budget.round(state) as cohort:
            assert len(cohort) == CLIENTS
            state = process.next(state, []).state
    for wrong in (before, others[3], others[2]):
        with pytest.raises(accounting.PrivacyMismatchError):
            with budget.round(wrong):
                pytest.fail("a state was used again")
    with pytest.raises(ValueError, match="state must be given"), budget.round():
        pytest.fail("nobody knows which noise this round has")
    assert budget.rounds == 3 and budget.ledger.phases[-1].runs == [3]
    state, memory = federated.split_noise(state)
    with budget.round(state):
        state = process.next(state, []).state
    assert budget.ledger.phases[-1].runs == [3, 1] and memory.steps == 3
    assert "at least 2 steps from one" in str(budget.statement())


def test_checks_of_single_rounds_refuse_it():
    factory = federated.clipped_mean(1.0, CLIENTS, noise=run_of(correlated.Tree()))
    for check in (
        dpc.testing.assert_aggregator_noise,
        dpc.testing.assert_aggregator_sensitivity,
    ):
        with pytest.raises(ValueError, match="correlated noise"):
            check(factory, vector_type(3))


def test_programs_that_save_states_are_refused():
    cohorts = sampling.AvailableCohorts(SCHEME, lambda round_num: [1])
    budget = accounting.RoundBudget(
        np.inf,
        1e-5,
        cohorts,
        federated.clipped_mean(1.0, 1, noise=run_of(correlated.Tree())),
    )
    with pytest.raises(ValueError, match="independent noise"):
        federated.CohortDataSource(
            budget, lambda i: i, tff.FederatedType(np.int32, tff.CLIENTS)
        )
