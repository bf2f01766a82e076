"""Answers questions about a traced training step from the labels of its tensors.

`StepLabels` follows batches and variables through the step once, and notes every use
of a variable; each function here reads the notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip._variables import components
from tfdpclip.keras.watching.step_labels import (
    ARGUMENT,
    DATA,
    SIZE,
    UNKNOWN,
    StepLabels,
    Use,
    is_write,
)

ALTERED_DATA = (
    "A function or a branch with the private step inside gets more than data: it gets "
    "the result of {}. Examples may have been combined there, unseen by the proof; and "
    "a skipped step reveals that the draw was empty. Compute this result in the "
    "function that computes the loss, or, record by record, in the data pipeline."
    + see("mixed-examples")
)


def find_other_updates(
    step: StepLabels, variables: Sequence[tf.Variable]
) -> list[tuple[tf.Variable, str]]:
    """Finds writes to variables by anything but one optimizer.

    An op that takes a variable counts as a write unless the op is known to only read.

    Args:
      step: the labels of the traced step.
      variables: the variables.

    Returns:
      Pairs of a variable and a description of the op that writes to the variable.
    """
    by_handle = {
        id(part.handle): variable
        for variable in variables
        for part in components(variable)
    }
    first: dict[int, tuple[tf.Variable, str]] = {}
    for use in _other_writes(step):
        if use.variable in by_handle:
            variable = by_handle[use.variable]
            first.setdefault(id(variable), (variable, use.where))
    return list(first.values())


def find_variables_given_data(
    step: StepLabels, variables: Sequence[tf.Variable]
) -> list[tf.Variable]:
    """The variables to which a traced training step writes values made from its data.

    Values made from variables only (an average of trained weights) do not count.

    Args:
      step: the labels of the traced step.
      variables: the variables.
    """
    with_data = _handles_given_data(step)
    return [v for v in variables if not _handles([v]).isdisjoint(with_data)]


def _handles_given_data(step: StepLabels) -> set[int | None]:
    return {use.variable for use in _other_writes(step) if use.made_of & (DATA | SIZE)}


def _other_writes(step: StepLabels) -> Iterator[Use]:
    """The uses outside of the private optimizer that may change a variable."""
    return (use for use in step.uses if not (use.inside.updates or use.reads_only))


def _handles(variables: Iterable[tf.Variable]) -> set[int]:
    return {id(part.handle) for whole in variables for part in components(whole)}


def find_private_read(
    step: StepLabels,
    graph: tf.Graph,
    optimized: Sequence[tf.Variable],
    is_public: Callable[[tf.Tensor, str | None], bool],
) -> str | None:
    """Finds a variable that the update reads and the rest of the step writes to.

    Such a variable, a metric for instance, may hold private data, so the update of the
    weights must not depend on the variable.

    Args:
      step: the labels of the traced step.
      graph: the graph of the traced step.
      optimized: the variables that the optimizer trains or keeps; a separate check
        refuses writes to them by other code.
      is_public: says of a variable's handle and name whether it was declared public.

    Returns:
      The name of a variable, or None.
    """
    names = step.names or {}
    handles = {id(outside): outside for outside, _ in graph.captures}
    both = {use.variable for use in step.uses if use.inside.applies}
    both &= {use.variable for use in _other_writes(step)}
    for handle in (both & handles.keys()) - _handles(optimized):
        if not is_public(handles[handle], names.get(handle)):
            return names.get(handle, "a variable")
    return None


def find_altered_data(step: StepLabels, optimized: Sequence[tf.Variable]) -> str | None:
    """Finds a function with the private step inside that gets more than data.

    The optimizer reads the graph of the loss, and takes the arguments of this graph for
    the batch. An argument made from several examples would escape its proof. The same
    holds for a value that a loop hands to the private step of its next turn.

    Args:
      step: the labels of the traced function, whose arguments are the data.
      optimized: the variables that the optimizer trains or keeps.

    Returns:
      A description of the op between the data and a function or branch with the private
      step, which may have combined examples; or None.
    """
    # Variables that hold data of this step or of earlier steps.
    holding = _handles_given_data(step) - _handles(optimized)
    sources = [*step.sources(step.private_calls, "altered", "value")]
    sources += [source for _, source in step.sources(step.next_turns, "turn")]
    for kind, what in sources:
        if kind == "altered":
            return what
        if what in holding:
            return next(use.where for use in step.uses if use.variable == what)
    return None


def made_of_releases(
    step: StepLabels,
    variables: Iterable[tf.Variable],
    trained: Sequence[tf.Variable],
    optimized: Sequence[tf.Variable],
) -> list[tf.Variable]:
    """The variables that a traced training step writes to without data.

    The generator of a GAN learns from random numbers and from a critic that the private
    optimizer trains, so every update of the generator is post-processing; an average of
    past weights is post-processing too.

    *Formal guarantees*: the optimizer's writes apart, every value that the step writes
    to a returned variable is a function of random numbers, small constants, the trained
    variables and returned variables. The number of drawn records counts as data,
    because no epsilon covers the sizes of Poisson batches; so does every value of
    unknown origin: the result of an unknown op with a state, of a resource that is no
    variable, of a branch chosen by data, of a large variable that the step does not
    write to, or of a large constant, such as the mean of all records.

    Args:
      step: the labels of the traced step.
      variables: the variables to look at.
      trained: the weights that the private optimizer trains; every write to the weights
        is found.
      optimized: the optimizer's variables, sums and moments, which are not released.
    """
    uses = [use for use in step.uses if not use.inside.updates]
    written = {use.variable for use in uses if is_write(use.kind)}
    if step.names is None or not written <= step.names.keys():
        return []
    public = (_handles(trained) | step.few | written) & step.names.keys()
    of_data = _handles(optimized) - _handles(trained)

    def may_have_data(label: int) -> bool:
        values = {what for _, what in step.sources(label, "value")}
        turns = [source for _, source in step.sources(label, "turn")]
        values |= {what for kind, what in turns if kind == "value"}
        unknown = label & (DATA | SIZE | UNKNOWN | ARGUMENT)
        return bool(unknown or values - public or values & of_data)

    # A variable counts as data as soon as a write to the variable has data. The search
    # repeats, because a read may stand before the write in the graph's order.
    count = -1
    while count != len(of_data):
        count = len(of_data)
        of_data |= {
            use.variable
            for use in _other_writes(step)
            if use.variable not in of_data
            and (
                not is_write(use.kind)
                or may_have_data(use.made_of | use.inside.chosen_by)
            )
        }
    return [v for v in variables if not _handles([v]) & (of_data | _handles(optimized))]
