"""The privacy of clipped batch gradients, in the paper's account and in this library's.

Nguyen et al. (2023), *Batch Clipping and Adaptive Layerwise Clipping*, whose sigma is
the noise of a layer over twice its clip norm.
"""

from __future__ import annotations

import math

import tfdpclip as dpc


def account(
    sigma: float,
    layers: int,
    batch_size: int,
    size: int,
    steps: int,
    delta: float,
    unit: str = "batch",
) -> list[dict[str, object]]:
    """The privacy of a run as the paper has it and as this library has it.

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
    rate, effective = batch_size / size, sigma / math.sqrt(layers)
    mu = dpc.accounting.subsampled_gdp_mu(effective, rate, steps, "fixed_size")
    log_mu = (
        dpc.accounting.subsampled_gdp_log_h(effective)
        + 0.5 * math.log(2 * steps)
        + math.log(rate)
    )
    small = mu < 1e3
    rows: list[dict[str, object]] = [
        {
            "account": "paper: central limit of f-DP (no bound)",
            "relation": "replace one, fixed-size batches",
            "mu": mu if math.isfinite(mu) else f"10^{log_mu / math.log(10):.6g}",
            "epsilon": dpc.accounting.gdp_epsilon(mu, delta) if small else math.inf,
        }
    ]
    z = dpc.accounting.noise_multiplier_from_layerwise_sigma(sigma, layers)
    schemes = {
        "replace one, fixed-size batches": dpc.sampling.FixedSize(batch_size, size),
        "add or remove one, Poisson": dpc.sampling.Poisson(rate),
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
