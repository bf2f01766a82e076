"""Correlated noise goes on in a new process, and no draw of it is used twice."""

import collections
import os
import shutil
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from tests.covariance import assert_covariance
from tests.faults.injection import Killed, faults
from tfdpclip import correlated, sampling
from tfdpclip.accounting import Ledger, PrivacyMismatchError
from tfdpclip.keras.matrix_run import MatrixRun, SecretFile
from tfdpclip.keras.watching.draw_check import DrawCheck
from tfdpclip.keras.watching.step_history import history_of
from tfdpclip.noise import GaussianNoise
from tfdpclip.noise.kept import MatrixNoise
from tfdpclip.noise.runs import CorrelatedNoise
from tfdpclip.sampling.sources import open_source

pytestmark = pytest.mark.unchecked
N, BATCH, STEPS = 40, 10, 12
FIXED = sampling.MinSeparation(N, BATCH)
SCHEMES = {
    "fixed order": FIXED,
    "shuffled": sampling.ShuffledEpochs(BATCH, N),
    "cyclic": sampling.CyclicPoisson(N, rate=0.25, separation=4),
}
X = np.arange(N, dtype=np.float32)[:, np.newaxis] + 1
SHAPES = [[5], [2]]


@pytest.fixture(autouse=True)
def quick_disk():
    """Replaces fsync, which only waits for the disk."""
    with mock.patch.object(os, "fsync", lambda handle: None):
        yield


class Process:
    """The part of `PrivacyBudget` around an optimizer's steps, without Keras."""

    def __init__(self, directory, scheme=FIXED, matrix=None, x=X, z=1.0, **options):
        self.ledger = Ledger.open(directory / "ledger", 1e-5)
        self.noise = CorrelatedNoise(
            matrix or correlated.SquareRootToeplitz(4), STEPS, scheme
        )
        self.optimizer = dpc.keras.DPSGD(
            1.0,
            clip=1.0,
            noise_multiplier=z,
            expected_batch_size=BATCH,
            noise=self.noise,
            **options,
        )
        batches = scheme.batches(x)
        draws = DrawCheck(scheme, batches, self.optimizer, True)
        draws.begin(None)
        self.source = self.optimizer.matrix_noise
        self.run = MatrixRun(self.optimizer, self.ledger, draws, directory / "secret")
        self.ledger.begin(
            noise_multiplier=z,
            sampling=draws.scheme,
            holder=history_of(self.optimizer).identity,
            **self.run.begin(),
        )
        self.run.note_phase()
        self.rows = iter(batches.repeat())

    def step(self, log):
        self.ledger.reserve(1 if not self.run.kept else max(1, 3 - self.left))
        place = tuple(self.source._began_at), self.source.made
        x, _, weight = next(self.rows)
        records = x.numpy()[weight.numpy() > 0].ravel()
        with self.run.drawing():
            noise = self.source.sample_all(SHAPES, [1.0, 1.0])
        log.append((*place, np.concatenate(noise), records))
        self.ledger.record(save=False)
        if not self.run.kept or self.source.made % 3 == 0:
            self.run.keep()

    @property
    def left(self):
        return self.ledger.reserved

    def go(self, log):
        while self.source.made < STEPS:
            self.step(log)
        self.ledger.release()
        self.run.keep(last=True)


def row_of(noise, began, made):
    """The matrix's noise whose draws begin at `began`, computed from its definition."""
    draws, stream = GaussianNoise(), noise.matrix.stream()
    draws.go_on_from(began)
    one = tf.ones([])
    for _ in range(made + 1):
        found = stream.next(
            lambda: np.concatenate(draws.sample_all(SHAPES, [one, one]))
        )
    return noise.sensitivity * found


def check(log, ledger, noise):
    """No row is used twice; each is the matrix's; all are counted, in order."""
    assert len({entry[:2] for entry in log}) == len(log)
    matrices = collections.defaultdict(dict)
    for began, made, found, records in log:
        matrices[began][made] = records
        np.testing.assert_allclose(
            found, row_of(noise, began, made), rtol=1e-3, atol=1e-3
        )
    (phase,) = ledger.phases
    lengths = [max(rows) + 1 for rows in matrices.values()]
    ran = [n for n in phase.runs if n]
    # Runs of a process that was killed before its first noise have none here.
    assert len(ran) >= len(lengths) and sum(ran) >= len(log)
    last = iter(ran)
    assert all(any(n >= length for n in last) for length in lengths)
    for rows in matrices.values():
        check_order(rows, noise.sampling)


