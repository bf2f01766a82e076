"""The privacy of clipped batch gradients, in the paper's account and in this library's.

Nguyen et al. (2023), *Batch Clipping and Adaptive Layerwise Clipping*, whose sigma is
the noise of a layer over twice its clip norm.
"""

from __future__ import annotations

import math

import tfdpclip as dpc
from tfdpclip.sampling import FixedSize


def paper_mu(
    sigma: float, layers: int, batch_size: int, size: int, steps: int
) -> float | str:
    """The paper's mu, for one example replaced by another; no bound.

    Args:
      sigma: the paper's sigma: stddev of the noise on layer h over 2 C_h.
      layers: L.
      batch_size: m.
      size: N.
      steps: T.

    Returns:
      mu, or a power of ten as text where it is beyond floating point.

    >>> round(paper_mu(2.5, 8, 64, 54_000, 50 * 54_000 // 64), 3)
    0.521
    """
    rate, effective = batch_size / size, sigma / math.sqrt(layers)
    mu = dpc.accounting.subsampled_gdp_mu(effective, rate, steps, "fixed_size")
    if math.isfinite(mu):
        return mu
    log_mu = (
        dpc.accounting.subsampled_gdp_log_h(effective)
        + 0.5 * math.log(2 * steps)
        + math.log(rate)
    )
    return f"10^{log_mu / math.log(10):.6g}"


def accountants(noise_multiplier: float, sampling: str) -> tuple[str, ...]:
    """The accountants that have a bound, the tightest first.

    Args:
      noise_multiplier: z.
      sampling: one of `batch_settings.SAMPLINGS`.

    >>> accountants(1.0, "fixed"), accountants(1.0, "with_replacement")
    (('pld', 'rdp'), ('pld',))
    """
    if sampling == "with_replacement":
        return ("pld",)
    # Privacy loss distributions cannot resolve so little noise.
    return ("pld", "rdp") if noise_multiplier > 0.2 else ("rdp",)


def account(
    sigma: float,
    layers: int,
    batch_size: int,
    size: int,
    steps: int,
    delta: float,
    unit: str = "batch",
    sampling: str = "fixed",
) -> list[dict[str, object]]:
    """The privacy of a run by the paper's account and by this library's.

    Args:
      sigma: the paper's sigma: stddev of the noise on layer h over 2 C_h.
      layers: L.
      batch_size: m.
      size: N.
      steps: T.
      delta: for epsilon.
      unit: "example", "batch" or "group".
      sampling: one of `batch_settings.SAMPLINGS`; "with_replacement" adds a row.

    Returns:
      Rows of account, relation, mu (or its logarithm) and epsilon.
    """
    mu = paper_mu(sigma, layers, batch_size, size, steps)
    small = not isinstance(mu, str) and mu < 1e3
    rows: list[dict[str, object]] = [
        {
            "account": "paper: central limit of f-DP (no bound)",
            "relation": "replace one, fixed-size batches",
            "mu": mu,
            "epsilon": dpc.accounting.gdp_epsilon(mu, delta) if small else math.inf,
        }
    ]
    z = dpc.accounting.noise_multiplier_from_layerwise_sigma(sigma, layers)
    schemes = {
        "fixed": ("replace one, fixed-size batches", FixedSize(batch_size, size)),
        "with_replacement": (
            "replace one, batches with replacement",
            FixedSize(batch_size, size, replacement=True),
        ),
        "poisson": (
            "add or remove one, Poisson",
            dpc.sampling.Poisson(batch_size / size),
        ),
    }
    if sampling != "with_replacement":
        del schemes["with_replacement"]
    for name, (relation, scheme) in schemes.items():
        for accountant in accountants(z, name):
            spent = dpc.accounting.epsilon(
                z, steps, scheme, delta, accountant, unit=unit
            )
            rows.append(
                {
                    "account": f"this library: {accountant} (an upper bound)",
                    "relation": relation,
                    "mu": "",
                    "epsilon": spent,
                }
            )
    return rows
