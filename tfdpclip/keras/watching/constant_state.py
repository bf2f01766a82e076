"""Checks that untrained variables that a loss reads stay constant during a run.

A write after `minimize`, in a callback or in another function, is in no graph that the
optimizer sees. The values of the variables that a loss reads are therefore compared
from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._devices import in_xla
from tfdpclip._docs import see
from tfdpclip._keras_marks import variable_of_call
from tfdpclip._notes import NOTES
from tfdpclip._object_notes import notes_of_variable
from tfdpclip._outside import outside_of_functions
from tfdpclip._variables import components, unwrapped
from tfdpclip.gradients import ExampleIsolationError
from tfdpclip.gradients.loss.state import StateRead
from tfdpclip.keras import _compat
from tfdpclip.keras.watching.fit_arguments import callbacks_of_fit

# In every step, the smallest variables are compared: at most `_SMALL_COUNT` variables,
# with at most `_SMALL_ENTRIES` entries together. All variables are compared on steps
# 1, 2, 4, 8, ..., and on every 256th step.
_SMALL_ENTRIES, _SMALL_COUNT, _PERIOD = 2**16, 32, 256
# Special values of a sum: not known yet, or exempt from the comparison.
_UNKNOWN, _EXEMPT = -1, -2


def mark_trained_privately(
    variables: Iterable[tf.Variable], releases: tf.Variable
) -> None:
    """Marks variables as trained by a private optimizer: any loss may read them.

    Args:
      variables: the trained variables.
      releases: the counter of the optimizer's releases.
    """
    for variable in (part for whole in variables for part in components(whole)):
        notes = notes_of_variable(variable)
        if notes.releases is releases:
            continue
        notes.releases = releases
        for state in list(NOTES.constant_states):
            state._exempt(variable)


def exempt_releases(variables: Iterable[tf.Variable], exempt: bool) -> None:
    """Lets variables that a step makes of releases alone change, or no longer.

    Args:
      variables: the variables, which losses of private optimizers may read.
      exempt: whether the variables may change from now on.
    """
    for variable in (part for whole in variables for part in components(whole)):
        for state in list(NOTES.constant_states):
            state._exempt(variable, _EXEMPT if exempt else _UNKNOWN)


def forget_values(variables: Iterable[tf.Variable]) -> None:
    """Lets variables change until the next step.

    Args:
      variables: variables that were given public or random values.
    """
    for variable in (part for whole in variables for part in components(whole)):
        for state in list(NOTES.constant_states):
            state._forget(variable)


class ConstantState:
    """Compares variables from step to step, by sums of their bits.

    *Formal guarantees*: a step raises if a variable of up to 2^16 entries (the smallest
    first, up to 32 variables) has another value than in the step before. Code under
    XLA cannot raise: there the step gives every example weight 0, and
    `raise_if_changed` raises later. Larger variables are compared on steps 1, 2, 4, 8,
    ... and on every 256th step. A variable that a second private optimizer trains may
    change after a release by that optimizer, and a variable that a step of `fit` makes
    of releases alone (`step_search`) after each step. A variable with a public
    copy may change to the value of the copy.
    """

    def __init__(self):
        self._slots: list[tuple[object, str, tf.Variable, int]] = []
        # For each variable of sums (by id), the releases at the last comparison.
        self._releases: dict[int, tf.Variable] = {}
        self._steps: tf.Variable | None = None
        self._changed: tf.Variable | None = None
        #: Whether a comparison is in code compiled by XLA.
        self.compiled = False
        NOTES.constant_states.add(self)

    def _exempt(self, variable, value=_EXEMPT):
        for identity, _, sums, place in self._slots:
            if identity is variable.handle:
                with tf.init_scope():
                    kept = tf.tensor_scatter_nd_update(sums, [[place]], [value])
                    sums.assign(tf.cast(kept, sums.dtype))

    def _forget(self, variable):
        for identity, _, sums, place in self._slots:
            if identity is variable.handle and int(sums[place]) != _EXEMPT:
                self._exempt(variable, _UNKNOWN)
                return

    def reset(self) -> None:
        """Forgets the values: between two runs, every assignment is allowed."""
        if self._steps is None:
            return
        self._steps.assign(0)
        for sums in {id(s): s for _, _, s, _ in self._slots}.values():
            sums.assign(tf.minimum(sums, tf.constant(_UNKNOWN, sums.dtype)))

    def raise_if_changed(self) -> None:
        """Raises if a compiled step found a variable that had changed."""
        if self._changed is not None and bool(self._changed):
            names = ", ".join(repr(name) for _, name, _, _ in self._slots[:4])
            raise ExampleIsolationError(
                f"A variable that the loss reads (among {names}) changed between "
                "the steps of this run. No example contributed to a step from there "
                "on. " + _FIX
            )

    def check(self, reads: Sequence[StateRead]) -> tf.Tensor:
        """Builds the comparison in the current graph.

        Args:
          reads: the variables, see `tfdpclip.gradients.loss.state.find_state_reads`.

        Returns:
          A boolean scalar: True if no variable has changed.
        """
        _refuse_schedules(reads)
        reads = [r for r in reads if not r.written or r.before is not None]
        if not reads:
            return tf.constant(True)
        self.compiled |= in_xla()
        slots = self._allocate(reads)
        values = [_value(read) for read in reads]
        sizes = [_size(value) for value in values]
        order = sorted(range(len(reads)), key=lambda i: sizes[i])
        small, total = [], 0
        for i in order[:_SMALL_COUNT]:
            total += sizes[i]
            if total <= _SMALL_ENTRIES:
                small.append(i)
        large = sorted(set(range(len(reads))) - set(small))
        step = self._steps.assign_add(1, read_value=True)
        good = [self._same(reads, values, slots, small)] if small else []
        if large:
            due = tf.equal(tf.bitwise.bitwise_and(step, step - 1), 0)
            due = tf.logical_or(due, tf.equal(step % _PERIOD, 0))
            good.append(
                tf.cond(
                    due,
                    lambda: self._same(reads, values, slots, large),
                    lambda: tf.constant(True),
                )
            )
        fine = tf.reduce_all(tf.stack(good))
        self._changed.assign(tf.logical_or(self._changed, tf.logical_not(fine)))
        return tf.logical_not(self._changed)

    def _same(self, reads, values, slots, chosen):
        """Compares the chosen variables, and keeps their current sums."""
        by_sums: dict[int, list[int]] = {}
        for i in chosen:
            by_sums.setdefault(id(slots[i][2]), []).append(i)
        good = []
        for members in by_sums.values():
            sums = slots[members[0]][2]
            places = [[slots[i][3]] for i in members]
            before = tf.gather_nd(tf.convert_to_tensor(sums), places)
            now = tf.stack([_sum_of_bits(values[i]) for i in members])
            began = tf.stack(
                [
                    _sum_of_bits(reads[i].before if reads[i].written else values[i])
                    for i in members
                ]
            )
            same = tf.less(before, 0) | tf.equal(before, began)
            if any(reads[i].releases is not None for i in members):
                same |= self._released(reads, slots, members)
            if any(reads[i].copy is not None for i in members):
                copies = tf.stack([_sum_of_copy(reads[i]) for i in members])
                same |= tf.equal(copies, began)
            keep = tf.logical_not(same) | tf.equal(before, _EXEMPT)
            if not in_xla():
                names = [reads[i].name for i in members]
                tf.cond(
                    tf.reduce_all(same),
                    lambda: tf.no_op(),
                    lambda same=same, names=names: _fail(same, names),
                )
            good.append(tf.reduce_all(same))
            kept = tf.tensor_scatter_nd_update(
                tf.convert_to_tensor(sums), places, tf.where(keep, before, now)
            )
            sums.assign(kept)
        return tf.reduce_all(tf.stack(good))

    def _released(self, reads, slots, members):
        """Whether each variable's own optimizer made a release since the comparison."""
        kept = self._releases[id(slots[members[0]][2])]
        places = [[slots[i][3]] for i in members]
        before = tf.gather_nd(tf.convert_to_tensor(kept), places)
        counts = [reads[i].releases for i in members]
        zero = tf.constant(0, tf.int64)
        now = tf.stack([zero if c is None else tf.identity(c) for c in counts])
        kept.assign(tf.tensor_scatter_nd_update(kept, places, now))
        return tf.not_equal(before, now)

    def _allocate(self, reads):
        known = {id(identity): slot for slot in self._slots for identity in slot[:1]}
        new = [read for read in reads if id(read.identity) not in known]
        if new:
            made = []

            def build():
                made.append(
                    tf.Variable(
                        tf.fill([len(new)], tf.constant(_UNKNOWN, tf.int64)),
                        trainable=False,
                        name="state_sums",
                    )
                )
                self._releases[id(made[0])] = tf.Variable(
                    tf.zeros([len(new)], tf.int64), trainable=False
                )
                if self._steps is None:
                    self._steps = tf.Variable(0, trainable=False, dtype=tf.int64)
                    self._changed = tf.Variable(False, trainable=False)

            outside_of_functions(build, [], in_strategy=False)
            for i, read in enumerate(new):
                self._slots.append((read.identity, read.name, made[0], i))
            known = {id(slot[0]): slot for slot in self._slots}
        return [known[id(read.identity)] for read in reads]


