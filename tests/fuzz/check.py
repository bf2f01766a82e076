"""Runs a spec with the library, compares it with the truth, and names the outcome."""

from __future__ import annotations

import traceback
import warnings

import numpy as np
import tensorflow as tf

from tests.fuzz import model as models
from tests.fuzz.outcome import (
    CAUGHT,
    CRASHED,
    EXACT,
    EXCEEDED,
    HARMLESS,
    IMPOSSIBLE,
    MISMATCH,
    MISSED,
    REFUSED,
    WARNED,
    WRONG,
    Outcome,
    is_ours,
    line_of,
)
from tests.fuzz.spec import Spec
from tests.fuzz.steps import Step, control

# An example has an effect on another example's gradient if it moves that gradient by
# `_EFFECT` of the largest, and no effect below `_NONE`. In between, no verdict is
# given.
_EFFECT, _NONE = 1e-3, 1e-6
# The errors that rounding explains: relative to the norm, and to the largest norm of
# the batch.
_TOLERANCE = {"float32": (2e-4, 2e-6), "mixed_bfloat16": (8e-2, 4e-2)}
# No example replaced.
_SAME = (0,), "same"


class _Failed(Exception):
    def __init__(self, kind, detail):
        super().__init__(detail)
        self.outcome = Outcome(kind, detail)


def check(spec: Spec) -> Outcome:
    """Checks a model and returns the outcome."""
    try:
        return _check(spec)
    except _Failed as failed:
        return failed.outcome
    except Exception as error:  # noqa: BLE001  A worker goes on.
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f" at {where.filename.split('/')[-1]}:{where.name}"
        return Outcome(CRASHED, "unforeseen: " + line_of(error)[:200] + place)


def _check(spec: Spec) -> Outcome:
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(spec.seed)
    try:
        model = models.Model(spec)
        effect, shown = _effect(model) if models.is_mixed(spec) else (0.0, _SAME)
        truth = _truth(model, effect)
    except Exception as error:  # noqa: BLE001  TensorFlow cannot run it.
        return Outcome(IMPOSSIBLE, "reference: " + line_of(error))
    finite = np.isfinite(truth)
    if not finite.any() or np.abs(truth[finite]).max() > 1e6:
        return Outcome(IMPOSSIBLE, "the gradients are not finite")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            step = Step(model, truth)
            found = step(model.data)
        except Exception as error:  # noqa: BLE001  `_refusal` judges each error.
            return _refusal(model, error, effect)
    if found.dead:
        return Outcome(CAUGHT if effect >= _EFFECT else REFUSED, "no example counted")
    warned = any("JacobianFallback" in type_of(w) for w in caught)
    if any("OneByOne" in type_of(w) for w in caught):
        # Each gradient is computed from a single example's data, so no other example
        # can move it.
        return Outcome(WARNED, "one example at a time")
    if effect >= _EFFECT:
        if _active(model, truth):
            raise _Failed(MISSED, f"at once: {planted(spec)} moves others")
        return _late(model, step, "in another batch", shown)
    if models.is_mixed(spec):
        late, shown = _moved_effect(model)
        if late >= _EFFECT:
            return _late(model, step, "after the weights moved", shown)
        if effect > _NONE:
            return Outcome(HARMLESS, f"effect {effect:.1g}")
    if models.is_random(spec):
        try:
            _compare_random(model, step)
        except _Failed:
            raise
        except Exception as error:  # noqa: BLE001
            return _refusal(model, error, effect)
    else:
        _compare(model, step, truth, found)
        if not spec.mode.get("poison"):
            _bounded(model, step, found)
    if models.is_mixed(spec):
        return Outcome(HARMLESS, "exact")
    return Outcome(WARNED if warned else EXACT)


def type_of(warning) -> str:
    """The name of a recorded warning's category."""
    return warning.category.__name__


