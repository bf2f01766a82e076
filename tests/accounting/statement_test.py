"""`statement` has one meaning: a method that returns the cost, with all its facts."""

import importlib
import inspect
import pkgutil

import pytest

import tfdpclip
from tests.stack import FEDERATED


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
