"""Random models of the day, models that were once wrong, and the fuzzer's own tests."""

from __future__ import annotations

import time

import pytest

from tests.fuzz import __main__ as command
from tests.fuzz import losses
from tests.fuzz import outcome as outcomes
from tests.fuzz.__main__ import daily_seed, report_of
from tests.fuzz.channels import CHANNELS
from tests.fuzz.check import check, moves_others
from tests.fuzz.gradient_mixers import COTANGENTS, FORMS, GATES, STATISTICS
from tests.fuzz.grammar import generate
from tests.fuzz.outcome import Outcome
from tests.fuzz.planted import planted
from tests.fuzz.record_mixers import ACROSS, WITHIN
from tests.fuzz.registry import BLOCKS
from tests.fuzz.regressions import REGRESSIONS
from tests.fuzz.shrink import candidates, shrink
from tests.fuzz.spec import Node, Spec
from tests.fuzz.unseen_mixers import DRAWS
from tests.fuzz.workers import Worker

pytestmark = pytest.mark.every_check

# A model takes a few seconds; a slow machine checks fewer of them.
MODELS, SECONDS = 20, 30

DENSE = Spec(body=(Node("dense", {"activation": "tanh"}),), input="sequence")
# The graph analysis does not find this mixer; the step does.
NEIGHBOURS = Spec(body=(Node("dense"), Node("mix", {"how": "concat_shift"})))


@pytest.fixture(scope="module")
def worker():
    with Worker() as one:
        yield one


@pytest.mark.slow
def test_models_of_the_day(worker):
    """Repeat a failure with the seed that is printed."""
    seed, start = daily_seed(), time.monotonic()
    print(f"make fuzz ARGS='--seed={seed} --models={MODELS}'")
    failed = []
    for number in range(MODELS):
        if time.monotonic() - start > SECONDS:
            break
        spec = generate(seed, number)
        outcome = worker(spec)
        if outcome.failed:
            failed.append(report_of(spec, outcome))
    assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "regression",
    [
        pytest.param(
            r,
            id=r.name,
            marks=[pytest.mark.slow] * r.slow
            + [pytest.mark.xfail(reason=r.known, strict=True)] * bool(r.known),
        )
        for r in REGRESSIONS
    ],
)
def test_regression(regression, worker):
    outcome = worker(regression.spec)
    assert not outcome.failed, report_of(regression.spec, outcome)
    assert outcome.kind in regression.allowed, outcome


# Tests of the fuzzer.


@pytest.mark.slow
def test_a_sound_model_is_exact():
    assert check(DENSE).kind == outcomes.EXACT


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["small norms", "wrong sums"])
def test_a_wrong_rule_is_found(bug):
    with planted(bug):
        assert check(DENSE).kind == outcomes.WRONG


def test_a_mixer_that_is_not_refused_is_found():
    with planted("no proof"):
        assert check(NEIGHBOURS).kind == outcomes.MISSED


def between(node, seed=0):
    body = (Node("dense", {"activation": "tanh"}), node, Node("dense"))
    return Spec(seed=seed, batch=5, body=body)


def is_seen(specs):
    return any(moves_others(spec) for spec in specs)


@pytest.mark.parametrize("how", STATISTICS)
@pytest.mark.thinned(16)
def test_the_truth_sees_a_statistic_that_scales_gradients(how):
    node = Node("mix_gradient", {"how": how})
    assert is_seen(between(node, seed) for seed in range(8))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.thinned(3)
def test_the_truth_sees_gradients_scaled_in_any_form(form):
    node = Node("mix_gradient", {"how": "argsort", "form": form})
    assert is_seen(between(node, seed) for seed in range(8))


@pytest.mark.parametrize("how", CHANNELS)
@pytest.mark.parametrize("form", ["forwards", "damped", "backwards"])
@pytest.mark.thinned(8)
def test_the_truth_sees_what_is_kept_elsewhere_and_it_is_refused(how, form):
    spec = between(Node("mix_elsewhere", {"how": how, "form": form}))
    assert is_seen([spec])
    assert check(spec).kind == outcomes.CAUGHT


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("how", ["gather", "max"])
@pytest.mark.thinned(6)
def test_the_truth_sees_statistics_beside_draws_and_they_are_refused(how, draw):
    specs = (
        between(Node("mix_drawn", {"how": how, "draw": draw}), seed)
        for seed in range(8)
    )
    found = check(next(spec for spec in specs if is_seen([spec])))
    if draw == "poisson" and found.kind == outcomes.IMPOSSIBLE:
        # TensorFlow itself raises an error, with the library and without.
        assert "No gradient defined" in found.detail
    else:
        assert found.kind in (outcomes.CAUGHT, outcomes.WARNED)


@pytest.mark.parametrize("how", COTANGENTS)
@pytest.mark.thinned(4)
def test_the_truth_sees_gradients_that_meet_on_the_way_back(how):
    assert is_seen([between(Node("mix_cotangents", {"how": how}))])


