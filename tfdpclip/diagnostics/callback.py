"""A Keras callback that watches gradients while a model trains."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip import _arguments, files, pictures
from tfdpclip._data import check_data
from tfdpclip.diagnostics.gradients import (
    PRIVATE,
    GradientMeter,
    GradientNorms,
    SignalToNoise,
)
from tfdpclip.diagnostics.norms import by_class, plot_norms, summarize_norms
from tfdpclip.keras.watching.public_claims import SHOWN

_MOST_VIOLINS = 12


class GradientDiagnostics(tf.keras.callbacks.Callback):
    """Measures gradient norms, clipping and noise while a model trains.

    At the start, and after every epoch or every few steps: quantiles of the per-example
    norms, the fraction that is clipped, the clip norm next to the norm at its target
    quantile (clip norms by group, if the rule clips each group on its own), medians by
    layer, the signal-to-noise ratio of a step by layer and the accuracy. Clip norms are
    left out if batches or groups are clipped as a whole, and the ratio as well if the
    noise is correlated: its size differs from step to step. Rows go to a CSV file and
    to TensorBoard as they are measured, pictures are drawn at the end.

    *Formal guarantees*: none of privacy: everything is measured without noise. Nothing
    flows back into training. On private data the output is private, too, and must not
    be released: pictures and logs say so.

    Args:
      data: (x, y), or a `tf.data.Dataset` of batches.
      every: "epoch", or a number of batches; measured after the execution in which
        that many are reached.
      csv_path: a CSV file for the rows.
      picture_dir: a folder for the pictures: norms.png, classes.png, layers.png,
        clip.png, signal.png and, with `geometry`, geometry.png.
      log_dir: a folder for TensorBoard.
      geometry: whether to measure cosines, symmetry and the clipping bias as well,
        which takes the gradients themselves and not their norms alone.
      public: whether `data` are public. Then the output may be released, as far as the
        model may. A `fit` with a budget refuses it for arrays of its private batches.
      target_quantile: the quantile to compare the clip norm with; that of the clip rule
        by default.
      max_examples: measure no more than this many.
      batch_size: for arrays, and for the gradients held at once.
      **options: as for `GradientMeter`: `loss`, `variables`, `groups`, `training`.

    Attributes:
      rows: the measurements so far, one dictionary each.
      norms: the norms behind them, by step.

    Raises:
      ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        data: Any,
        *,
        every: str | int = "epoch",
        csv_path: Any = None,
        picture_dir: Any = None,
        log_dir: Any = None,
        geometry: bool = False,
        public: bool = False,
        target_quantile: float | None = None,
        max_examples: int = 1000,
        batch_size: int = 64,
        **options: Any,
    ):
        super().__init__()
        check_data("data", data, "(x, y)")
        if not (isinstance(every, str) and every == "epoch"):
            every = _arguments.integer("every", every, 1)
        _arguments.boolean("geometry", geometry)
        _arguments.boolean("public", public)
        if target_quantile is not None:
            target_quantile = _arguments.fraction("target_quantile", target_quantile)
        self.rows: list[dict[str, Any]] = []
        self.norms: dict[int, GradientNorms] = {}
        self._data, self._every, self._options = data, every, options
        self._csv = None if csv_path is None else pathlib.Path(csv_path)
        self._pictures = None if picture_dir is None else pathlib.Path(picture_dir)
        self._log_dir, self._writer = log_dir, None
        self._geometry, self._public = geometry, public
        if public:
            setattr(self, SHOWN, data)
        self._quantile = target_quantile
        self._most = _arguments.integer("max_examples", max_examples, 2)
        self._batch_size = _arguments.integer("batch_size", batch_size, 1)
        self._meter: GradientMeter | None = None
        self._found_geometry = None
        self._epoch, self._batches, self._of_epoch = 0, 0, 0

    def on_train_begin(self, logs=None):
        del logs
        if getattr(self.model.optimizer, "rows_per_record", 1) > 1:
            raise ValueError(
                "The optimizer clips records of several rows (rows_per_record), and "
                "diagnostics measure gradients of single rows. Leave them out, or "
                "measure with rows_per_record=1."
            )
        if self._meter is None or self._meter.model is not self.model:
            self._meter = GradientMeter(self.model, **self._options)
        if not self.rows:
            self._measure()

    def on_epoch_begin(self, epoch, logs=None):
        del logs
        self._epoch, self._of_epoch = epoch, 0

    def on_train_batch_end(self, batch, logs=None):
        del logs
        # An execution of several steps ends with the number of its last batch.
        before = self._batches
        self._batches += batch + 1 - self._of_epoch
        self._of_epoch = batch + 1
        every = self._every
        if every != "epoch" and self._batches // every > before // every:
            self._measure()

    def on_epoch_end(self, epoch, logs=None):
        del logs
        self._epoch = epoch + 1
        if self._every == "epoch":
            self._measure()

    def on_train_end(self, logs=None):
        del logs
        if self._pictures is not None and self.rows:
            self.draw(self._pictures)
        if self._writer is not None:
            self._writer.flush()

    # Measurements.

    def _measure(self):
        found = self._meter.norms(
            self._data, batch_size=self._batch_size, max_examples=self._most
        )
        clip_norm, quantile = self._clip()
        summary = summarize_norms(found.norms, clip_norm, quantile)
        step = int(self.model.optimizer.iterations.numpy())
        row = {"epoch": self._epoch, "step": step, **summary.row()}
        row["accuracy"] = (
            np.nan if found.correct is None else float(found.correct.mean())
        )
        medians = np.median(found.by_group, axis=0)
        for name, value in zip(found.groups, medians, strict=True):
            row[f"median/{name}"] = float(value)
        for name, value in self._clips_by_group().items():
            row[f"clip/{name}"] = value
            if name in found.groups:
                above = found.by_group[:, found.groups.index(name)] > value
                row[f"fraction_clipped/{name}"] = float(np.mean(above))
        ratio = self._signal_to_noise()
        if ratio is not None:
            values = ratio.ratio.mean(axis=0)
            for name, value in zip(ratio.groups, values, strict=True):
                row[f"snr/{name}"] = float(value)
        if self._geometry:
            from tfdpclip.diagnostics.geometry import gradient_geometry

            read = self._meter.chunks(
                self._data, batch_size=self._batch_size, max_examples=self._most
            )
            self._found_geometry = gradient_geometry(read)
            reference = clip_norm or summary.quantiles[0.5]
            if reference > 0:
                shape = self._found_geometry.summary(reference, permutations=199)
                skipped = ("count", "clip_norm", "fraction_clipped")
                row.update(
                    {f"geometry/{k}": v for k, v in shape.items() if k not in skipped}
                )
        self.rows.append(row)
        self.norms[step] = found
        self._write(row, found)

    def _clip(self) -> tuple[float | None, float | None]:
        """The flat clip norm and its target quantile, if there are such."""
        optimizer = self.model.optimizer
        rule = getattr(optimizer, "clip", None)
        quantile = self._quantile
        if quantile is None:
            quantile = getattr(rule, "target_quantile", None)
            quantile = quantile if isinstance(quantile, (int, float)) else None
        if rule is None or rule.threshold != "record" or self._clips_more():
            return None, quantile
        return float(optimizer.clip_norm), quantile

    def _clips_more(self) -> bool:
        """Whether the clip is of several examples together, and of no example."""
        return getattr(self.model.optimizer, "unit", None) in ("batch", "group")

    def _clips_by_group(self) -> dict[str, float]:
        """The clip norms of a rule that clips each group on its own."""
        optimizer = self.model.optimizer
        rule = getattr(optimizer, "clip", None)
        if rule is None or rule.threshold != "group" or self._clips_more():
            return {}
        optimizer.build(self.model.trainable_variables)
        return optimizer.clip_norms

    def _signal_to_noise(self) -> SignalToNoise | None:
        optimizer = self.model.optimizer
        if getattr(optimizer, "unit", None) != "example":
            return None
        optimizer.build(self.model.trainable_variables)
        if not optimizer.gradient_noise_multiplier:
            return None
        if getattr(optimizer, "noise", None) is not None:
            return None  # The steps of a matrix have noise of several sizes.
        size = max(1, round(optimizer.expected_batch_size))
        data = self._data
        if isinstance(data, tf.data.Dataset):
            data = data.unbatch().batch(size)
        return self._meter.signal_to_noise(
            data,
            optimizer.clip,
            float(optimizer.gradient_noise_multiplier),
            state=optimizer.clip_state,
            batch_size=size,
            max_examples=max(size, self._most // size * size),
        )

    # Output.

    def _write(self, row, found):
        if self._csv is not None:
            if len(self.rows) == 1:
                files.prepare_directory(self._csv.parent)
            whose = {"data": "public" if self._public else "private"}
            rows = [{**one, **whose} for one in self.rows]
            files.write_atomically(self._csv, files.table_text(rows, self._columns()))
        if self._log_dir is None:
            return
        step = row["step"]
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(str(self._log_dir))
            if not self._public:
                with self._writer.as_default(step=step):
                    tf.summary.text("gradients/not_to_be_released", PRIVATE)
        with self._writer.as_default(step=step):
            finite = found.norms[np.isfinite(found.norms)]
            tf.summary.histogram("gradients/norms", finite)
            for name, value in row.items():
                if name not in ("epoch", "step") and np.isfinite(value):
                    tf.summary.scalar(f"gradients/{name}", value)

    def _columns(self) -> list[str]:
        return [*self.rows[0], "data"]

    def draw(self, folder: Any) -> list[pathlib.Path]:
        """Draws what has been measured so far. Needs matplotlib.

        Args:
          folder: where to put the pictures.

        Returns:
          The pictures' paths.

        Raises:
          ValueError: if nothing has been measured yet.
        """
        if not self.rows:
            raise ValueError("There is nothing to draw: train the model first.")
        folder, drawn = pathlib.Path(folder), []
        public = self._public

        def path(name):
            drawn.append(folder / name)
            return drawn[-1]

        steps = list(self.norms)
        if len(steps) > _MOST_VIOLINS:
            chosen = np.linspace(0, len(steps) - 1, _MOST_VIOLINS).round().astype(int)
            steps = [steps[k] for k in chosen]
        by_step = {row["step"]: row for row in self.rows}
        clips = [by_step[step]["clip_norm"] for step in steps]
        clips = None if np.isnan(clips).any() else clips
        over_time = {step: self.norms[step].norms for step in steps}
        plot_norms(
            over_time,
            path("norms.png"),
            clip_norms=clips,
            xlabel="steps",
            title="Per-example gradient norms while training",
            public=public,
        )
        last = self.norms[steps[-1]]
        clip = None if clips is None else clips[-1]
        if last.labels is not None:
            plot_norms(
                by_class(last.norms, last.labels),
                path("classes.png"),
                clip_norms=clip,
                xlabel="class",
                title=f"Per-example gradient norms by class, step {steps[-1]}",
                public=public,
            )
        plot_norms(
            dict(zip(last.groups, last.by_group.T, strict=True)),
            path("layers.png"),
            xlabel="layer",
            title=f"Per-example gradient norms by layer, step {steps[-1]}",
            public=public,
        )
        _draw_clips(self.rows, path("clip.png"), public)
        groups = [k[4:] for k in self.rows[0] if k.startswith("snr/")]
        if groups:
            _draw_signal(self.rows, groups, path("signal.png"), public)
        if self._found_geometry is not None:
            title = f"Gradients at step {self.rows[-1]['step']}"
            self._found_geometry.plot(path("geometry.png"), title=title, public=public)
        return drawn


def _draw_clips(rows, path, public):
    """The clip norm over training against the quantiles of the norms."""
    figure, axes = pictures.new(6.4, 4.2)
    ax = axes[0, 0]
    x = [row["step"] for row in rows]

    def column(name):
        return np.array([row[name] for row in rows], np.float64)

    for low, high, alpha in ((5, 95, 0.25), (25, 75, 0.45)):
        ax.fill_between(
            x,
            column(f"norm_{low}%"),
            column(f"norm_{high}%"),
            color=pictures.COLORS[5],
            alpha=alpha,
            linewidth=0,
            label=f"norms, {low} to {high} %",
        )
    ax.plot(x, column("norm_50%"), color="black", linewidth=1.5, label="median norm")
    if np.isfinite(column("norm_at_target")).any():
        ax.plot(
            x,
            column("norm_at_target"),
            label="norm at the target quantile",
            **pictures.style(2),
        )
    if np.isfinite(column("clip_norm")).any():
        look = {**pictures.style(1), "linestyle": "--"}
        ax.plot(x, column("clip_norm"), label="clip norm", **look)
    if np.nanmin(column("norm_5%")) > 0:
        ax.set_yscale("log")
    ax.set_xlabel("steps")
    ax.set_ylabel("gradient norm (loss per unit of weight)")
    pictures.title(figure, "Clip norm and gradient norms while training")
    ax.legend(fontsize=8, frameon=False)
    if not public:
        pictures.note(figure)
    return pictures.finish(figure, path)


def _draw_signal(rows, groups, path, public):
    """The signal-to-noise ratio of each group over training."""
    figure, axes = pictures.new(6.4, 4.2)
    ax = axes[0, 0]
    x = [row["step"] for row in rows]
    for k, name in enumerate(groups):
        ax.plot(
            x, [row[f"snr/{name}"] for row in rows], label=name, **pictures.style(k)
        )
    ax.axhline(1.0, color=pictures.GREY, linewidth=0.8)
    ax.set_yscale("log")
    ax.set_xlabel("steps")
    ax.set_ylabel("signal / noise of one step")
    pictures.title(figure, "Signal-to-noise ratio by layer")
    ax.legend(fontsize=8, frameon=False, ncols=1 + len(groups) // 12)
    if not public:
        pictures.note(figure)
    return pictures.finish(figure, path)
