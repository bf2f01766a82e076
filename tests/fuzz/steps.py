"""A step of a model by the library, at each of its levels."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from tests.fuzz import losses
from tests.fuzz.outcome import EXCEEDED, WRONG
from tfdpclip.clipping import AutomaticClip, FixedClip, LayerwiseClip
from tfdpclip.gradients import PerExampleGradients
from tfdpclip.gradients.forms.floors import FLOOR
from tfdpclip.keras import DPSGD

_STABILITY = 0.05


@dataclasses.dataclass
class Found:
    """The results of a step.

    Attributes:
      sums: the clipped sum, one vector.
      norms: of the examples, if the level shows them.
      dead: whether no example counted, as where compiled code found mixing.
    """

    sums: np.ndarray
    norms: np.ndarray | None
    dead: bool


class Step:
    """A step, traced once.

    Args:
      model: a `model.Model`.
      truth: `[B, P]` true gradients, which the clip norm is chosen by.
    """

    options: dict = {}

    def __init__(self, model, truth):
        self.model = model
        self.mode = mode = model.spec.mode
        if model.spec.each > 1:
            self.options = {**self.options, "rows_per_record": model.spec.each}
        self.start = [v.numpy() for v in model.variables]
        norms = np.linalg.norm(truth, axis=1)
        norms = norms[np.isfinite(norms) & (norms > 0)]
        self.clip = float(np.median(norms)) if len(norms) else 1.0
        self.rule = self._rule(mode.get("rule", "fixed"))
        self.level = mode.get("level", "sum")
        self.pieces = mode.get("accumulate", 1) if self.level != "sum" else 1
        self.expected = float(model.spec.batch * self.pieces)
        self._any = bool(len(norms))
        self.run = getattr(self, "_" + self.level)()

    def _rule(self, name):
        if name == "automatic":
            return AutomaticClip(_STABILITY)
        if name == "layerwise":
            each = self.clip / len(self.model.variables) ** 0.5
            rule = LayerwiseClip(FixedClip(each), groups="variable")
            names = [f"v{i}/w" for i in range(len(self.model.variables))]
            return rule.bind(names)
        return FixedClip(self.clip)

    @property
    def sensitivity(self) -> float:
        """The bound on how far an example may move the sum."""
        found = self.rule.sensitivity(self.rule.initial_state())
        return float(np.linalg.norm(np.asarray(found))) * self.pieces

    @property
    def grain(self) -> float:
        """The rounding error where the sum is read off the weights."""
        if self.level == "sum":
            return 1e-9
        largest = max(float(np.abs(v).max(initial=0)) for v in self.start)
        count = sum(self.model.sizes) ** 0.5
        return 3e-7 * (largest + 1) * self.expected * count

    def __call__(self, data) -> Found:
        self.model.reset()
        sums, norms = self.run(data)
        smallest = 0 if self.level == "sum" else self.grain
        dead = self._any and float(np.abs(sums).max(initial=0)) <= smallest
        return Found(sums, norms, dead)

    def _function(self, run):
        return tf.function(
            run,
            input_signature=self.model.signature(self.mode.get("dynamic", False)),
            jit_compile=self.mode.get("jit") or None,
            autograph=False,
        )

    def _sum(self):
        model = self.model

        def run(x, y, w):
            _, loss = model.forward(x, y, w)
            found = PerExampleGradients(loss, model.variables, **self.options)
            sums = found.clipped_sum(self.rule, self.rule.initial_state())
            return sums, found.norms

        compiled = self._function(run)

        def call(data):
            sums, norms = compiled(*data)
            return model.flat(sums), norms.numpy().astype(np.float64)

        return call

    def _optimizer(self):
        return DPSGD(
            1.0,
            clip=self.rule,
            noise_multiplier=0,
            expected_batch_size=self.expected,
            accumulation_steps=self.pieces,
            **self.options,
        )

    def _difference(self, before):
        """The clipped sum that moved the weights."""
        model = self.model
        after = model.flat(model.variables)
        for variable, value in zip(model.variables, before, strict=True):
            variable.assign(value)
        return (model.flat(before) - after - model.shared()) * self.expected

    def _minimize(self):
        model = self.model
        optimizer = self._unnamed(self._optimizer())

        def run(x, y, w):
            _, loss = model.forward(x, y, w)
            optimizer.minimize(loss, model.variables)
            return loss

        compiled = self._function(run)

        def call(data):
            before = [v.numpy() for v in model.variables]
            for _ in range(self.pieces):
                compiled(*data)
            return self._difference(before), None

        return call

    def _unnamed(self, optimizer):
        if self.rule.assignment is not None:
            names = [f"v{i}/w" for i in range(len(self.model.variables))]
            assert len(names) == len(self.rule.assignment)
            optimizer = DPSGD(
                1.0,
                clip=LayerwiseClip(self.rule.rule, groups="variable"),
                noise_multiplier=0,
                expected_batch_size=self.expected,
                accumulation_steps=self.pieces,
                **self.options,
            )
        return optimizer

    def _fit(self):
        run = fit(self.model, self._unnamed(self._optimizer()), self.pieces)

        def call(data):
            before = [v.numpy() for v in self.model.variables]
            run(data)
            return self._difference(before), None

        return call

    # Judgement.

    def weights(self, norms: np.ndarray) -> np.ndarray:
        """The rule's weights, `[B]`, or `[B, L]` for groups, in double precision."""
        if isinstance(self.rule, AutomaticClip):
            found = 1 / (norms + _STABILITY)
        else:
            clip = self.clip
            if self.rule.assignment is not None:
                clip = clip / len(self.model.variables) ** 0.5
            found = np.minimum(1, clip / np.maximum(norms, 1e-30))
        return found

    def _pieces_of(self, truth: np.ndarray) -> list[np.ndarray]:
        """The gradients of each variable, `[B, entries]`."""
        places = np.cumsum([0, *self.model.sizes])
        return [truth[:, a:b] for a, b in zip(places, places[1:], strict=False)]

    def squares(self, truth: np.ndarray) -> np.ndarray:
        """The squared norms of each variable's gradients, `[B, V]`."""
        each = [np.square(part).sum(axis=1) for part in self._pieces_of(truth)]
        return np.stack(each, axis=1)

    def floored_squares(self, truth: np.ndarray) -> np.ndarray:
        """The squared norms, `[B, V]`, raised to the floor where their terms cancel."""
        model = self.model

        def run(x, y, w):
            _, loss = model.forward(x, y, w)
            found = PerExampleGradients(loss, model.variables, **self.options)
            floors = [FLOOR * parts for parts in found.terms_by_variable()]
            return tf.stack([found.squares_by_variable(), floors])

        model.reset()
        found, floors = self._function(run)(*model.data).numpy().astype(np.float64)
        squares = self.squares(truth)
        raised = (found.T > squares) & (found.T <= 2 * floors.T)
        return np.where(raised, found.T, squares)

    def expected_sum(self, truth: np.ndarray, squares: np.ndarray) -> np.ndarray:
        """The right answer."""
        finite = np.isfinite(truth).all(axis=1)
        truth = np.where(finite[:, np.newaxis], truth, 0)
        squares = np.where(finite[:, np.newaxis], squares, 0)
        if self.rule.assignment is None:
            total = self.weights(np.sqrt(squares.sum(axis=1))) @ truth
        else:
            parts = [
                self.weights(np.sqrt(square)) @ part
                for square, part in zip(squares.T, self._pieces_of(truth), strict=True)
            ]
            total = np.concatenate(parts)
        return total * self.pieces

    def problem(self, found: Found, truth: np.ndarray, tolerance) -> str | None:
        """The difference from the right answer in words, or None."""
        problem = self._problem(found, truth, tolerance, self.squares(truth))
        if problem is not None:
            squares = self.floored_squares(truth)
            problem = self._problem(found, truth, tolerance, squares)
        return problem

    def _problem(self, found, truth, tolerance, squares) -> str | None:
        relative, absolute = tolerance
        norms = np.sqrt(squares.sum(axis=1))
        finite = np.isfinite(norms)
        largest = norms[finite].max(initial=0)
        if found.norms is not None:
            error = np.abs(found.norms - norms)[finite]
            allowed = relative * norms[finite] + absolute * largest + 1e-7
            if not (error <= allowed).all():
                i = int(np.argmax(np.where(np.isnan(error), np.inf, error - allowed)))
                ratio = found.norms[finite][i] / max(norms[finite][i], 1e-30)
                return f"norm of an example is {ratio:.4g} of the truth"
        expected = self.expected_sum(truth, squares)
        error = np.abs(found.sums - expected)
        bound = self.sensitivity
        allowed = 4 * relative * max(np.abs(expected).max(initial=0), 0.25 * bound)
        allowed += self.grain
        if not (error <= allowed).all():
            size = max(np.abs(expected).max(), 1e-30)
            worst = float(np.max(error)) / size
            return f"sum is off by {worst:.2g} of its largest entry"
        return None

    def one_by_one(self):
        """Compares results of the same run, which share its random draws."""
        model, rule = self.model, FixedClip(self.clip / 3)

        def run(x, y, w):
            each, loss = model.forward(x, y, w)
            found = PerExampleGradients(loss, model.variables, **self.options)
            sums = found.clipped_sum(rule, rule.initial_state())
            rows = []
            for part in tf.unstack(model.of_records(each), model.spec.batch):
                parts = tf.gradients(part, model.variables)
                rows.append(
                    [
                        tf.zeros(v.shape) if p is None else tf.convert_to_tensor(p)
                        for p, v in zip(parts, model.variables, strict=True)
                    ]
                )
            return sums, found.norms, rows

        if any(n.args.get("how") == "recompute" for n in model.spec.nodes()):
            return None
        sums, norms, rows = self._function(run)(*model.data)
        truth = np.stack([model.flat(row) for row in rows]) * model.sum_scale
        size = np.linalg.norm(truth, axis=1)
        weights = np.minimum(1, self.clip / 3 / np.maximum(size, 1e-30))
        norms = norms.numpy()
        coarse = model.env.dtype != "float32"
        relative = 8e-2 if coarse else 3e-4
        finite = np.isfinite(size)
        # In a single pass, zero times a NaN of an example is NaN as well.
        if not finite.any():
            return None
        error = np.abs(norms - size)[finite]
        if not (
            error <= relative * size[finite] + relative / 10 * size[finite].max()
        ).all():
            ratio = float(np.max(norms[finite] / np.maximum(size[finite], 1e-30)))
            return WRONG, f"norm of a random model is {ratio:.4g} of the truth"
        expected = weights[finite] @ truth[finite]
        total = model.flat(sums)
        if np.abs(total - expected).max() > 4 * relative * max(
            np.abs(expected).max(), self.clip / 12
        ):
            return EXCEEDED, "the sum of a random model is another pass's"
        return None


