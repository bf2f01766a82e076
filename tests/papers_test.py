"""Recomputed numbers of the four papers, and the page that lists all of their parts."""

from __future__ import annotations

import importlib
import math
import re

import numpy as np
import pytest

from keras_examples import grids
from tests import source_tree, stack
from tests.source_tree import ROOT
from tfdpclip import accounting, sampling
from tfdpclip.tuning import geometric

POPULATION = 10**6
DELTA = POPULATION**-1.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise_multiplier", "rounds", "clients", "scaled"),
    [
        (0.03, 4000, 2231, 0.669),
        (0.1, 1500, 513, 0.513),
        (0.03, 3000, 2197, 0.659),
        (0.1, 1200, 510, 0.510),
        # Printed: 13,958.
        (0.01, 1500, 13_961, 1.396),
    ],
)
def test_the_cohorts_of_table_1_follow_from_epsilon_5(
    noise_multiplier, rounds, clients, scaled
):
    """Andrew et al., as they count: a client replaced, with sensitivity C."""
    plan = accounting.cohort_for(
        5.0,
        DELTA,
        POPULATION,
        rounds,
        noise_multiplier,
        100,
        sampling="fixed_size",
        accountant="rdp",
        sensitivity=1.0,
    )
    assert plan.clients_per_round == clients
    assert plan.noise_multiplier == pytest.approx(scaled, abs=6e-4)


def test_the_epsilon_of_figure_2_is_0_034():
    """Andrew et al.: 200 rounds of a count of 100 clients with noise 5."""
    scheme = sampling.FixedSize(100, POPULATION)
    found = accounting.epsilon(2 * 5.0, 200, scheme, DELTA, "rdp")
    assert found == pytest.approx(0.03398, abs=5e-6)


@pytest.mark.parametrize(
    ("sigma", "h", "mu"), [(2.5, "1.514", "0.52"), (1.5, "5.783", "1.99")]
)
def test_the_limits_of_batch_clipping_are_those_of_eight_layers(sigma, h, mu):
    """Nguyen et al., BN-LeNet-5: they print 1.513 for the first h, and the same mu."""
    effective = sigma / math.sqrt(8)
    assert f"{math.exp(accounting.subsampled_gdp_log_h(effective)):.3f}" == h
    steps = 50 * 54_000 // 64
    found = accounting.subsampled_gdp_mu(effective, 64 / 54_000, steps, "fixed_size")
    assert f"{found:.2f}" == mu


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("cifar100_vit_tiny", 448),
        ("cifar100_vit_base", 448),
        ("sun397_vit_tiny", 640),
        ("sun397_vit_base", 400),
        ("cassava_vit_tiny", 240),
    ],
)
def test_the_grids_of_table_a1_have_the_papers_runs(name, runs):
    """Rehn et al.: runs for each epsilon and seed; batches no larger than the data."""
    grid = grids.GRIDS[name]
    count = len(grid.batch_sizes()) * grid.rates[2] * len(grid.clip_norms)
    assert count == runs


def test_the_rates_of_table_a1_are_geometric():
    rates = geometric(*grids.GRIDS["cifar100_vit_tiny"].rates)
    expected = [0.001, 0.001534127, 0.002353547, 0.003610641]
    expected += [0.005539183, 0.008497812, 0.01303673, 0.02]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def _rows() -> list[list[str]]:
    page = (ROOT / "docs" / "papers.md").read_text()
    table = page[page.index("| part | command |") :].split("\n\n")[0]
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_of_the_papers_page_has_a_command_and_a_state():
    rows = _rows()
    assert len(rows) >= 45
    for row in rows:
        assert len(row) == 3, row
        assert all(row), row
        assert re.match(r"(exact|differs|audited|not at hand)\b", row[2]), row


def test_every_program_and_name_of_the_papers_page_exists():
    known = source_tree.find_modules()
    tried = 0
    for _, command, _ in _rows():
        for name in re.findall(r"`((?:keras_examples|tff_tasks|dpc)\.[\w.]+)", command):
            tried += 1
            if not name.startswith("dpc."):
                assert name in known, name
                continue
            if name.startswith("dpc.federated") and not stack.FEDERATED:
                continue
            found = importlib.import_module("tfdpclip")
            for part in name.split(".")[1:]:
                found = getattr(found, part)
    assert tried > 40