def moves_others(spec: Spec) -> bool:
    """Whether, in truth, an example has an effect on others' gradients."""
    tf.keras.utils.set_random_seed(spec.seed)
    return _effect(models.Model(spec))[0] >= _EFFECT


def _truth(model, effect):
    if models.is_mixed(model.spec):
        return model.together()
    return model.alone()


def _effect(model) -> tuple[float, tuple[tuple[int, ...], str]]:
    """The largest relative effect of an example on the gradients of the other examples.

    Also returns the replacement that had this effect: the examples' places and the
    kind. A difference between the sum of the gradients and the gradient of the summed
    losses counts as an effect as well.
    """
    before = model.together()
    found = _gap(model, before), _SAME
    for places, kind in _replacements(model.spec):
        if found[0] >= _EFFECT:
            break
        after = model.together(_replaced(model, places, kind))
        others = [i for i in range(model.spec.batch) if i not in places]
        moved = np.abs(after - before)[others]
        size = np.nanmax(np.abs(np.stack([after, before])[:, others]))
        if np.isfinite(size) and size > 1e-12:
            found = max(found, (float(np.nanmax(moved) / size), (places, kind)))
    return found


def _replacements(spec):
    """The places and kinds of replacement to try.

    Only a few of them open thresholds.
    """
    first, last = (0,), (spec.batch - 1,)
    yield from ((first, "new"), (first, "large"), (last, "large"), ((1,), "zero"))
    for places in (first, (1,), last):
        for kind in ("new", "large", "zero", "small", "copy"):
            yield places, kind
    # Replace all examples but the last, which makes an outlier of the last.
    for kind in ("large", "small", "copy"):
        yield tuple(range(last[0])), kind


def _replaced(model, places, kind):
    data = model.data
    for j in places:
        data = models.replaced(model.spec, data, j, kind)
    return data


def _gap(model, rows) -> float:
    """The relative distance of the gradient of the sum from the sum of the gradients.

    Returns 0.0 if rounding explains the distance.
    """
    size = np.nanmax(np.abs(rows))
    gap = np.nanmax(np.abs(model.of_sum() - rows.sum(axis=0)))
    least = 0.3 if model.env.dtype == "mixed_bfloat16" else _EFFECT
    return float(gap / size) if 1e-12 < size < np.inf and gap > least * size else 0.0


def _move(model) -> None:
    """Moves the weights, so that gates open."""
    for i, variable in enumerate(model.variables):
        noise = model.env.numbers(f"moved{i}", variable.shape, 0.2)
        variable.assign_add(tf.cast(noise, variable.dtype))


def _moved_effect(model) -> tuple[float, tuple[tuple[int, ...], str]]:
    before = [v.numpy() for v in model.variables]
    _move(model)
    found = _effect(model)
    if found[0] < _EFFECT:
        for variable, value in zip(model.variables, before, strict=True):
            variable.assign(value)
    return found


def _active(model, truth) -> bool:
    """Whether this very batch mixes examples, and not later batches alone."""
    if _gap(model, truth):
        return True
    alone = model.alone()
    size = max(np.nanmax(np.abs(alone)), np.nanmax(np.abs(truth)))
    return not np.nanmax(np.abs(alone - truth)) < _EFFECT * size


def _late(model, step, when, shown) -> Outcome:
    """Runs a mixer that had no effect at the first step; a later step must find it.

    Every second step has the data that show the effect, steps 2, 4 and 8 among them.
    """
    try:
        for i in range(8):
            usual = (i % model.spec.batch,), "new"
            found = step(_replaced(model, *(usual if i % 2 else shown)))
            if found.dead:
                return Outcome(CAUGHT, "late: no example counted")
    except Exception as error:  # noqa: BLE001
        if is_ours(error):
            return Outcome(CAUGHT, "late: " + line_of(error))
        raise _Failed(CRASHED, line_of(error)) from error
    raise _Failed(MISSED, f"{when}: {planted(model.spec)} moves others")


