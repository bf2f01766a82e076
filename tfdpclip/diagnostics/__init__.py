"""Looking at gradients: their norms, and the gradients themselves.

Everything here is measured without noise. On private data the results are private, too,
and must not be released; on public data they may be.
"""

from tfdpclip.keras.gradient_meter import GradientMeter, GradientNorms

__all__ = ["GradientMeter", "GradientNorms"]
