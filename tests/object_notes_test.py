"""Notes on graphs, variables and ops: what copies of the objects have, and what not."""

import copy
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip import _object_notes
from tfdpclip._object_notes import (
    note_on_new_ops,
    notes_of,
    notes_of_node,
    notes_of_op,
    notes_of_variable,
)
from tfdpclip.gradients.flows.inlining import OpCopies
from tfdpclip.gradients.graph.op_copies import copy_op

pytestmark = pytest.mark.unchecked


def noted(function):
    """The notes of the op behind the result of a function, in a new graph."""
    with tf.Graph().as_default():
        return notes_of_op(function(tf.constant(1.0)).op)


def test_scopes_add_up():
    def nested(x):
        with note_on_new_ops(made_of_a_loss=True), note_on_new_ops(updates="a"):
            with note_on_new_ops(updates="b", applies="b", released=True):
                return -x

    notes = noted(nested)
    assert notes.updates == {"a", "b"} and notes.applies == {"b"}
    assert notes.released and notes.made_of_a_loss
    assert not notes.by_count and not notes.own_gradient


def test_a_scope_ends():
    def after(x):
        with note_on_new_ops(by_count=True):
            pass
        with pytest.raises(ZeroDivisionError), note_on_new_ops(updates="a"):
            raise ZeroDivisionError
        return -x

    assert noted(after) == noted(tf.identity)


def by_type(x):
    with note_on_new_ops(own_gradient=True):
        return copy_op(x.op, list(x.op.inputs))[0]


def opened(x):
    with note_on_new_ops(own_gradient=True):
        name, given = "copies", {x.op.inputs[0].ref(): x.op.inputs[0]}
        return OpCopies(x.graph, given, name, False).copy_of(x)


@pytest.mark.parametrize("copied", [by_type, opened])
def test_a_copy_has_the_notes_of_the_original_and_of_its_own_scopes(copied):
    def copy_of_noted(x):
        with note_on_new_ops(by_count=True, updates="a"):
            x = -x
        return copied(x)

    notes = noted(copy_of_noted)
    assert notes.by_count and notes.own_gradient and notes.updates == {"a"}


def test_definitions_have_the_notes_of_their_ops():
    @tf.function
    def function(x):
        with note_on_new_ops(released=True):
            return -x

    graph = function.get_concrete_function(tf.constant(1.0)).graph
    nodes = {node.op: notes_of_node(node) for node in graph.as_graph_def().node}
    assert nodes["Neg"].released and not nodes["Identity"].released
    assert "_tfdpclip_op" not in {
        name
        for node in graph.as_graph_def().node
        if node.op != "Neg"
        for name in node.attr
    }


def test_merged_values_of_replicas_have_the_notes_of_the_replicas():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    graphs = []

    def merged(strategy, value):
        with note_on_new_ops(released=True):
            return tf.negative(strategy.experimental_local_results(value)[0])

    @tf.function
    def step():
        def replica():
            with note_on_new_ops(updates="a"):
                value = tf.constant(1.0)
                context = tf.distribute.get_replica_context()
                return context.merge_call(merged, args=(value,))

        graphs.append(tf.compat.v1.get_default_graph())
        return strategy.run(replica)

    step()
    ops = graphs[0].get_operations()
    (op,) = [op for op in ops if op.type == "Neg"]
    assert notes_of_op(op).updates == {"a"} and notes_of_op(op).released


def test_eager_code_makes_no_ops():
    with note_on_new_ops(updates="a"):
        assert float(tf.constant(1.0) + 1.0) == 2.0


def test_a_variable_has_notes_and_its_copy_has_others():
    variable = tf.Variable(np.ones(2), name="noted")
    notes_of_variable(variable).named = True
    assert notes_of_variable(variable).named
    assert not notes_of_variable(copy.deepcopy(variable)).named
    assert notes_of_variable(None) == _object_notes.VariableNotes()


def test_a_mirrored_variable_and_its_components_have_notes_each():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        variable = tf.Variable(1.0)
    notes_of_variable(variable.values[0]).named = True
    assert not notes_of_variable(variable).named


def test_notes_do_not_keep_a_graph_or_a_variable():
    graph, variable = tf.Graph(), tf.Variable(1.0)
    notes_of(graph).statuses.append(graph)
    notes_of_variable(variable).trainer = variable
    left = [weakref.ref(graph), weakref.ref(variable)]
    del graph, variable
    gc.collect()
    assert [reference() for reference in left] == [None, None]
