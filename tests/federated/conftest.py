"""Federated computations of the tests run where secure sums can."""

import pytest

pytest.importorskip("tensorflow_federated")

from tfdpclip import federated  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def _secure_context():
    with federated.local_context(simulate_secure_sums=True):
        yield
