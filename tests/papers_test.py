"""Recomputed numbers of the four papers, and the page that lists all of their parts."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
import shlex
import statistics

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc
from driver_kit import settings
from keras_examples import grids
from tests import source_tree, stack
from tests.source_tree import ROOT
from tfdpclip import accounting, sampling
from tfdpclip.tuning import geometric
from tff_tasks import command, registry

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


def test_noise_on_the_fraction_and_common_clip_norms_are_as_claimed():
    """Andrew et al.: sigma_b = m / 20, and the grids of Figure 6."""
    fraction = statistics.NormalDist(0, 1 / 20)
    for most, share in ((0.1, 0.954), (0.15, 0.997)):
        assert 1 - 2 * fraction.cdf(-most) == pytest.approx(share, abs=1e-3)
    grids_of = [
        task.paper.fixed_clips() for task in registry.TASKS.values() if task.file_name
    ]
    assert len(grids_of) == 6
    low, high = min(map(min, grids_of)), max(map(max, grids_of))
    assert (low, high) == (pytest.approx(0.22), pytest.approx(135))
    counts = [1 + math.log(high / low) / math.log(g[1] / g[0]) for g in grids_of]
    assert np.mean(counts) / 5 == pytest.approx(3.6, abs=0.05)


@pytest.mark.parametrize(
    ("sigma", "log_h"), [(0.01875, 88_177.8), (0.5, math.log(7.12e53))]
)
def test_the_limits_of_resnet_are_prohibitive(sigma, log_h):
    """Nguyen et al.: 62 layers; the numbers do not fit into a double."""
    found = accounting.subsampled_gdp_log_h(sigma / math.sqrt(62))
    assert found == pytest.approx(log_h, abs=0.5 if sigma < 0.1 else 5e-3)


def test_fifteen_times_the_data_have_the_printed_limit():
    found = accounting.subsampled_gdp_mu(
        1.5 / math.sqrt(8), 64 / (15 * 54_000), 50 * 54_000 * 15 // 64, "fixed_size"
    )
    assert f"{found:.2f}" == "0.51"


def test_the_data_sets_of_table_a2_have_their_sizes():
    sizes = {name.split("_")[0]: grid.size for name, grid in grids.GRIDS.items()}
    assert (sizes["sun397"], sizes["cassava"]) == (87_002, 7545)
    assert grids.GRIDS["cifar100_vit_tiny"].size == 50_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rate", "options"),
    [("DPSGD", 2.0, [{}, {}]), ("DPAdam", 1.0, [{"epsilon": 2e-7}, {"epsilon": 1e-7}])],
)
def test_the_normalised_form_is_the_standard_form_at_another_rate(name, rate, options):
    """Rehn et al. with C = 2: SGD's rate is multiplied by C, Adam's epsilon divided."""
    gradients = tf.constant([[3.0, 4.0], [0.3, 0.4], [-6.0, 8.0]])
    ends = []
    for normalize, factor, given in zip(
        (False, True), (1.0, rate), options, strict=True
    ):
        x = tf.Variable([1.0, -2.0])
        optimizer = getattr(dpc.keras, name)(
            0.1 * factor,
            clip=dpc.FixedClip(2.0, normalize=normalize),
            noise_multiplier=0.0,
            expected_batch_size=3,
            **given,
        )

        @tf.function
        def step(x=x, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(gradients * x, axis=1)
            optimizer.minimize(loss, [x], tape=tape)

        for _ in range(2):
            step()
        ends.append(x.numpy())
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-6)


def _table(header: str) -> list[list[str]]:
    page = (ROOT / "docs" / "papers.md").read_text()
    table = page[page.index(header) :].split("\n\n")[0]
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _rows() -> list[list[str]]:
    return _table("| part | command |")


def _missing() -> list[list[str]]:
    return _table("| accuracies | command |")


def test_every_row_of_the_papers_page_has_a_command_and_a_state():
    rows = _rows()
    assert len(rows) >= 75
    for row in rows:
        assert len(row) == 3, row
        assert all(row), row
        assert re.match(r"(exact|differs|not at hand)\b", row[2]), row
        # A difference has its reason.
        for found in re.finditer(r"differs(.*?)(?:;|$)", row[2]):
            assert len(found[1].split()) >= 3, row


#: The numbered parts of each paper.
PARTS = {
    "Andrew": ["Algorithm 1", "Theorem 1", "Table 1"]
    + [f"Figure {k}" for k in range(1, 8)],
    "Chen": [f"Theorem {k}" for k in range(1, 7)]
    + [f"Figure {k}" for k in range(1, 6)],
    "Nguyen": [f"Table {k}" for k in range(1, 4)]
    + [f"Figure {k}" for k in range(1, 19)],
    "Rehn": ["Algorithm 1", "Theorem 5.1"]
    + [f"Equation ({k})" for k in range(4, 8)]
    + [f"Figure {k}" for k in range(1, 8)]
    + [f"Figure A{k}" for k in range(1, 16)]
    + [f"Table A{k}" for k in range(1, 4)],
}


def _numbered(text: str) -> set[str]:
    """The numbered parts that a text names: Figures 2, A1 to A3 and 5."""
    found = set()
    number = r"\(?A?\d+(?:\.\d+)?\)?"
    kinds = "Figure|Table|Theorem|Algorithm|Equation"
    listed = rf"({kinds})s? ({number}(?:(?:,| to| and) {number})*)"
    for kind, numbers in re.findall(listed, text):
        for part in re.split(r", | and ", numbers):
            first, _, last = part.partition(" to ")
            letter, low = re.fullmatch(r"\(?(A?)([\d.]+)\)?", first).groups()
            high = re.sub(r"[A()]", "", last) or low
            if "." in low:
                found.add(f"{kind} {low}")
                continue
            for k in range(int(low), int(high) + 1):
                name = f"({k})" if kind == "Equation" else f"{letter}{k}"
                found.add(f"{kind} {name}")
    return found


def test_every_numbered_part_of_the_papers_has_a_row():
    paper, found = "", {name: set() for name in PARTS}
    for part, _, _ in _rows():
        paper = next((name for name in PARTS if f"**{name}" in part), paper)
        found[paper] |= _numbered(part)
    for name, parts in PARTS.items():
        assert set(parts) - found[name] == set(), name


def test_what_is_not_at_hand_has_a_command_and_hours():
    rows = _missing()
    assert len(rows) >= 15
    for row in rows:
        assert len(row) == 3 and all(row), row
        assert "--data_dir=" in row[1] or "--results=" in row[1], row
        assert re.search(r"\d", row[2]), row


def _commands() -> list[list[str]]:
    cells = [row[1] for row in _rows() + _missing()]
    named = r"`((?:keras_examples|tff_tasks)\.\w+[^`]*)`"
    return [shlex.split(c) for cell in cells for c in re.findall(named, cell)]


def test_every_command_of_the_papers_page_has_flags_that_its_program_takes():
    """Parsed as the program parses them."""
    tried = 0
    for program, *flags in _commands():
        module = importlib.import_module(program)
        package, name = program.split(".")
        kinds = [
            kind
            for kind in vars(module).values()
            if dataclasses.is_dataclass(kind) and settings.of(kind)
            if kind.__module__ == program
        ]
        if kinds:
            settings.parse(kinds[0], [name, *flags])
        else:
            assert package == "tff_tasks"
            command.config_from(name, flags)
        tried += bool(flags)
    assert tried > 30


def test_every_program_and_name_of_the_papers_page_exists():
    known = source_tree.find_modules()
    tried = 0
    for _, cell, _ in _rows():
        for name in re.findall(r"`((?:keras_examples|tff_tasks|dpc)\.[\w.]+)", cell):
            tried += 1
            if not name.startswith("dpc."):
                assert name in known, name
                continue
            if name.startswith("dpc.federated") and not stack.FEDERATED:
                continue
            found = importlib.import_module("tfdpclip")
            for part in name.split(".")[1:]:
                found = getattr(found, part)
    assert tried > 80