def planted(spec: Spec) -> str:
    """The names of the mixers planted in a spec."""
    names = [
        "-".join([n.name, *map(str, n.args.values())])
        for n in spec.nodes()
        if models.BLOCKS[n.name].mixes
    ]
    if spec.loss.get("reduction") in models.losses.MIXED:
        names.append(spec.loss["reduction"])
    return " ".join(names).replace("/", "_")


def _refusal(model, error, effect) -> Outcome:
    if isinstance(error, tf.errors.InternalError) and "hlo verifier" in str(error):
        return Outcome(IMPOSSIBLE, "XLA refuses what XLA made")
    if is_ours(error):
        line = line_of(error)
        if effect < _EFFECT and "GradientMismatchError" in line:
            return Outcome(MISMATCH, line)
        return Outcome(CAUGHT if effect >= _EFFECT else REFUSED, line)
    try:
        control(model)
    except Exception as alone:  # noqa: BLE001
        return Outcome(IMPOSSIBLE, "without the library: " + line_of(alone))
    where = traceback.extract_tb(error.__traceback__)
    ours = [f for f in where if "/tfdpclip/" in f.filename]
    place = f" at {ours[-1].filename.split('/')[-1]}:{ours[-1].name}" if ours else ""
    return Outcome(CRASHED, line_of(error)[:220] + place)


def _compare(model, step, truth, found) -> None:
    if model.spec.mode.get("jit") and model.spec.mode.get("poison") in ("nan", "inf"):
        # A maximum may hide NaN; it does not where XLA compiles the maximum together
        # with its gradient.
        def losses(*data):
            each, loss = model.forward(*data)
            return model.of_records(each), [
                tf.convert_to_tensor(part)
                for part in tf.gradients(loss, model.variables)
                if part is not None
            ]

        compiled = tf.function(
            losses,
            input_signature=model.signature(model.spec.mode.get("dynamic", False)),
            jit_compile=True,
            autograph=False,
        )
        model.reset()
        lost = ~np.isfinite(compiled(*model.data)[0].numpy())
        truth = np.where(lost[:, np.newaxis], np.nan, truth)
    problem = step.problem(found, truth, _tolerance(model))
    if problem is None:
        return
    if model.env.dtype == "float32":
        # The rounding error may be the reference's.
        precise = models.Model(model.spec, "float64")
        for v, given in zip(precise.variables, step.start, strict=True):
            v.assign(tf.cast(given, v.dtype))
        mixed = models.is_mixed(model.spec)
        exact = precise.together() if mixed else precise.alone()
        rounding = np.nanmax(np.abs(exact - truth)) / np.nanmax(np.abs(exact))
        if rounding > 1e-3:
            return
        problem = step.problem(found, exact, _tolerance(model))
        if problem is None:
            return
    raise _Failed(WRONG, problem)


def _tolerance(model):
    return _TOLERANCE[model.env.dtype]


def _compare_random(model, step) -> None:
    """With a single example's loss, the sum must be that example's gradient."""
    found = step.one_by_one()
    if found is not None:
        raise _Failed(*found)


def _bounded(model, step, found) -> None:
    """Checks the guarantee: replacing an example moves the sum by at most 2 C."""
    spec = model.spec
    bound = 2 * step.sensitivity
    slack = 1e-3 if model.env.dtype == "float32" else 3e-2
    for j, kind in ((0, "large"), (spec.batch - 1, "zero"), (0, "new")):
        data = models.replaced(spec, model.data, j, kind)
        try:
            other = step(data)
        except Exception as error:  # noqa: BLE001
            if is_ours(error):
                return
            raise _Failed(CRASHED, f"replaced by {kind}: {line_of(error)}") from error
        moved = float(np.linalg.norm(other.sums - found.sums))
        size = float(np.abs(found.sums).max())
        if not moved <= bound * (1 + slack) + 1e-5 * size + step.grain:
            times = moved / step.sensitivity
            raise _Failed(EXCEEDED, f"replaced by {kind}: moves {times:.2f} C")
