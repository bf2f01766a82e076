"""The ledger states the steps that ran, through failures and restarts."""

import json
import math

import pytest

from tfdpclip import _sealed, accounting, sampling
from tfdpclip.accounting import Ledger, PrivacyMismatchError

_DELTA = 1e-5
_POISSON = sampling.Poisson(0.01)


def _ledger(path=None, steps=0, **settings):
    ledger = Ledger(_DELTA, path=path)
    ledger.begin(**{"noise_multiplier": 1.0, "sampling": _POISSON, **settings})
    ledger.record(steps)
    return ledger


class TestCounting:
    def test_one_phase(self):
        ledger = _ledger(steps=100)
        assert ledger.steps == 100
        assert ledger.epsilon() == accounting.epsilon(1.0, 100, _POISSON, _DELTA)
        assert ledger.epsilon(1e-7) == accounting.epsilon(1.0, 100, _POISSON, 1e-7)
        assert ledger.epsilon(more=50) == accounting.epsilon(1.0, 150, _POISSON, _DELTA)

    def test_phases_compose(self):
        ledger = _ledger(steps=100)
        ledger.begin(noise_multiplier=2.0, sampling=_POISSON, change=True)
        ledger.record(200)
        assert [phase.steps for phase in ledger.phases] == [100, 200]
        both = ledger.epsilon()
        assert both > accounting.epsilon(1.0, 100, _POISSON, _DELTA)
        assert both < accounting.epsilon(1.0, 300, _POISSON, _DELTA)

    def test_the_same_settings_continue_a_phase(self):
        ledger = _ledger(steps=10)
        ledger.begin(noise_multiplier=1.0, sampling=_POISSON)
        ledger.record(5)
        assert len(ledger.phases) == 1
        assert ledger.epsilon() == accounting.epsilon(1.0, 15, _POISSON, _DELTA)

    def test_steps_left(self):
        ledger = _ledger(steps=100)
        budget = accounting.epsilon(1.0, 130, _POISSON, _DELTA) + 1e-9
        assert ledger.steps_left(budget) == 30
        ledger.record(30)
        assert ledger.steps_left(budget) == 0
        assert ledger.steps_left(math.inf) > 10**9

    def test_nothing_ran(self):
        assert Ledger(_DELTA).epsilon() == 0.0
        assert _ledger().epsilon() == 0.0
        with pytest.raises(ValueError, match="no phase was begun"):
            Ledger(_DELTA).statement()
        with pytest.raises(ValueError, match="begin"):
            Ledger(_DELTA).record(1)

    def test_shuffles_begun_count_separately(self):
        scheme = sampling.ShuffledEpochs(10, 100)
        ledger = _ledger(sampling=scheme, noise_multiplier=4.0)
        ledger.record(5)
        ledger.begin(noise_multiplier=4.0, sampling=scheme)
        ledger.record(5)
        # Ten steps of half an epoch each, in two different orders.
        assert ledger.epsilon() == pytest.approx(
            accounting.gdp_epsilon(math.sqrt(2) / 2, _DELTA)
        )

    def test_unseen_steps_are_counted_at_their_worst(self):
        ledger = _ledger()
        ledger.add_unseen(40)
        full = accounting.epsilon(1.0, 40, sampling.FullBatch(), _DELTA)
        assert ledger.epsilon() == full
        fixed = _ledger(sampling=sampling.FixedSize(10, 100), noise_multiplier=4.0)
        fixed.add_unseen(3)
        assert fixed.epsilon() == pytest.approx(
            accounting.gdp_epsilon(math.sqrt(3) / 2, _DELTA)
        )
        shuffled = _ledger(sampling=sampling.ShuffledEpochs(10, 100))
        shuffled.add_unseen(3)
        assert shuffled.epsilon() == pytest.approx(
            accounting.gdp_epsilon(math.sqrt(3) / 0.5, _DELTA)
        )
        assert "before they were recorded" in str(ledger.statement())

    def test_unseen_steps_have_their_own_noise(self):
        ledger = _ledger(steps=10)
        ledger.add_unseen(2, noise_multiplier=0.5, unit="batch")
        ledger.add_unseen(3, noise_multiplier=0.5, unit="batch")
        assert [phase.steps for phase in ledger.phases] == [5, 10]
        worst = accounting.epsilon(0.25, 5, sampling.FullBatch(), _DELTA)
        assert ledger.epsilon() > worst
        # The current phase goes on.
        ledger.record(1)
        assert [phase.steps for phase in ledger.phases] == [5, 11]

    def test_steps_belong_to_whoever_ran_them(self, tmp_path):
        ledger = _ledger(tmp_path / "privacy.json", holder="a")
        ledger.record(5)
        ledger.begin(noise_multiplier=1.0, sampling=_POISSON, holder="b")
        ledger.record(3)
        ledger.reserve(2)
        again = Ledger.load(ledger.path)
        # Reserved steps count as run, by their holder.
        assert again.counted == {"a": 5, "b": 5}
        assert again.steps == 10

    def test_a_file_without_identities_is_read(self, tmp_path):
        path = tmp_path / "privacy.json"
        ledger = _ledger(path, steps=7)
        content = {**ledger.to_dict(), "format": 2}
        del content["counted"], content["holder"]
        path.write_text(_sealed.to_text(content))
        again = Ledger.load(path)
        assert again.steps == 7 and again.counted == {}
        again.record(1)
        assert json.loads(path.read_text())["format"] == 4