@pytest.mark.parametrize("reduction", losses.GATED)
@pytest.mark.thinned(4)
def test_the_truth_sees_a_loss_that_drops_gradients(reduction):
    loss = {"reduction": reduction}
    assert is_seen(
        Spec(seed=seed, batch=5, body=(Node("dense"),), loss=loss) for seed in range(8)
    )


@pytest.mark.parametrize("how", GATES)
@pytest.mark.slow
def test_a_gate_of_each_example_is_exact(how):
    # The table of ops has none that no model needs; lists of a loop are not read.
    one_by_one = how in ("map", "searchsorted", "fake_quant", "svd")
    kind = outcomes.WARNED if one_by_one else outcomes.EXACT
    assert check(between(Node("gate_gradient", {"how": how}))).kind == kind


@pytest.mark.parametrize("reduction", losses.OWN)
@pytest.mark.slow
def test_a_loss_that_drops_gradients_by_itself_is_exact(reduction):
    spec = Spec(body=(Node("dense"),), loss={"reduction": reduction})
    assert check(spec).kind == outcomes.EXACT


def records(name, how, **mode):
    body = between(Node(name, {"how": how})).body
    return Spec(batch=4, body=body, mode={"rows": 2, **mode})


@pytest.mark.parametrize("how", WITHIN)
@pytest.mark.slow
def test_rows_of_one_record_may_meet(how):
    for dynamic in (False, True):
        found = check(records("within_record", how, dynamic=dynamic))
        assert found.kind == outcomes.EXACT, found


@pytest.mark.parametrize("how", ACROSS)
@pytest.mark.thinned(8)
def test_rows_of_two_records_may_not_meet(how):
    for dynamic in (False, True):
        found = check(records("mix_records", how, dynamic=dynamic))
        assert found.kind == outcomes.CAUGHT, found


def test_a_sum_that_moves_too_far_is_found():
    with planted("unclipped"):
        assert check(DENSE).kind in (outcomes.WRONG, outcomes.EXCEEDED)


def test_an_error_that_is_not_ours_is_a_crash():
    with planted("foreign error"):
        outcome = check(DENSE)
    assert outcome.kind == outcomes.CRASHED
    assert "AddN" in outcome.detail


def test_a_refusal_is_no_failure():
    spec = Spec(body=(Node("mix", {"how": "rolled"}),))
    assert check(spec).kind == outcomes.CAUGHT


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_an_outcome():
    with Worker(planted="death") as dying:
        assert "died" in dying(DENSE).detail
        # The next spec is checked by a new process.
        assert dying(DENSE).kind == outcomes.CRASHED
    with Worker(planted="sleep", seconds=10) as hanging:
        assert hanging(DENSE) == Outcome(outcomes.IMPOSSIBLE, "took too long")


def test_a_failure_shrinks_to_what_it_needs():
    spec = next(
        spec
        for spec in (generate(0, number) for number in range(1000))
        if any(n.name == "conv1d" and n.args["groups"] == 2 for n in spec.nodes())
        and len(list(spec.nodes())) > 4
    )

    def fails(spec):
        return any(n.args.get("groups") == 2 for n in spec.nodes())

    found = shrink(spec, fails, attempts=1000)
    assert found.body == (Node("conv1d", {"groups": 2}),)
    assert not found.mode and found.seed == 0 and found.batch == 2


@pytest.mark.slow
def test_a_failure_shrinks_with_the_library():
    body = (Node("residual", {}, (Node("within"), Node("dense"))), Node("norm"))
    spec = Spec(body=body, loss={"reduction": "mean"})
    with planted("small norms"):
        found = shrink(spec, lambda other: check(other).kind == outcomes.WRONG, 12)
    assert len(list(found.nodes())) < len(list(spec.nodes()))


def test_a_printed_model_is_the_same_model():
    for number in range(200):
        spec = generate(3, number)
        assert Spec.from_json(spec.to_json()) == spec
        assert generate(3, number) == spec
        for smaller in candidates(spec):
            assert Spec.from_json(smaller.to_json()) == smaller


def test_every_word_of_the_grammar_is_used():
    left = set(BLOCKS)
    for number in range(2000):
        left -= {node.name for node in generate(1, number).nodes()}
        if not left:
            break
    assert not left


@pytest.mark.slow
def test_the_command_prints_a_small_model_that_repeats_the_failure(monkeypatch, capsys):
    class Fake(Worker):
        def __call__(self, spec):
            wrong = any(n.name == "dense" for n in spec.nodes())
            return Outcome(outcomes.WRONG if wrong else outcomes.EXACT)

    monkeypatch.setattr(command, "Worker", Fake)
    assert command.main(["--models=30", "--seed=5"]) == 1
    printed = capsys.readouterr().out
    assert "seed 5" in printed
    assert Spec(body=(Node("dense"),), batch=2).to_json() in printed
    assert command.main(["--models=1", f"--spec={Spec().to_json()}"]) == 0