def check_order(rows, scheme):
    places = collections.defaultdict(list)
    for made, records in rows.items():
        for record in records:
            places[record].append(made)
    if isinstance(scheme, sampling.ShuffledEpochs):
        for steps in places.values():
            epochs = [made // (N // BATCH) for made in steps]
            assert len(set(epochs)) == len(epochs)
    else:
        for steps in places.values():
            assert all(np.diff(steps) >= 4)
    assert len(rows) < 4 or len(places) > N // 2


def killed(directory, log, at, **options):
    """Kills a process at a call that changes a file; returns whether it was killed."""
    with faults(at, within=directory) as happened:
        try:
            Process(directory, **options).go(log)
        except Killed:
            pass
    return happened.happened


def check_kills(tmp_path, first, every, **options):
    at, count = first, 0
    while True:
        directory, log = tmp_path / str(at), []
        directory.mkdir()
        if not killed(directory, log, at, **options):
            break
        # Kill the next process as well, in its first writes.
        killed(directory, log, 1 + at % 11, **options)
        last = Process(directory, **options)
        last.go(log)
        check(log, Ledger.load(directory / "ledger"), last.noise)
        # The secret is gone, or the reserved steps went on into the next matrix.
        assert not (directory / "secret").exists() or last.source.made > STEPS
        at, count = at + every, count + 1
    assert count * every > 40


@pytest.mark.slow
def test_a_kill_at_any_write_never_uses_noise_twice(tmp_path):
    check_kills(tmp_path, 2, 13)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 5))
@pytest.mark.parametrize("name", SCHEMES)
def test_a_kill_at_each_write_never_uses_noise_twice(name, first, tmp_path):
    check_kills(tmp_path, first, 4, scheme=SCHEMES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    "matrix",
    [
        correlated.SquareRootToeplitz(3),
        correlated.InverseSquareRootToeplitz(3),
        correlated.BufferedToeplitz(2, STEPS, FIXED),
        correlated.Tree(),
        correlated.Independent(),
    ],
    ids=lambda m: type(m).__name__,
)
def test_it_is_one_matrix_and_one_order(name, matrix, tmp_path):
    if name == "cyclic" and not matrix.bandwidth:
        with pytest.raises(ValueError):
            Process(tmp_path, SCHEMES[name], matrix)
        return
    log = []
    for steps in (1, 4, 2):
        process = Process(tmp_path, SCHEMES[name], matrix)
        for _ in range(steps):
            process.step(log)
        del process
    last = Process(tmp_path, SCHEMES[name], matrix)
    assert len({began for began, *_ in log}) == 1
    last.go(log)
    check(log, last.ledger, last.noise)
    # Steps that were reserved and not recorded were skipped.
    assert last.ledger.phases[-1].runs == [STEPS]
    one = dpc.accounting.epsilon(
        1.0, STEPS, SCHEMES[name], 1e-5, matrix=matrix, unit="example"
    )
    assert last.ledger.epsilon() == pytest.approx(one)


def interrupted(directory, steps=4, **options):
    process, log = Process(directory, **options), []
    for _ in range(steps):
        process.step(log)
    return log


def assert_refused(directory, match, **options):
    before = (directory / "secret").read_bytes()
    with pytest.raises((PrivacyMismatchError, ValueError), match=match) as caught:
        Process(directory, **options)
    assert "delete it" in str(caught.value) or "settings" in match
    assert (directory / "secret").read_bytes() == before
    # The message's remedy works, and the new run is counted.
    (directory / "secret").unlink()
    log = interrupted(directory, 1, **options)
    assert log[0][1] == 0


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    interrupted(tmp_path)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "secret").chmod(0o640)
    assert_refused(tmp_path, "read or written by other users")


def test_a_damaged_secret_is_refused(tmp_path):
    interrupted(tmp_path)
    path = tmp_path / "secret"
    whole = path.read_bytes()
    for broken in (whole[:-20], b"", whole.replace(b'"made": 3', b'"made": 2')):
        assert broken != whole
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="damaged.*delete it"):
            Process(tmp_path)
    path.write_bytes(whole)
    Process(tmp_path)


def test_another_matrix_is_refused(tmp_path):
    interrupted(tmp_path)
    with pytest.raises(PrivacyMismatchError, match="another matrix"):
        Process(tmp_path, matrix=correlated.SquareRootToeplitz(3))
    with pytest.raises(PrivacyMismatchError, match="noise_multiplier"):
        Process(tmp_path, z=2.0)
    assert_refused(tmp_path, "another hardened", hardened_noise=True)