class TestReservations:
    def test_are_counted_until_recorded(self):
        ledger = _ledger(steps=10)
        ledger.reserve(3)
        assert ledger.epsilon() == accounting.epsilon(1.0, 13, _POISSON, _DELTA)
        ledger.record(3)
        assert ledger.epsilon() == accounting.epsilon(1.0, 13, _POISSON, _DELTA)
        ledger.reserve(5)
        ledger.release()
        assert ledger.epsilon() == accounting.epsilon(1.0, 13, _POISSON, _DELTA)

    def test_a_crash_within_a_step_counts_it(self, tmp_path):
        path = tmp_path / "privacy.json"
        ledger = _ledger(path, steps=10)
        ledger.reserve(1)
        del ledger  # The process dies here.
        ledger = Ledger.load(path)
        assert ledger.steps == 11
        assert "begun before an interruption" in str(ledger.statement())

    def test_a_failed_block_counts(self, tmp_path):
        ledger = _ledger(tmp_path / "privacy.json")
        with pytest.raises(RuntimeError), ledger.step():
            assert Ledger.load(ledger.path).steps == 1
            raise RuntimeError
        assert ledger.steps == 1 and ledger.reserved == 0


class TestFiles:
    def test_round_trip(self, tmp_path):
        path = tmp_path / "run" / "privacy.json"
        ledger = _ledger(path, steps=7, clip="FixedClip(norm=1.0)", unit="client")
        ledger.begin(
            noise_multiplier=2.0,
            sampling=sampling.Poisson(0.01, 30, 1000),
            seed=3,
            change=True,
        )
        ledger.record(9)
        again = Ledger.load(path, delta=_DELTA, accountant="pld")
        assert again.to_dict() == ledger.to_dict()
        assert again.epsilon() == ledger.epsilon()
        assert str(again.statement()) == str(ledger.statement())
        assert not [p for p in path.parent.iterdir() if p != path]

    @pytest.mark.parametrize("scheme", [
        sampling.FixedSize(5, 50, replacement=True),
        sampling.ShuffledEpochs(5, 50, "zero_out"),
        sampling.FullBatch(),
    ], ids=repr)  # fmt: skip
    def test_every_scheme_survives(self, scheme, tmp_path):
        path = tmp_path / "privacy.json"
        _ledger(path, steps=3, sampling=scheme)
        assert Ledger.load(path).phases[0].sampling == scheme

    def test_a_file_is_not_started_over(self, tmp_path):
        path = tmp_path / "privacy.json"
        _ledger(path, steps=3)
        with pytest.raises(FileExistsError, match="forget what has been spent"):
            Ledger(_DELTA, path=path)

    def test_other_settings_are_refused(self, tmp_path):
        path = tmp_path / "privacy.json"
        _ledger(path, steps=3)
        with pytest.raises(PrivacyMismatchError, match="delta"):
            Ledger.load(path, delta=1e-6)
        with pytest.raises(PrivacyMismatchError, match="accountant"):
            Ledger.load(path, accountant="rdp")

    @pytest.mark.parametrize("spoil", [
        lambda c: c.update(format=99),
        lambda c: c.update(delta=2.0),
        lambda c: c.update(delta=math.nan),
        lambda c: c.update(reserved=-1),
        lambda c: c.pop("phases"),
        lambda c: c["phases"][0].update(noise_multiplier=math.nan),
        lambda c: c["phases"][0].update(noise_multiplier=-1),
        lambda c: c["phases"][0].update(runs=[-5]),
        lambda c: c["phases"][0].update(unit="layer"),
        lambda c: c["phases"][0]["sampling"].update(rate=2),
        lambda c: c["phases"][0]["sampling"].update(scheme="Magic"),
        lambda c: c.update(counted=[1]),
        lambda c: c.update(counted={"a": -1}),
        lambda c: c.update(holder=3),
        lambda c: c.pop("counted"),
    ])  # fmt: skip
    def test_spoilt_files_are_refused(self, spoil, tmp_path):
        path = tmp_path / "privacy.json"
        _ledger(path, steps=3)
        content = json.loads(path.read_text())
        spoil(content)
        # The checksum is removed, so that each check must find the fault.
        del content["checksum"]
        path.write_text(_sealed.to_text(content))
        with pytest.raises(ValueError, match="not a privacy ledger"):
            Ledger.load(path)

    def test_not_json(self, tmp_path):
        path = tmp_path / "privacy.json"
        path.write_text("epsilon = 1")
        with pytest.raises(ValueError, match="not a privacy ledger"):
            Ledger.load(path)


