"""Federated computations of the tests run where secure sums can."""

import pytest

tff = pytest.importorskip("tensorflow_federated")


@pytest.fixture(autouse=True, scope="session")
def _secure_context():
    tff.backends.test.set_sync_test_cpp_execution_context()
