"""Copies the ops of called functions into the graph of the loss.

A layer that is a `tf.function` is a single op in the graph of the step, and no rule
covers the op. This module copies the ops that the function's outputs depend on into the
graph of the loss, at any depth. All ops that read the call's outputs then read the
outputs of the copies: ops that exist already, and ops that the step adds later. So
random numbers are drawn once for all readers. The call stays in the graph for its
effects (moving averages, for example), which happen once; TensorFlow prunes the call's
remaining ops.
"""

from __future__ import annotations

import tensorflow as tf

from tfdpclip import _tf_private
from tfdpclip._devices import in_xla
from tfdpclip._object_notes import notes_of
from tfdpclip.gradients.graph import calls, ops
from tfdpclip.gradients.graph.walks import ancestors


def inline_calls(loss: tf.Tensor) -> tf.Tensor:
    """Copies the ops of the functions that the loss calls into the loss's graph.

    *Formal guarantees*

    * The loss, and all tensors computed from the calls' outputs, share a single forward
      pass.
    * Custom gradients inside are kept. The gradient of `tf.recompute_grad` is the
      ordinary gradient with less memory; it is replaced by the ordinary gradient.
    * A call stays a call unless copies of its ops give the same result and the same
      effects.

    Args:
      loss: a tensor of the graph of a `tf.function`.

    Returns:
      The loss after the replacement. Use this tensor from here on.
    """
    graph = loss.graph
    if not _tf_private.is_function_graph(graph):
        return loss
    later: dict | None = None
    for op in ancestors([loss]):
        replaced = {}
        recomputed = calls.count_recomputed(op)
        if recomputed:
            replaced = dict(enumerate(op.inputs[:recomputed]))
        elif op.type in ops.FUNCTION_CALLS and calls.can_be_opened(op):
            if later is None:
                later = _touched_later(graph)
            with graph.as_default(), tf.control_dependencies(None):
                replaced = _copy_call(op, later)
        for number, new in replaced.items():
            old = op.outputs[number]
            _replace(old, new, op)
            if loss is old:
                loss = new
    return loss


def _copy_call(op: tf.Operation, later: dict) -> dict[int, tf.Tensor]:
    """Copies the ops of a called function.

    Args:
      op: the call.
      later: the result of `_touched_later`.

    Returns:
      The copies of the call's outputs, by number; empty if the copies cannot be made,
      or could give a different result than the call.
    """
    body = calls.body_of(op)
    tensors = {t.ref(): o for t, o in zip(body.inputs, op.inputs, strict=True)}
    for inner in ancestors(body.outputs):
        for changes, part in enumerate(calls.resources_of(inner)):
            for t in part:
                outer = tensors.get(t.ref())
                # The copies run after all ops that are in the graph now.
                if outer is None or _is_later(op, outer, bool(changes), later):
                    return {}
    copy = OpCopies(body.graph, tensors, op.name, calls.is_compiled(op))
    try:
        outputs = [copy.copy_of(t) for t in body.outputs]
    except (ValueError, TypeError, LookupError, tf.errors.OpError):
        return {}  # TensorFlow cannot make an op in this graph: the call stays.
    _differentiate_copies(op, outputs)
    return dict(enumerate(outputs))


def _touched_later(graph: tf.Graph) -> dict:
    """The ops that read or change each resource, and the positions of all ops.

    Returns:
      A dict from the reference of each resource to `[(position of an op, whether the
      op changes the resource)]`; and from None to the positions, by op.
    """
    touches: dict = {None: {}}
    for position, op in enumerate(graph.get_operations()):
        touches[None][op] = position
        if any(t.dtype == tf.resource for t in op.inputs):
            for changes, part in enumerate(calls.resources_of(op)):
                for t in part:
                    touches.setdefault(t.ref(), []).append((position, bool(changes)))
    return touches


def _is_later(op, resource, changes, later) -> bool:
    """Whether a copy of `op`, which runs last, conflicts with ops that follow `op`."""
    position = later[None].get(op, -1)
    touched = later.get(resource.ref(), ())
    return any(p > position and (changes or changed) for p, changed in touched)


def _replace(old: tf.Tensor, new: tf.Tensor, op: tf.Operation) -> None:
    """Replaces `old` by `new` in all ops that read `old`, now or later."""
    for consumer in old.consumers():
        if consumer is op:
            continue
        for index, t in enumerate(consumer.inputs):
            if t is old:
                _tf_private.replace_input(consumer, index, new)
    graph = old.graph
    aliases = notes_of(graph).aliases
    if not aliases:
        plain = graph.capture

        def capture(tensor, *args, **kwargs):
            """Called by TensorFlow for every input tensor of a new op."""
            tensor = plain(tensor, *args, **kwargs)
            while id(tensor) in aliases:
                tensor = aliases[id(tensor)][1]
            return tensor

        graph.capture = capture
    aliases[id(old)] = (old, new)


