"""A training step of every variant that TensorFlow can run.

`plain` and `plain_dense`; this library's modes; and tensorflow-privacy's three ways:
the vectorised optimizer, the model that vectorises (`tfp_dpmodel`) and the model that
clips fast (`tfp_fast`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tfdpclip as dpc
from benchmarks import models
from benchmarks.timing import Spec, UnsupportedError
from driver_kit.lazy import tf

# Steps that correlated noise is made for, and how they draw.
_STEPS, _SCHEME = 1000, dpc.sampling.MinSeparation(10_000, 100)
# Many groups need counts with more noise than the default.
_GROUP_COUNTS = 100.0


def _correlated(matrix: dpc.correlated.NoiseMatrix) -> dict[str, Any]:
    return {"clip": 1.0, "noise": dpc.CorrelatedNoise(matrix, _STEPS, _SCHEME)}


# Keras's optimizers add up the rows of a table that a batch looked up as many as there
# are, a number that no compiler knows: `plain_dense` has them as a whole table, as XLA
# has all else.
PLAIN = ("plain", "plain_dense")
# The suffix of this library's variants whose steps never check themselves.
UNCHECKED = "_unchecked"

OURS: dict[str, Callable[[], dict[str, Any]]] = {
    "fixed": lambda: {"clip": 1.0},
    "quantile": lambda: {"clip": dpc.QuantileClip()},
    "layerwise": lambda: {"clip": dpc.LayerwiseClip(1.0)},
    "layerwise_quantile": lambda: {
        "clip": dpc.LayerwiseClip(dpc.QuantileClip(count_stddev=_GROUP_COUNTS))
    },
    "joint": lambda: {"clip": dpc.LayerwiseClip(1.0, allocation="joint")},
    "automatic": lambda: {"clip": dpc.AutomaticClip()},
    "normalized": lambda: {"clip": dpc.FixedClip(1.0, normalize=True)},
    "batch": lambda: {"clip": 1.0, "unit": "batch"},
    # As many rows, of fewer records.
    "views_4": lambda: {"clip": 1.0, "rows_per_record": 4},
    "views_16": lambda: {"clip": 1.0, "rows_per_record": 16},
    "perturbation": lambda: {"clip": 1.0, "perturbation": 0.1},
    "buffered_3": lambda: _correlated(
        dpc.correlated.BufferedToeplitz(3, _STEPS, _SCHEME)
    ),
    "toeplitz_16": lambda: _correlated(dpc.correlated.SquareRootToeplitz(16)),
    # Not private. The difference is the cost of drawing the noise, a number for each
    # parameter, which dominates small batches of large dense models.
    "quantile_no_noise": lambda: {"clip": dpc.QuantileClip(), "noise_multiplier": 0.0},
    # A step that never checks itself, not even the first.
    "quantile_unchecked": lambda: {
        "clip": dpc.QuantileClip(),
        "check_gradients": "never",
    },
}


def makers(spec: Spec) -> tuple[dict[str, Callable], int]:
    """The functions that make a step, by variant, and the number of trained parameters.

    Raises:
      ValueError: if a variant has a name that does not exist.
    """
    task = models.make(spec.model, **spec.options)
    rng = np.random.default_rng(0)
    x, y = (tf.constant(part) for part in task.batch(rng, spec.batch_size))
    made: dict[str, Callable] = {}
    for name in spec.variants:
        made[name] = lambda name=name: _finished(_step(spec, task, name), x, y)
    parameters = sum(
        int(np.prod(variable.shape)) for variable in task.build().trainable_variables
    )
    return made, parameters


def step_and_data(
    spec: Spec, name: str, task: models.Task | None = None
) -> tuple[Callable, tuple[tf.Tensor, ...]]:
    """The step of a variant, a `tf.function`, and a batch for it.

    Args:
      spec: the measurement.
      name: the variant.
      task: a model in place of the one that `spec` names.
    """
    task = task or models.make(spec.model, **spec.options)
    batch = task.batch(np.random.default_rng(0), spec.batch_size)
    return _step(spec, task, name), tuple(tf.constant(part) for part in batch)


def graph_of_step(spec: Spec, name: str) -> tf.Graph:
    """The graph of a variant's step, for its task's batches."""
    step, data = step_and_data(spec, name)
    return step.get_concrete_function(*data).graph


def _finished(step: Callable, x: tf.Tensor, y: tf.Tensor) -> Callable[[], None]:
    """Calls a step, and waits for a value that it returns."""

    def run():
        for value in tf.nest.flatten(step(x, y))[:1]:
            value.numpy()

    return run


def _step(spec: Spec, task: models.Task, name: str) -> Callable:
    base = name.removesuffix("_xla")
    jit = spec.jit or base != name
    if base in PLAIN:
        optimizer = _optimizer(spec, tf.keras.optimizers)
        return _keras_step(task, optimizer, jit, dense=base == "plain_dense")
    mode = base if base in OURS else base.removesuffix(UNCHECKED)
    if mode in OURS:
        settings = {
            "noise_multiplier": 1.0,
            "expected_batch_size": spec.batch_size,
            **OURS[mode](),
        }
        if mode != base:
            settings["check_gradients"] = "never"
        settings["expected_batch_size"] /= settings.get("rows_per_record", 1)
        optimizer = (
            dpc.keras.DPAdam(1e-3, **settings)
            if spec.adam
            else dpc.keras.DPSGD(0.1, **settings)
        )
        return _keras_step(task, optimizer, jit)
    if base == "tfp_vectorized":
        return _tfp_optimizer_step(spec, task, jit)
    if base in ("tfp_dpmodel", "tfp_fast"):
        return _tfp_model_step(spec, task, jit, base == "tfp_fast")
    raise ValueError(
        f"variants must be of {', '.join((*PLAIN, *OURS))}, tfp_vectorized, "
        "tfp_dpmodel and tfp_fast (with _xla to compile, ours with "
        f"{UNCHECKED}), got {name!r}."
    )


def _optimizer(spec: Spec, module) -> tf.keras.optimizers.Optimizer:
    return module.Adam(1e-3) if spec.adam else module.SGD(0.1)


def _keras_step(
    task, optimizer, jit: bool, reduction="sum_over_batch_size", dense: bool = False
):
    model = models.checked_model(task)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction=reduction)
    model.compile(optimizer=optimizer, loss=loss)

    @tf.function(jit_compile=jit, reduce_retracing=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            value = model.compute_loss(x, y, model(x, training=True))
        variables = model.trainable_variables
        if hasattr(optimizer, "minimize") and not dense:
            optimizer.minimize(value, variables, tape=tape)
        else:  # Of Keras 3's own optimizers.
            gradients = tape.gradient(value, variables)
            if dense:
                gradients = [tf.convert_to_tensor(part) for part in gradients]
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return value

    return step


def _tfp_optimizer_step(spec: Spec, task, jit: bool) -> Callable:
    import tensorflow_privacy

    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "num_microbatches": None}
    optimizer = (
        tensorflow_privacy.VectorizedDPKerasAdamOptimizer(
            learning_rate=1e-3, **settings
        )
        if spec.adam
        else tensorflow_privacy.VectorizedDPKerasSGDOptimizer(
            learning_rate=0.1, **settings
        )
    )
    return _keras_step(task, optimizer, jit, reduction="none")


def _tfp_registry():
    """All layers for which tensorflow-privacy has fast norms, not only its default."""
    from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry
    from tensorflow_privacy.privacy.fast_gradient_clipping.registry_functions import (
        einsum_dense,
        layer_normalization,
        multi_head_attention,
    )

    registry = layer_registry.make_default_layer_registry()
    registry.insert(tf.keras.layers.EinsumDense, einsum_dense.einsum_layer_computation)
    registry.insert(
        tf.keras.layers.LayerNormalization,
        layer_normalization.layer_normalization_computation,
    )
    registry.insert(
        tf.keras.layers.MultiHeadAttention,
        multi_head_attention.multi_head_attention_layer_computation,
    )
    return registry


def _tfp_model_step(spec: Spec, task, jit: bool, fast: bool) -> Callable:
    from tensorflow_privacy.privacy.keras_models import dp_keras_model

    plain = models.checked_model(task)
    registry = _tfp_registry() if fast else None
    if fast:
        # Without this check the library would take the slow way silently.
        missing = {
            type(layer).__name__
            for layer in plain.layers
            if layer.trainable_variables and not registry.is_elem(layer)
        }
        if missing:
            raise UnsupportedError(f"no fast norms for {', '.join(sorted(missing))}")
    model = dp_keras_model.DPModel(
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        use_xla=False,
        layer_registry=registry,
        inputs=plain.inputs,
        outputs=plain.outputs,
    )
    model.compile(
        optimizer=_optimizer(spec, tf.keras.optimizers),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(True),
    )

    @tf.function(jit_compile=jit, reduce_retracing=True)
    def step(x, y):
        return model.train_step((x, y))

    return step