def test_other_records_or_another_order_of_them_are_refused(tmp_path):
    interrupted(tmp_path)
    moved = X.copy()
    moved[[3, 4]] = moved[[4, 3]]
    assert_refused(tmp_path, "their order changed", x=moved)


def test_records_that_are_fetched_are_looked_at():
    fetched = [{"a": x} for x in X]
    first, again, moved = (
        open_source(data).digest() for data in (fetched, list(fetched), fetched[::-1])
    )
    assert first == again != moved
    texts = np.array([["one", "two"], ["three", ""]])
    assert open_source(texts).digest() != first
    assert open_source(texts).digest() != open_source(texts[::-1]).digest()


def test_noise_of_a_run_before_the_ledgers_last_is_refused(tmp_path):
    """The noise was used up to an unknown step."""
    interrupted(tmp_path)
    shutil.copy(tmp_path / "secret", tmp_path / "copy")
    (tmp_path / "secret").unlink()
    interrupted(tmp_path, 2)
    os.replace(tmp_path / "copy", tmp_path / "secret")
    assert_refused(tmp_path, "does not belong to the last run")


def test_noise_of_another_ledger_is_refused(tmp_path):
    """Its first run is not this one's, though both are of the same settings."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        interrupted(tmp_path / name)
    shutil.copy(tmp_path / "one" / "secret", tmp_path / "other" / "secret")
    assert_refused(tmp_path / "other", "does not belong to the last run")


def test_a_ledger_that_is_older_than_the_noise_is_refused(tmp_path):
    process, log = Process(tmp_path), []
    process.step(log)
    shutil.copy(tmp_path / "ledger", tmp_path / "copy")
    for _ in range(5):
        process.step(log)
    os.replace(tmp_path / "copy", tmp_path / "ledger")
    assert_refused(tmp_path, "has made the noise of 6 steps")


@pytest.mark.slow
def test_draws_that_are_others_than_before_are_refused(tmp_path, monkeypatch):
    """A different device or TensorFlow version would draw differently."""
    interrupted(tmp_path)
    real = GaussianNoise.sample_all

    def otherwise(self, *arguments):
        return [part[::-1] for part in real(self, *arguments)]

    monkeypatch.setattr(GaussianNoise, "sample_all", otherwise)
    assert_refused(tmp_path, "differ from the kept memory")


def test_an_optimizer_goes_on_from_its_own_step_only(tmp_path):
    """Noise that was drawn for a step that broke is gone, and is no next step's."""
    process = Process(tmp_path)
    log = []
    for _ in range(4):
        process.step(log)
    process.ledger.release()
    again = MatrixRun(
        process.optimizer, process.ledger, process.run._draws, tmp_path / "secret"
    )
    assert again.begin()["continued"] == 4
    process.source.sample_all(SHAPES, [1.0, 1.0])
    with pytest.raises(PrivacyMismatchError, match="cut short"):
        again.begin()
    # Nor is anything left to go on from.
    process.run.keep()
    assert not (tmp_path / "secret").exists()


def test_steps_that_nobody_counts_have_draws_of_their_own(tmp_path):
    """A fit without the budget: no ledger of a later process knows its steps."""
    process, log = Process(tmp_path), []
    for _ in range(4):
        process.step(log)
    process.ledger.release()
    process.run.keep()
    outside = np.concatenate(process.source.sample_all(SHAPES, [1.0, 1.0]))
    Process(tmp_path).step(log)
    # Both contain past noise; their new draws differ. Of seven numbers, four of other
    # draws are as near with a probability below 1e-11.
    assert len(log) == 5 and np.isclose(outside, log[-1][2], rtol=1e-3).sum() < 4


def test_a_secret_needs_the_batches_themselves(tmp_path):
    files = {"ledger": tmp_path / "ledger", "secret": tmp_path / "secret"}
    noise = dpc.CorrelatedNoise(correlated.SquareRootToeplitz(4), 8, FIXED)
    made = dpc.keras.DPSGD(
        1.0, clip=1.0, noise_multiplier=9.0, expected_batch_size=BATCH, noise=noise
    )
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(made, "mse")
    batches = FIXED.batches((X, X))
    budget = dpc.keras.PrivacyBudget(3.0, 1e-5, FIXED, **files)
    with pytest.raises(ValueError, match="secret needs the batches, because"):
        model.fit(batches, callbacks=[budget], verbose=0)


