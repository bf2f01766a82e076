"""Files that the tests of benchmarks share."""

import pytest

from tests.tff_tasks import fixtures


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return fixtures.write_all(tmp_path_factory.mktemp("data"))
