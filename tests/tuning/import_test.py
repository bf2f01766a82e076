"""Advice needs neither TensorFlow nor pictures."""

import subprocess
import sys


def test_light_imports():
    heavy = ["tensorflow", "matplotlib", "pandas", "sklearn", "tensorflow_federated"]
    code = (
        f"import tfdpclip.tuning, sys; print([m for m in {heavy} if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