def test_nobody_else_can_ever_read_the_file(tmp_path):
    secret, mask = SecretFile(tmp_path / "secret"), os.umask(0)
    try:
        for at in range(1, 9):
            with faults(at, within=tmp_path) as happened:
                try:
                    secret.write({"word": "secret"})
                except Killed:
                    pass
            modes = {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()}
            assert modes <= {0o600}
            (tmp_path / "secret").touch(0o666)
            (tmp_path / "secret").chmod(0o666)
            secret.write({"word": "secret"})
            assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
        assert happened.calls
    finally:
        os.umask(mask)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_draws_of_compiled_and_large_steps_are_drawn_again(compiled):
    run = CorrelatedNoise(correlated.BufferedToeplitz(2, STEPS, FIXED), STEPS, FIXED)
    shapes = [[300, 300], [7], []]

    def fresh():
        return MatrixNoise(run, GaussianNoise())

    first = fresh()
    first.restart(keep=True)

    @tf.function(jit_compile=compiled)
    def step(source):
        return source.sample_all(shapes, [1.0, 0.5, tf.constant(2.0)])

    with first.drawing():
        for _ in range(2):
            step(first)
        secret = first.secret()
        expected = [step(first) for _ in range(3)][-1]
    second = fresh()
    second.go_on(secret, 4)
    # Restarted noise is gone on from as well.
    with second.drawing():
        made = step(second)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="other variables"):
        second.sample_all([[3]], [1.0])


class Dies(tf.keras.callbacks.Callback):
    """Ends the process after some steps, before anything can be recorded."""

    def __init__(self, after):
        super().__init__()
        self.after, self.weights = after, []

    def look(self):
        self.weights.append(self.model.get_weights()[0].ravel())

    def on_train_begin(self, logs=None):
        self.look()

    def on_train_batch_end(self, batch, logs=None):
        self.look()
        if len(self.weights) == self.after + 1:
            raise Killed


@pytest.mark.slow
def test_keras_goes_on_with_one_matrix(tmp_path):
    """Noise of a killed and a resumed run together has the matrix's covariance."""
    width, steps = 20_000, 8
    noise = dpc.CorrelatedNoise(correlated.SquareRootToeplitz(4), steps, FIXED)
    z = dpc.accounting.noise_multiplier(3.0, 1e-5, steps, FIXED, matrix=noise.matrix)
    moved = []
    for after in (3, 99):
        layer = tf.keras.layers.Dense(width, use_bias=False)
        model = tf.keras.Sequential([tf.keras.Input((3,)), layer])
        made = dpc.keras.DPSGD(
            1.0, clip=1.0, noise_multiplier=z, expected_batch_size=BATCH, noise=noise
        )
        model.compile(made, "mse")
        batches = FIXED.batches((np.zeros((N, 3)), np.zeros((N, 1))))
        budget = dpc.keras.PrivacyBudget(
            3.0,
            1e-5,
            batches,
            ledger=tmp_path / "ledger",
            secret=str(tmp_path / "secret"),
        )
        dies = Dies(after)
        try:
            model.fit(batches, epochs=4, callbacks=[dies, budget], verbose=0)
        except Killed:
            assert after == 3
        moved += list(np.diff(np.array(dies.weights), axis=0))
        stddev = made.noise_stddevs["all"]
    # The last step is counted, even if it did not finish, and no step is left.
    assert budget.ledger.phases[-1].runs == [steps] and len(moved) == steps
    assert 2.99 < budget.statement().epsilon <= 3
    assert "secret" in str(budget.statement())
    assert not (tmp_path / "secret").exists()
    rows = np.array(moved, float) / stddev
    noising = noise.matrix.noising(steps)
    assert_covariance(rows, noise.sensitivity**2 * noising @ noising.T)


def test_a_secret_is_for_correlated_noise_and_a_ledger_in_a_file(tmp_path):
    plan = dict(epsilon=1.0, delta=1e-5, examples=N, batch_size=BATCH, epochs=2)
    files = {"ledger": tmp_path / "ledger", "secret": tmp_path / "secret"}
    with pytest.raises(ValueError, match="independent noise"):
        dpc.keras.PrivacyPlan(**plan, **files)
    with pytest.raises(ValueError, match="a ledger in a file"):
        dpc.keras.PrivacyPlan(**plan, noise="tree", secret=tmp_path / "secret")
    with pytest.raises(ValueError, match="two files"):
        dpc.keras.PrivacyPlan(**plan, noise="tree", ledger="a", secret="./a")
    with pytest.raises(ValueError, match="path of a file"):
        dpc.keras.PrivacyPlan(**plan, noise="tree", **(files | {"secret": 3}))
    made = dpc.keras.PrivacyPlan(**plan, noise="tree", **files)
    made.batches(X)
    assert made.callbacks[0]._secret == files["secret"]
    assert made.replace(epochs=3)._secret is None
