#!/usr/bin/env bash
# kymatio's scattering of images cannot be imported beside SciPy 1.17: 3-D code stops it.
#
# Version: kymatio 0.3.0, SciPy 1.17.1, NumPy 2.4.6; Python 3.11 or newer.
#
# Behaviour: importing the 1-D or 2-D transform raises ImportError for
# `scipy.special.sph_harm`, spherical harmonics that the 3-D transform alone uses,
# because the package of each backend imports all dimensions. pip installs the pair
# without a warning. With `sph_harm` replaced by a stand-in the 2-D transform runs.
#
# Why one would have guessed otherwise: the transform of images has no spherical
# harmonics, and pip accepts the versions as compatible.
#
# Output seen:
#     kymatio 0.3.0
#     scipy 1.17.1
#     numpy 2.4.6
#     1-D: cannot import name 'sph_harm' from 'scipy.special'
#     2-D: cannot import name 'sph_harm' from 'scipy.special'
#     2-D with a stand-in for sph_harm: (81, 8, 8)
#     As found: spherical harmonics stop the transform of images.
#
# Exit status: 0 while kymatio behaves so, 1 once it does not.

set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    kymatio==0.3.0 scipy==1.17.1 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import importlib.metadata
import sys

import numpy as np
import scipy.special

for package in ("kymatio", "scipy", "numpy"):
    print(package, importlib.metadata.version(package))


def refusal(name):
    """The text of the ImportError of a transform; None if the import works."""
    try:
        getattr(__import__("kymatio.numpy", fromlist=[name]), name)
    except ImportError as error:
        return str(error).split(" (")[0]
    return None


refused = [refusal(name) for name in ("Scattering1D", "Scattering2D")]
print("1-D:", refused[0])
print("2-D:", refused[1])


def sph_harm(*arguments):
    """A stand-in that nothing in two dimensions may call."""
    raise NotImplementedError


scipy.special.sph_harm = sph_harm
for name in [name for name in sys.modules if name.startswith("kymatio")]:
    del sys.modules[name]
from kymatio.numpy import Scattering2D  # noqa: E402

shape = Scattering2D(J=2, shape=(32, 32))(np.ones([32, 32], "float32")).shape
print("2-D with a stand-in for sph_harm:", shape)

if not all("sph_harm" in str(text) for text in refused) or shape != (81, 8, 8):
    sys.exit("The behaviour has changed.")
print("As found: spherical harmonics stop the transform of images.")
PYTHON

"$folder/venv/bin/python" "$folder/show.py"