_FIX = (
    "If its values are public (the average of a trained model, a schedule), declare "
    "it: plan.optimizer(..., public_variables=[variable]). Averages of batch "
    "normalisation are not public: for metrics, call the model with training=False."
    + see("state-that-a-loss-reads")
)


def _refuse_schedules(reads: Sequence[StateRead]) -> None:
    """Raises for a variable that `fit` was given in order to change between steps."""
    model = variable_of_call("fit", "self")
    if model is None:
        return
    weights = _compat.loss_weights_of(model)
    holders = {"loss_weights": tf.nest.flatten(weights)}
    for callback in callbacks_of_fit():
        holders[f"The callback {type(callback).__name__}"] = vars(callback).values()
    unset = [r for r in reads if r.releases is None and r.copy is None]
    names = {id(r.identity): r.name for r in unset}
    for holder, values in holders.items():
        for value in values:
            name = names.get(id(getattr(unwrapped(value), "handle", None)))
            if name is not None:
                raise ExampleIsolationError(
                    f"{holder} may change the variable {name!r}, which the loss reads: "
                    "values from private data would reach all gradients without "
                    "noise. If the values are public, such as those of a schedule, "
                    "declare the variable: plan.optimizer(..., public_variables="
                    "[variable])." + see("state-that-a-loss-reads")
                )


