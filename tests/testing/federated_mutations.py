"""Bugs planted in the federated half, each with the check that must find it.

Every mutation is a mistake that was made, or could be made, in a private aggregator.
`python -m tests.testing.mutations` writes which check found it.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tests.testing import federated_bugs as bugs
from tests.testing.planting import Mutation
from tfdpclip import clipping, federated, testing
from tfdpclip.clipping import rules
from tfdpclip.federated import (
    _discrete_noise,
    _entropy,
    _processes,
    aggregators,
    distributed,
)
from tfdpclip.federated import secure as secure_lib
from tfdpclip.federated._processes import Summation
from tfdpclip.federated._records import RecordClip
from tfdpclip.kernel import noise_split
from tfdpclip.mechanism import Mechanism

# Few clients: a count then is as telling as the update.
CLIENTS = 12
SMALL = tff.to_type([(np.float32, [3, 2]), (np.float32, [2])])
WIDE = tff.to_type([(np.float32, [800]), (np.float32, [20, 20])])
QUANTILE = clipping.QuantileClip(initial_norm=1.0)


def factory_of(**options):
    settings = {"noise_multiplier": 0.5, "clients_per_round": CLIENTS, "clip": QUANTILE}
    # Asked again each time, so that a planted bug can be in the constructor.
    return federated.clipped_mean(**{**settings, **options})


def context():
    """The context of the checks: a single one, because each starts a worker."""
    return federated.local_context(simulate_secure_sums=True)


# Checks: each raises AssertionError, or nothing.


def sensitivity(**options):
    testing.assert_aggregator_sensitivity(factory_of(**options), SMALL)


def noise(**options):
    testing.assert_aggregator_noise(factory_of(**options), WIDE)


def audit(**options):
    """One round with a thousand canaries. False alarm: 1e-6."""
    factory = factory_of(**options)
    testing.audit_aggregator(factory, delta=1e-10, confidence=1 - 1e-6, seed=0)


def derivation():
    """Seeds that differ by one bit derive different seeds, all of whose bits vary."""
    start = np.random.default_rng().bytes(16)
    parents = [np.frombuffer(start, np.int64)]
    for bit in range(128):
        flipped = np.frombuffer(start, np.uint8).copy()
        flipped[bit // 8] ^= 1 << bit % 8
        parents.append(flipped.view(np.int64))
    for purpose in (0, 1):
        made = [_entropy.derive(tf.constant(p), purpose).numpy() for p in parents]
        distinct = len({word.tobytes() for word in made})
        assert distinct == 129, f"129 seeds, a bit from the first, make {distinct}"
        bits = np.unpackbits(np.stack(made).view(np.uint8), axis=1)
        # All 129 alike with probability 2^-128.
        varied = int(np.sum(np.ptp(bits, axis=0)))
        assert varied == 128, f"of 128 bits of derived seeds, {varied} vary"


LAYERWISE = {"clip": clipping.LayerwiseClip(QUANTILE)}
FIXED = {"clip": 0.7}
SECURE = {"secure": True}
COARSE = {"secure": federated.SecureSettings(bits=7), "clip": 0.7}
DISTRIBUTED = {
    "secure": federated.SecureSettings(bits=28),
    "noise": "distributed",
    "minimum_clients": 6,
}
QUIET = {"noise_multiplier": 3.0, "clients_per_round": 1000, "clip": 0.7}
WEIGHTED = {"weight_cap": 4.0, **FIXED}
DOUBLING = {"inner": federated.InnerSum(bugs.Doubling(), inflation=2.0), **FIXED}

MUTATIONS = [
    Mutation(
        "weights without a cap",
        RecordClip,
        "weigh",
        bugs.uncapped,
        sensitivity,
        WEIGHTED,
    ),
    Mutation(
        "rounding after the clip, with no room left for it",
        secure_lib.SecureEncoding,
        "_shrink",
        bugs.no_room_for_rounding,
        sensitivity,
        COARSE,
    ),
    Mutation(
        "exact fraction among the measurements",
        Summation,
        "release",
        bugs.exact_fraction_measured,
        sensitivity,
        slow=True,
    ),
    Mutation(
        "exact norm of the mean among the measurements",
        Summation,
        "release",
        bugs.exact_mean_measured,
        sensitivity,
    ),
    Mutation(
        "count without noise", Mechanism, "release", bugs.no_count_noise, sensitivity
    ),
    Mutation(
        "clip follows the exact count, the noised one is shown",
        Mechanism,
        "release",
        bugs.exact_adaptation,
        sensitivity,
        slow=True,
    ),
    Mutation(
        "noise scaled by the next clip norm",
        Mechanism,
        "release",
        bugs.next_clip_noise,
        sensitivity,
    ),
    Mutation(
        "noise scaled by the first clip norm",
        Mechanism,
        "_stddevs",
        bugs.first_clip_noise,
        sensitivity,
    ),
    Mutation(
        "noise divided by the cohort's size twice",
        Mechanism,
        "_stddevs",
        bugs.noise_divided_twice,
        sensitivity,
        slow=True,
    ),
    Mutation(
        "inflation of an inner sum ignored",
        Mechanism,
        "_stddevs",
        bugs.no_inflation,
        sensitivity,
        DOUBLING,
        slow=True,
    ),
    Mutation(
        "noise not split between update and count",
        noise_split,
        "remaining_multiplier",
        lambda z, stddevs: z,
        sensitivity,
    ),
    Mutation(
        "counts of groups with a root of their number too little noise",
        Mechanism,
        "release",
        bugs.missing_root,
        sensitivity,
        LAYERWISE,
        slow=True,
    ),
    Mutation(
        "sqrt(L) missing",
        clipping.LayerwiseClip,
        "noise_scales",
        lambda self, state: self.sensitivity(state),
        sensitivity,
        LAYERWISE,
        slow=True,
    ),
    Mutation(
        "mean over the clients that came",
        _processes,
        "PlainSum",
        bugs.MeanOfThosePresent,
        sensitivity,
    ),
    Mutation(
        "fraction of the clients that came",
        _processes,
        "PlainSum",
        bugs.FractionOfThosePresent,
        sensitivity,
        slow=True,
    ),
    Mutation(
        "sum clipped at the server, not the clients' updates",
        _processes,
        "PlainSum",
        bugs.ServerClips,
        sensitivity,
        FIXED,
    ),
    Mutation("NaN let through", RecordClip, "weigh", bugs.nan_through, sensitivity),
    Mutation(
        "NaN counted as present", RecordClip, "weigh", bugs.nan_counted, sensitivity
    ),
    Mutation(
        "clip by the largest tensor's norm",
        RecordClip,
        "_per_group",
        bugs.largest_tensor,
        sensitivity,
        FIXED,
        slow=True,
    ),
    Mutation(
        "bits of 1 in place of 1/2",
        rules.QuantileClip,
        "indicators",
        bugs.twice_the_bits,
        sensitivity,
        slow=True,
    ),
    Mutation(
        "secure counts scaled wrongly",
        secure_lib.CountEncoding,
        "decode",
        bugs.twice_the_counts,
        sensitivity,
        SECURE,
        slow=True,
    ),
    Mutation(
        "shares of noise for the full cohort, not for those who stay",
        distributed,
        "plan",
        bugs.full_cohort,
        sensitivity,
        DISTRIBUTED,
    ),
    Mutation(
        "shares of noise divided by n, not by its root",
        distributed,
        "plan",
        bugs.shares_of_the_whole,
        sensitivity,
        DISTRIBUTED,
        slow=True,
    ),
    Mutation(
        "sum leaves the modulus",
        distributed,
        "plan",
        bugs.narrow_modulus,
        sensitivity,
        DISTRIBUTED,
        slow=True,
    ),
    Mutation(
        "modular sum not centred",
        distributed,
        "decode",
        bugs.not_centred,
        sensitivity,
        DISTRIBUTED,
        slow=True,
    ),
    Mutation(
        "the same noise in every round", _entropy, "fresh_seed", bugs.fixed_seed, noise
    ),
    Mutation(
        "the same share of noise from every client",
        _entropy,
        "fresh_seed",
        bugs.fixed_seed,
        noise,
        DISTRIBUTED,
        slow=True,
    ),
    Mutation(
        "derivation of seeds that keeps 32 bits",
        _entropy,
        "derive",
        bugs.folded_to_32_bits,
        derivation,
    ),
    Mutation(
        "derivation of seeds that keeps 64 bits",
        _entropy,
        "derive",
        bugs.mixed_to_64_bits,
        derivation,
    ),
    Mutation(
        "noise seeded by the round",
        Summation,
        "release",
        bugs.seeded_by_round,
        noise,
    ),
    Mutation(
        "the same noise for every tensor",
        _entropy,
        "standard_normal",
        bugs.same_for_all_tensors,
        noise,
        slow=True,
    ),
    Mutation(
        "noise that is not Gaussian",
        _entropy,
        "standard_normal",
        bugs.uniform,
        noise,
        slow=True,
    ),
    Mutation(
        "noise a tenth too small",
        _entropy,
        "standard_normal",
        bugs.a_tenth_too_small,
        noise,
    ),
    Mutation(
        "no shares of noise",
        _discrete_noise,
        "sample",
        bugs.no_shares,
        noise,
        DISTRIBUTED,
        slow=True,
    ),
    Mutation(
        "no noise at all",
        _entropy,
        "standard_normal",
        lambda count, seed: tf.zeros([count]),
        audit,
        QUIET,
    ),
    Mutation(
        "event with too large a multiplier",
        aggregators.ClippedMeanFactory,
        "_private_event",
        bugs.bold_event,
        audit,
        FIXED,
    ),
    Mutation(
        "distributed noise that is not added",
        _discrete_noise,
        "sample",
        bugs.no_shares,
        audit,
        {**DISTRIBUTED, **QUIET, "minimum_clients": 1000},
        slow=True,
    ),
]