class _Trained(tf.keras.Model):
    """A spec's model as a Keras model."""

    def __init__(self, model):
        super().__init__()
        self.fuzzed = model
        self.kept = list(model.variables)
        self.others = list(model.env.others)

    @property
    def trainable_variables(self):
        return self.kept

    def call(self, x, training=None):
        out, penalties = self.fuzzed.outputs(x)
        for part in penalties:
            self.add_loss(tf.reduce_mean(part))
        return tf.cast(out, tf.float32)


def fit(model, optimizer, pieces=1):
    """A function that trains for one step, as users do."""
    settings, mode = model.spec.loss, model.spec.mode
    targets, make = losses.KINDS[settings.get("kind", "mse")]
    names = {"none": "none", "keras_sum": "sum"}
    reduction = names.get(settings.get("reduction"), "auto")
    keras_model = _Trained(model)
    keras_model.compile(
        optimizer, make(reduction=reduction), jit_compile=mode.get("jit", False)
    )

    def call(data):
        x, y, w = data
        out, _ = model.outputs(x, plain=True)
        model.reset()
        target = targets(losses.target_of(y, tf.cast(out, y.dtype)))
        parts = (x, target, w) if settings.get("weighted") else (x, target)
        dataset = tf.data.Dataset.from_tensor_slices(parts)
        static = not mode.get("dynamic", False)
        dataset = dataset.batch(model.spec.rows, drop_remainder=static).repeat(pieces)
        keras_model.fit(dataset, epochs=1, verbose=0)

    return call


def control(model) -> None:
    """The same step without the library: an ordinary gradient."""
    if model.spec.mode.get("level") == "fit":
        before = [v.numpy() for v in model.variables]
        try:
            fit(model, tf.keras.optimizers.SGD(0.0))(model.data)
        finally:
            for variable, value in zip(model.variables, before, strict=True):
                variable.assign(value)
        return
    compiled = tf.function(
        lambda x, y, w: [
            tf.convert_to_tensor(g)
            for g in tf.gradients(model.forward(x, y, w)[1], model.variables)
            if g is not None
        ],
        input_signature=model.signature(model.spec.mode.get("dynamic", False)),
        jit_compile=model.spec.mode.get("jit") or None,
        autograph=False,
    )
    model.reset()
    compiled(*model.data)
