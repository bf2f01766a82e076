"""Random graphs that are proven do not move; and the fuzzer finds a rule that lies."""

import pytest

from tests.fuzz.__main__ import daily_seed
from tests.fuzz.graphs.graph import judge
from tfdpclip.gradients.flows import gradient_flows, op_flows
from tfdpclip.gradients.flows.flow import Flow
from tfdpclip.gradients.graph import ops
from tfdpclip.gradients.proof import isolation_proof, single_examples

GRAPHS = 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
def test_no_graph_that_moves_is_proven(seed):
    for number in range(GRAPHS):
        found = judge(f"{seed}-{number}")
        assert not found.unsound, (seed, number, found)


@pytest.mark.slow
def test_graphs_of_the_day():
    for number in range(GRAPHS):
        found = judge(f"{daily_seed()}-{number}")
        assert not found.unsound, (number, found)


@pytest.mark.slow
def test_no_gradient_that_is_made_alone_moves():
    judged = [judge(f"3-{number}", alone=True) for number in range(3 * GRAPHS)]
    unknown = [found for found in judged if found.verdict == "unknown"]
    assert len(unknown) > 5
    assert all(found.moves is None for found in unknown)


def _is_found(*steps, within=0.9, tries=12):
    found = (judge(f"planted-{i}", steps, within) for i in range(tries))
    return any(judgement.unsound for judgement in found)


@pytest.mark.slow
def test_numbers_of_one_seed_that_are_taken_for_fresh_are_found(monkeypatch):
    monkeypatch.setattr(single_examples, "draws_the_same", lambda op: False)
    steps = ("dense", "made_for_rows")
    found = (judge(f"seed-{i}", steps, 0.2, alone=True) for i in range(60))
    assert any(judgement.moves for judgement in found)


def _row_by_row(op, output, inputs, batch_size):
    return inputs[0]


@pytest.mark.slow
@pytest.mark.parametrize("step, op", [("moved", "ReverseV2"), ("moved", "Roll")])
def test_a_rule_that_takes_an_op_for_row_by_row_is_found(step, op, monkeypatch):
    monkeypatch.setitem(op_flows._TABLE, op, _row_by_row)
    assert _is_found("dense", step, within=0.2)


def test_a_statistic_that_is_taken_for_public_is_found(monkeypatch):
    def public(op, output, inputs, batch_size):
        flow = op_flows._reduction(op, output, inputs, batch_size)
        return Flow() if flow.coupled is not None else flow

    for kind in ops.REDUCTIONS:
        monkeypatch.setitem(op_flows._TABLE, kind, public)
    assert _is_found("with_rows_of_all")


def test_a_gradient_that_mixes_and_is_taken_for_apart_is_found(monkeypatch):
    monkeypatch.setattr(gradient_flows, "gaps_of", lambda op, flows, gaps: iter(()))
    assert isolation_proof.gradient_flows is gradient_flows
    assert _is_found("own_gradient")
