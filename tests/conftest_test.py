"""Tests of the fixtures of every test run."""

import warnings

from xdist import remote

from tfdpclip.gradients.proof import fallback


def test_who_gathers_warnings_of_other_processes_imports_nothing(pytestconfig):
    """Threads that import the same package at once ended a run after 4485 tests."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("slow", fallback.JacobianFallbackWarning, stacklevel=1)
        warnings.warn("plain", RuntimeWarning, stacklevel=1)
    sent = []
    for message in caught:
        for plugin in pytestconfig.pluginmanager.get_plugins():
            if getattr(plugin, "__file__", None) == str(
                pytestconfig.rootpath / "conftest.py"
            ):
                plugin.pytest_warning_recorded(message)
        sent.append(remote.serialize_warning_message(message))
    kinds = [(one["message_module"], one["category_class_name"]) for one in sent]
    assert kinds == [("builtins", "UserWarning"), ("builtins", "RuntimeWarning")]
    assert sent[0]["message_str"] == "JacobianFallbackWarning: slow"
