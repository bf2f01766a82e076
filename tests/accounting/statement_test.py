"""Statements: one method everywhere, and what is counted in which row."""

import importlib
import inspect
import pkgutil

import pytest

import tfdpclip
from tests.stack import FEDERATED
from tfdpclip import sampling
from tfdpclip.accounting import Ledger


def classes():
    """The library's classes with a `statement`."""
    for module in pkgutil.walk_packages(tfdpclip.__path__, "tfdpclip."):
        if "_keras2" in module.name or "_keras3" in module.name:
            continue  # One of both is of another Keras.
        if "federated" in module.name and not FEDERATED:
            continue
        if module.name.endswith("__main__"):
            continue
        for _, found in inspect.getmembers(
            importlib.import_module(module.name), inspect.isclass
        ):
            if found.__module__.startswith("tfdpclip."):
                yield found


@pytest.mark.slow
def test_a_statement_is_a_method_of_every_class_that_has_one():
    named = {one for one in classes() if hasattr(one, "statement")}
    names = {one.__name__ for one in named}
    assert {"Ledger", "PrivacyBudget", "PrivacyPlan", "GridResult"} <= names
    for one in named:
        assert inspect.isfunction(inspect.getattr_static(one, "statement")), one
    fields = {f for one in classes() for f in getattr(one, "__dataclass_fields__", ())}
    assert "statement" not in fields


def rows(text):
    """The rows of a model card's table."""
    cells = (
        line.strip("| ").split(" | ", 1) for line in text.split("\n") if " | " in line
    )
    return {name: rest for name, rest in filter(lambda c: len(c) == 2, cells)}


def test_a_model_card_counts_steps_and_releases_apart():
    ledger = Ledger(delta=1e-6)
    words = "vocabulary of one value of each record (epsilon 0.2 by itself)"
    for release, count in (("mean of 2 columns", 1), (words, 3)):
        ledger.begin(
            noise_multiplier=20.0,
            sampling=sampling.FullBatch(),
            release=release,
            change=True,
        )
        ledger.record(count)
    ledger.begin(
        noise_multiplier=1.5, sampling=sampling.Poisson(0.01), clip="rule", change=True
    )
    ledger.record(320)
    ledger.reserve(2)
    for stated in (ledger, Ledger.from_dict(ledger.to_dict())):
        statement = stated.statement()
        card = rows(statement.render("markdown"))
        assert card["Clip"] == "rule" and card["Steps"] == "322"
        expected = f"4: mean of 2 columns; 3 times {words}"
        assert card["Releases beside the steps"] == expected
        assert statement.releases == ("mean of 2 columns", *[words] * 3)
        assert statement.steps == 322 and f"releases:    {expected}" in str(statement)
        assert statement.to_dict()["releases"] == list(statement.releases)
    assert ledger.steps + ledger.reserved == 326  # What is accounted for.


def test_an_earlier_laplace_release_belongs_into_a_ledger(tmp_path):
    path, laplace = tmp_path / "ledger.json", sampling.LaplaceRelease()
    ledger = Ledger(delta=1e-6, path=path)
    ledger.begin(noise_multiplier=4.0, sampling=laplace, release="mean of the ages")
    ledger.record(1)
    assert ledger.epsilon() == pytest.approx(0.25, rel=1e-3)
    ledger = Ledger.load(path)
    alone = Ledger(delta=1e-6)
    for one in (alone, ledger):
        one.begin(noise_multiplier=2.0, sampling=sampling.Poisson(0.05), change=True)
        one.record(100)
    assert alone.epsilon() < ledger.epsilon() < alone.epsilon() + 0.25
    assert "1: mean of the ages" in str(ledger.statement())


def test_laplace_noise_states_no_training():
    """Its epsilon would be less than that of the Gaussian noise of training."""
    with pytest.raises(ValueError, match="release=.*Poisson") as info:
        Ledger(delta=1e-6).begin(
            noise_multiplier=4.0, sampling=sampling.LaplaceRelease()
        )
    assert len(str(info.value).split()) < 60