def _differentiate_copies(op: tf.Operation, outputs: list[tf.Tensor]) -> None:
    """Makes a tape that recorded the call differentiate the copies.

    By default, TensorFlow would add outputs to the call to differentiate it: the call
    would then run a second forward pass.
    """
    notes_of(op.graph).copies[op] = list(outputs)

    def through_copies(plain):
        def differentiate(op, *at_outputs):
            copies = notes_of(op.graph).copies.get(op)
            if copies is None:
                return plain(op, *at_outputs)
            pairs = [
                (copy, at)
                for copy, at in zip(copies, at_outputs, strict=False)
                if at is not None and (copy.dtype.is_floating or copy.dtype.is_complex)
            ]
            inputs = list(op.inputs)
            return tf.gradients(
                [copy for copy, _ in pairs],
                inputs,
                grad_ys=[at for _, at in pairs],
                stop_gradients=inputs,
            )

        return differentiate

    _tf_private.differentiate_call_by(op, through_copies)


class OpCopies:
    """Copies of a graph's ops in the current graph, made on demand.

    Args:
      source: the graph with the original ops.
      tensors: the tensors in the place of tensors of `source`, by their references.
        All inputs of `source` are replaced.
      name: a prefix for the names of the new ops.
      compiled: whether XLA was to compile the function.
    """

    def __init__(self, source: tf.Graph, tensors: dict, name: str, compiled: bool):
        self.source, self._made = source, dict(tensors)
        self._name, self._compiled = name, compiled
        self._target = tf.compat.v1.get_default_graph()

    def copy_of(self, tensor: tf.Tensor) -> tf.Tensor:
        """The copy of a tensor of `source`; `tensor` if its graph is not `source`."""
        if _tf_private.is_eager(tensor):
            return tensor
        if tensor.graph is not self.source:
            return tensor
        stack = [tensor]
        while stack:
            top = stack[-1]
            missing = [] if top.ref() in self._made else self._missing(top.op)
            if missing:
                stack += missing
                continue
            stack.pop()
            if top.ref() not in self._made:
                self._make(top.op)
        return self._made[tensor.ref()]

    def _within(self, source, tensors, name, compiled) -> OpCopies:
        """The copies of ops of a function of `source`."""
        return OpCopies(source, tensors, name, compiled)

    def _missing(self, op):
        return [t for t in op.inputs if t.ref() not in self._made]

    def _make(self, op: tf.Operation) -> None:
        inputs = [self._made[t.ref()] for t in op.inputs]
        outputs = self._outputs(op, inputs)
        for old, new in zip(op.outputs, outputs, strict=False):
            self._made[old.ref()] = new

    def _outputs(self, op: tf.Operation, inputs: list) -> list[tf.Tensor]:
        if op.type == "Placeholder":
            raise ValueError(f"{op.name!r} is no input of the function.")
        recomputed = calls.count_recomputed(op)
        if recomputed:
            return inputs
        # TensorFlow uses names below the call's name for ops that it inlines.
        name = f"{self._name}_ops/{op.name}"
        if op.type in ops.FUNCTION_CALLS and calls.can_be_opened(op, self._compiled):
            body = calls.body_of(op)
            tensors = {t.ref(): i for t, i in zip(body.inputs, inputs, strict=True)}
            compiled = self._compiled or calls.is_compiled(op)
            with self._target.as_default():
                copy = self._within(body.graph, tensors, name, compiled)
            return [copy.copy_of(t) for t in body.outputs]
        with (
            self._target.as_default(),
            tf.control_dependencies(None),
            self._target.name_scope(None),
        ):
            if self._compiled and not in_xla() and _runs_in_xla_only(op):
                return [_by_groups(op, *inputs)]
            new = self._emitted(op, inputs, name)
        return list(new.outputs)

    def _emitted(self, op, inputs, name) -> tf.Operation:
        calls.add_functions(op, self._target)
        attributes = dict(op.node_def.attr)
        attributes.pop("_class", None)  # names of colocated ops
        new = _tf_private.make_op(
            self._target,
            op.type,
            inputs,
            [t.dtype for t in op.outputs],
            name=name,
            attrs=attributes,
            op_def=op.op_def,
        )
        if op.device:
            _tf_private.set_device(new, op.device)
        for old, copy in zip(op.outputs, new.outputs, strict=True):
            copy.set_shape(old.shape)
            if old.dtype in (tf.resource, tf.variant):
                _tf_private.copy_handle_data(old, copy)
        gradient = calls.gradient_function(op)
        if gradient is not None:
            if op.type not in ops.FUNCTION_CALLS:
                gradient = self._in_place_of(op, gradient)
            _tf_private.set_own_gradient(new, gradient)
        if calls.needs_order(new):
            calls.run_in_any_order(new)
        return new

    def _in_place_of(self, op: tf.Operation, original):
        """A gradient function for the copy of `op`, from the function `original`.

        `original` may read any tensor of the function, as custom gradients do. So
        `original` is called for the original op, in a scratch graph, and the new ops
        are copied.
        """

        def gradient(_, *at_outputs):
            with self.source.as_default():
                scratch = _tf_private.new_function_graph("gradient")
            with scratch.as_default():
                tensors, seeds = {}, []
                for at in at_outputs:
                    if isinstance(at, tf.IndexedSlices):
                        at = tf.convert_to_tensor(at)
                    if not tf.is_tensor(at):
                        seeds.append(at)
                        continue
                    seed = tf.compat.v1.placeholder(at.dtype, at.shape)
                    tensors[seed.ref()] = at
                    seeds.append(seed)
                gradients = original(op, *seeds)
                if not isinstance(gradients, (list, tuple)):
                    gradients = [gradients]
                # A gradient may be a tensor that existed before the call of `original`.
                gradients = [f if f is None else _inside(f, scratch) for f in gradients]
            with tf.control_dependencies(None):
                for external, internal in scratch.captures:
                    tensors[internal.ref()] = self.copy_of(external)
            name = f"{op.name}_gradient"
            copy = self._within(scratch, tensors, name, self._compiled)
            return [f if f is None else copy.copy_of(f) for f in gradients]

        return gradient