class TestMismatch:
    @pytest.mark.parametrize(
        "change",
        [
            {"noise_multiplier": 2.0},
            {"sampling": sampling.Poisson(0.02)},
            {"unit": "batch"},
            {"clip": "FixedClip(norm=2.0)"},
            {"seed": 0},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_a_change_must_be_meant(self, change):
        ledger = _ledger(steps=5)
        settings = {"noise_multiplier": 1.0, "sampling": _POISSON, **change}
        with pytest.raises(PrivacyMismatchError, match="differs from what has run"):
            ledger.begin(**settings)
        assert len(ledger.phases) == 1
        ledger.begin(**settings, change=True)
        assert len(ledger.phases) == 2

    def test_another_relation_never_adds_up(self):
        ledger = _ledger(steps=5)
        with pytest.raises(PrivacyMismatchError, match="do not add up"):
            ledger.begin(
                noise_multiplier=1.0, sampling=sampling.FixedSize(1, 100), change=True
            )

    def test_another_capacity_is_counted_without_fuss(self):
        ledger = _ledger(steps=5, sampling=sampling.Poisson(0.01, 30, 1000))
        ledger.begin(noise_multiplier=1.0, sampling=sampling.Poisson(0.01, 20, 1000))
        ledger.record(5)
        assert [phase.sampling.capacity for phase in ledger.phases] == [30, 20]

    @pytest.mark.parametrize("value", [math.nan, -1.0, math.inf])
    def test_hostile_arguments(self, value):
        with pytest.raises(ValueError, match="noise_multiplier"):
            _ledger(noise_multiplier=value)
        ledger = _ledger()
        with pytest.raises(ValueError, match="steps"):
            ledger.record(value)
        with pytest.raises(ValueError, match="steps"):
            ledger.reserve(value)
        with pytest.raises(ValueError, match="accountant"):
            Ledger(_DELTA, "prv")


class TestStatement:
    def test_says_everything(self):
        ledger = _ledger(steps=100, clip="QuantileClip()", unit="client")
        text = str(ledger.statement())
        for part in (
            f"{ledger.epsilon():.4g}",
            "1e-05",
            "add or remove one record",
            "one client",
            "Poisson, rate 0.01",
            "100",
            "QuantileClip()",
            "pld",
            "assuming",
        ):
            assert part in text
        assert "not private" not in text

    def test_a_seed_is_not_private(self):
        statement = _ledger(steps=100, seed=1).statement()
        assert str(statement).startswith("not private: a seed was fixed")
        assert "the same run would have" in str(statement)

    def test_seeded_cohorts_are_not_private(self):
        cohorts = sampling.FixedSize(5, 50).cohorts(range(50), seed=1)
        statement = _ledger(steps=1, sampling=cohorts).statement()
        assert "not private" in str(statement)

    def test_no_noise_is_not_private(self):
        statement = _ledger(steps=1, noise_multiplier=0.0).statement()
        assert statement.epsilon == math.inf
        assert "not private: noise_multiplier is 0" in str(statement)

    def test_the_central_limit_is_named(self):
        ledger = Ledger(_DELTA, "gdp")
        ledger.begin(noise_multiplier=1.0, sampling=_POISSON)
        ledger.record(10)
        assert "not a bound" in str(ledger.statement())

    def test_capacity_is_stated(self):
        ledger = _ledger(steps=1, sampling=sampling.Poisson(0.01, 30, 1000))
        assert "at most 30 records" in str(ledger.statement())


def test_a_ledger_survives_as_values_in_another_file(tmp_path):
    ledger = Ledger(1e-5, path=tmp_path / "l.json")
    ledger.begin(noise_multiplier=1.1, sampling=_POISSON, seed=3)
    ledger.record(5)
    ledger.reserve(2)
    content = json.loads(json.dumps(ledger.to_dict()))
    again = Ledger.from_dict(content)
    # Steps that were begun count, and the copy keeps no file.
    assert again.steps == 7 and again.path is None
    assert again.statement().not_private
    again.record(4)
    assert ledger.steps == 5 and Ledger.from_dict(content).steps == 7
    for name in content:
        with pytest.raises(ValueError, match="not that of a ledger"):
            Ledger.from_dict({k: v for k, v in content.items() if k != name})
    with pytest.raises(ValueError, match="not that of a ledger"):
        Ledger.from_dict([])


def test_clients_beside_examples_are_an_assumption():
    ledger = Ledger(1e-5)
    scheme = sampling.Poisson(0.01)
    ledger.begin(noise_multiplier=1.0, sampling=scheme, unit="client")
    assert "as a whole" not in "".join(ledger.statement().assumptions)
    ledger.begin(noise_multiplier=1.0, sampling=scheme, change=True)
    assert any("a client is one example" in t for t in ledger.statement().assumptions)
