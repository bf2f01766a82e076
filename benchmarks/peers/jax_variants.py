"""Steps of jax_privacy and of JAX; needs an environment with it.

All steps are compiled, the plain step too, as is usual in JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax_privacy
import optax

from benchmarks.peers import jax_models
from benchmarks.timing import Spec, UnsupportedError

# The variants and their microbatches: all examples at once, or so many at a time.
MICROBATCHES = {"jax_vmap": None, "jax_microbatch8": 8, "jax_microbatch1": 1}


def step_of(spec: Spec, variant: str) -> Callable[[], None]:
    """Makes a model, and a training step of it on one batch."""
    if spec.options:
        raise UnsupportedError("no options here")
    if variant != "plain" and variant not in MICROBATCHES:
        raise ValueError(
            f"variants must be of plain, {', '.join(MICROBATCHES)}, got {variant!r}."
        )
    apply, parameters = jax_models.make(spec.model)
    x, y = jax_models.batch(spec.model, spec.batch_size)
    optimizer = optax.adam(1e-3) if spec.adam else optax.sgd(0.1)

    def loss(p, x, y):
        logits = apply(p, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    if variant == "plain":
        noise = None
        gradient = jax.grad(loss)
    else:
        gradient = jax_privacy.clipped_grad(
            loss,
            l2_clip_norm=1.0,
            normalize_by=float(spec.batch_size),
            batch_argnums=(1, 2),
            microbatch_size=MICROBATCHES[variant],
        )
        noise = jax_privacy.noise_addition.gaussian_privatizer(
            stddev=gradient.sensitivity(), prng_key=jax.random.key(0)
        )

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, x, y):
        p, inner, noise_state = state
        found = gradient(p, x, y)
        if noise is not None:
            found, noise_state = noise.update(found, noise_state)
        change, inner = optimizer.update(found, inner, p)
        return optax.apply_updates(p, change), inner, noise_state

    state = [
        (
            parameters,
            optimizer.init(parameters),
            None if noise is None else noise.init(parameters),
        )
    ]

    def step():
        state[0] = jax.block_until_ready(update(state[0], x, y))

    return step


def makers(spec: Spec) -> tuple[dict[str, Callable], int]:
    """The makers of steps, by variant, and the number of trained parameters."""
    _, parameters = jax_models.make(spec.model)
    made = {name: lambda name=name: step_of(spec, name) for name in spec.variants}
    return made, sum(value.size for value in parameters)
