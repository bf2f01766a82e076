"""Speed and memory, as ratios to a plain step measured in the same run."""

from driver_kit import lazy

__getattr__ = lazy.submodules(__name__)
