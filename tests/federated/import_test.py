"""Only some modules import TensorFlow Federated, and the rest works without it."""

import subprocess
import sys

import pytest

_WITHOUT = """
import sys
sys.modules["tensorflow_federated"] = None
import tfdpclip
try:
    import tfdpclip.federated
except ImportError as error:
    print(error)
"""

_OTHER = """
import tensorflow_federated
tensorflow_federated.__version__ = "0.88.0"
try:
    import tfdpclip.federated
except ImportError as error:
    print(error)
"""


def _run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_library_alone_does_not_import_it():
    printed = _run(
        "import sys, tfdpclip, tfdpclip.keras, tfdpclip.accounting, tfdpclip.sampling\n"
        "print('tensorflow_federated' in sys.modules)"
    )
    assert printed.strip() == "False"


@pytest.mark.slow
def test_without_it_one_sentence_says_why_and_what_to_install():
    (line,) = _run(_WITHOUT).splitlines()
    assert "only for Python 3.11 and TensorFlow 2.14" in line
    assert "--require-hashes -r requirements.txt" in line


@pytest.mark.slow
def test_a_release_with_untested_noise_is_refused():
    (line,) = _run(_OTHER).splitlines()
    assert "0.87, and 0.88.0 is installed" in line


def test_federated_does_not_import_other_privacy_libraries_itself():
    # TensorFlow Federated does, so that only our own imports can be looked at.
    import pathlib

    import tfdpclip.federated

    folder = pathlib.Path(tfdpclip.federated.__file__).parent
    for path in folder.glob("*.py"):
        text = path.read_text()
        assert "tensorflow_privacy" not in text, path
