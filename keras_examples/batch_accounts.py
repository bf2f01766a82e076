"""The privacy of clipped batch gradients, in the paper's account and in this library's.

Nguyen et al. (2023), *Batch Clipping and Adaptive Layerwise Clipping*, whose sigma is
the noise of a layer over twice its clip norm.
"""

from __future__ import annotations

import math

import tfdpclip as dpc


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


def account(
    sigma: float,
    layers: int,
    batch_size: int,
    size: int,
    steps: int,
    delta: float,
    unit: str = "batch",
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
        "replace one, fixed-size batches": dpc.sampling.FixedSize(batch_size, size),
        "add or remove one, Poisson": dpc.sampling.Poisson(batch_size / size),
    }
    for relation, scheme in schemes.items():
        for accountant in ("pld", "rdp") if z > 0.2 else ("rdp",):
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