def _fail(same: tf.Tensor, names: list[str]) -> tf.Operation:
    changed = tf.boolean_mask(tf.constant(names), tf.logical_not(same))
    message = (
        "ExampleIsolationError: a variable that the loss reads, and that is not "
        "trained, changed since the last step: "
    )
    return tf.debugging.Assert(False, [message, changed, _FIX], summarize=8)


def _value(read: StateRead) -> tf.Tensor:
    if read.variable is not None:
        return tf.raw_ops.ReadVariableOp(
            resource=read.handle, dtype=read.variable.dtype
        )
    kept = read.identity
    data = _tf_private.handle_data_of(kept)
    if data is None or not data.is_set:
        raise ExampleIsolationError(
            f"The loss reads {read.name!r}, a variable of unknown type, so its "
            "changes cannot be found." + see("state-that-a-loss-reads")
        )
    dtype = tf.as_dtype(data.shape_and_type[0].dtype)
    return tf.raw_ops.ReadVariableOp(resource=read.handle, dtype=dtype)


def _size(value: tf.Tensor) -> int:
    count = value.shape.num_elements()
    return _SMALL_ENTRIES + 1 if count is None else count


def _sum_of_copy(read: StateRead) -> tf.Tensor:
    """The checksum of a public copy; without a copy, no checksum of any variable."""
    if read.copy is None:
        return tf.constant(_UNKNOWN, tf.int64)
    return _sum_of_bits(tf.convert_to_tensor(read.copy))


def _sum_of_bits(value: tf.Tensor) -> tf.Tensor:
    """A checksum, int64, that differs for almost all different values.

    Sums along both axes, each with weights, so that moved entries show, and without
    a copy of a large variable.
    """
    if value.dtype == tf.string:
        return tf.cast(
            tf.reduce_sum(tf.strings.to_hash_bucket_fast(value, 2**31 - 1)), tf.int64
        )
    if value.dtype.size < 4 or value.dtype == tf.bool:
        value = tf.cast(value, tf.float32 if value.dtype.is_floating else tf.int32)
    bits = tf.bitcast(value, tf.uint32)
    columns = bits.shape[-1] if bits.shape.rank and bits.shape[-1] else 1
    bits = tf.reshape(bits, [-1, columns])
    total = tf.constant(0, tf.uint32)
    for axis, odd in ((0, 1), (1, 0)):
        sums = tf.reduce_sum(bits, axis=axis)
        places = tf.cast(tf.range(tf.size(sums)), tf.uint32)
        # Odd multipliers lose nothing modulo 2^32. An entry counts by both axes, by an
        # odd and an even number, and their sum is odd again, so that no sign is lost.
        weights = (places * tf.constant(2654435761, tf.uint32)) * 2 + odd
        total = total * tf.constant(40503, tf.uint32) + tf.reduce_sum(sums * weights)
    return tf.cast(total, tf.int64)
