"""Federated benchmarks of the adaptive clipping paper, one command line program each.

Andrew, Thakkar, McMahan, Ramaswamy (2021), *Differentially Private Learning with
Adaptive Clipping*, section 3 and its appendix; sections are those of NeurIPS 2021.
"""

# This import comes before TensorFlow's, because it sets what TensorFlow logs.
from driver_kit import lazy

__getattr__ = lazy.submodules(__name__)
