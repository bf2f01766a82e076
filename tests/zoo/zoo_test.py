"""Published models train privately, or are refused, as docs/stacks.md says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests import stack
from tests.gradients.one_by_one_test import unknown
from tests.zoo import __main__ as page
from tests.zoo import check, entries

pytestmark = pytest.mark.every_check
needs_hub = pytest.mark.skipif(
    not (entries.HUB and stack.KERAS_3), reason="keras_hub is not installed"
)
needs_keras_3 = pytest.mark.skipif(not stack.KERAS_3, reason="the table is of Keras 3")
_FAST = ("GPT-2", 4)
# Networks that run without KerasHub. The remaining networks take up to twelve minutes.
_SMALL = ("MobileNetV2", "VGG16")


def cases():
    """Every family and network, all weights and LoRA; a single case is fast."""
    for name, entry in entries.ENTRIES.items():
        for rank in (None, page.RANK):
            if rank and entry.lora == "none":
                continue
            marks = [] if (name, rank) == _FAST else [pytest.mark.slow]
            marks.append(needs_keras_3 if name in _SMALL else needs_hub)
            words = "LoRA" if rank else "all"
            yield pytest.param(name, rank, id=f"{name}-{words}", marks=marks)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name, rank", cases())
def test_norms_are_exact_and_steps_are_taken_as_the_table_says(name, rank):
    entry = entries.ENTRIES[name]
    found = check.examine(entry, rank)
    assert found.refused or found.error < entry.tolerance
    assert found.outcome == (entry.lora if rank else entry.full), found
    if not found.refused:
        assert found.moved and 0 < found.epsilon <= 8


def test_every_entry_has_a_line_and_no_line_is_silent():
    rows = page.rows_of(page.PAGE.read_text())
    assert list(rows) == list(entries.ENTRIES)
    for name, (kind, full, lora, advice) in rows.items():
        entry = entries.ENTRIES[name]
        assert kind == entry.kind
        assert full in (entry.full, page.NOT_RUN), name
        assert lora in (entry.lora, page.NOT_RUN), name
        assert advice == " ".join(entry.advice.split())
        assert advice or {full, lora} <= {"works", "none", page.NOT_RUN}, name


@needs_hub
@pytest.mark.slow
def test_mixed_bfloat16_trains():
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        entry = entries.FAMILIES["BERT"]
        model = entry.build()
        check.two_steps(model, *entry.data())
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    assert all(np.isfinite(np.float32(w)).all() for w in model.get_weights())


@needs_hub
@pytest.mark.slow
def test_a_model_in_int8_trains_its_lora():
    entry = entries.FAMILIES["GPT-2"]
    tf.keras.utils.set_random_seed(1)
    model = entry.build()
    model.backbone.enable_lora(4)
    model.quantize("int8")
    trained = [v.path for v in model.trainable_variables]
    assert any("lora" in path for path in trained)
    x, y = entry.data()
    assert check.norms_error(model, x, y) < entry.tolerance
    check.two_steps(model, x, y)


@needs_hub
@pytest.mark.slow
def test_deberta_takes_no_jacobian_for_lora_of_the_values():
    entry = dataclasses.replace(entries.FAMILIES["DeBERTa-v3"], targets=("value",))
    assert check.examine(entry, page.RANK).outcome == "works"


def test_what_is_found_is_written_between_the_marks(tmp_path, monkeypatch):
    path = tmp_path / "page.md"
    path.write_text(f"ahead\n{page.BEGIN}\n{page.END}\nbehind\n")
    monkeypatch.setattr(page, "PAGE", path)
    page.update({"BERT": ["text classifier", "works", "refused"]})
    page.update({"T5": ["sequence to sequence", "works slowly", "works"]})
    rows = page.rows_of(path.read_text())
    assert rows["BERT"][1:3] == ["works", "refused"]
    assert rows["T5"][1:3] == ["works slowly", "works"]
    assert rows["VGG16"][1:3] == [page.NOT_RUN, page.NOT_RUN]
    assert path.read_text().startswith("ahead\n")
    assert path.read_text().endswith("\nbehind\n")


def test_a_warning_is_slow_and_a_refusal_refused():
    found = check.Found(1, 0.0, (), True, 1.0)
    assert found.outcome == "works"
    assert dataclasses.replace(found, slow=("w",)).outcome == "works slowly"
    assert dataclasses.replace(found, refused="no").outcome == "refused"


class Unproven(tf.keras.Model):
    """A model with an op that the proof's table does not have."""

    def __init__(self):
        super().__init__()
        self.hidden, self.logits = (tf.keras.layers.Dense(n) for n in (3, 2))

    def call(self, x):
        return self.logits(unknown(self.hidden(x)))


def test_a_model_that_trains_one_example_at_a_time_is_slow():
    def build():
        model = Unproven()
        model(np.zeros([1, 4], np.float32))
        return model

    x = np.random.default_rng(0).normal(size=[entries.RECORDS, 4]).astype(np.float32)
    labels = np.arange(entries.RECORDS, dtype=np.int32) % 2
    found = check.examine(entries.Entry("dense", build, lambda: (x, labels)))
    assert found.error < 1e-5 and found.outcome == "works slowly"
    assert "one example at a time" in found.slow[0]