def _inside(gradient, graph) -> tf.Tensor:
    return graph.capture(tf.convert_to_tensor(gradient))


def _runs_in_xla_only(op: tf.Operation) -> bool:
    """Whether the op is a convolution that has a CPU kernel in XLA only."""
    if op.type not in ("Conv2D", "Conv3D"):
        return False
    first = op.get_attr("data_format") in (b"NCHW", b"NCDHW")
    return first or calls.convolution_groups(op) > 1


def _by_groups(op: tf.Operation, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """Computes a convolution group by group, with channels last."""
    rank = x.shape.rank
    first = op.get_attr("data_format") in (b"NCHW", b"NCDHW")
    strides, dilations = list(op.get_attr("strides")), list(op.get_attr("dilations"))
    settings = {"padding": op.get_attr("padding").decode()}
    if op.type == "Conv2D":
        flat = list(op.get_attr("explicit_paddings"))
        if first and flat:
            flat = [*flat[:2], *flat[4:], *flat[2:4]]
        settings["explicit_paddings"] = flat
    if first:
        x = tf.transpose(x, [0, *range(2, rank), 1])
        strides = [strides[0], *strides[2:], strides[1]]
        dilations = [dilations[0], *dilations[2:], dilations[1]]
    groups = calls.convolution_groups(op)
    if groups == x.shape[-1] > 1 and _is_depthwise(op.type, strides, dilations):
        # An op for each of hundreds of channels would take minutes to trace.
        kernel = tf.reshape(kernel, [*kernel.shape[:2], groups, -1])
        z = tf.raw_ops.DepthwiseConv2dNative(
            input=x, filter=kernel, strides=strides, dilations=dilations, **settings
        )
        return tf.transpose(z, [0, 3, 1, 2]) if first else z
    convolve = tf.raw_ops.Conv2D if op.type == "Conv2D" else tf.raw_ops.Conv3D
    parts = [
        convolve(
            input=part, filter=filters, strides=strides, dilations=dilations, **settings
        )
        for part, filters in zip(
            tf.split(x, groups, axis=-1), tf.split(kernel, groups, axis=-1), strict=True
        )
    ]
    z = tf.concat(parts, axis=-1) if groups > 1 else parts[0]
    return tf.transpose(z, [0, rank - 1, *range(1, rank - 1)]) if first else z


def _is_depthwise(kind: str, strides: list[int], dilations: list[int]) -> bool:
    """Whether TensorFlow's depthwise convolution supports the settings on a CPU."""
    return kind == "Conv2D" and strides[1] == strides[2] and set(dilations) == {1}
