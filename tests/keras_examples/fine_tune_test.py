"""Private fine-tuning: a row for each record, the trained weights, and the files."""

from __future__ import annotations

import importlib.util
import json
import re

import numpy as np
import pytest
import tensorflow as tf

from driver_kit.settings import UsageError
from keras_examples import fine_tune, fine_tune_study, fine_tuning, text_records
from keras_examples import tiny_language as tiny
from keras_examples.text_records import Record
from tests import source_tree, stack
from tests.output_files import rows_of, words_of

SMALL = tiny.Shape(length=12, layers=1, width=8, heads=2)
WORDS = "the cat sat on a mat while the dog ate his hat".split()


def texts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, 6)) for _ in range(count)]


@pytest.fixture
def data(tmp_path):
    """Public text, and private records with labels."""
    (tmp_path / "public.txt").write_text("\n\n".join(texts(40)))
    rows = [{"text": t, "label": "ab"["cat" in t]} for t in texts(60, 1)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "private.jsonl").write_text(lines)
    return tmp_path


# Records and rows.


def test_a_row_holds_one_record_and_a_record_has_one_row():
    """Packing by record: no token of a second record, and no second row."""
    records = [Record(text) for text in [*texts(5), "é" * 40, "x"]]
    rows = text_records.byte_rows(records, 16)
    assert len(rows.x) == len(rows.y) == len(records)
    for k, record in enumerate(records):
        own = [text_records.START, *text_records.encode(record.text), text_records.END]
        count = int(rows.weights[k].sum())
        assert count == min(16, len(own) - 1)
        assert rows.x[k][:count].tolist() == own[:count]
        assert rows.y[k][:count].tolist() == own[1 : count + 1]
        assert not rows.weights[k][count:].any()
        assert set(rows.y[k][count:]) <= {text_records.PAD}


@pytest.mark.parametrize("k", [0, 2, 4])
def test_another_record_changes_its_own_row_alone(k):
    records = [Record(text) for text in texts(5)]
    rows = text_records.byte_rows(records, 16)
    records[k] = Record("a longer text that is entirely another one, " * 3)
    others = np.arange(5) != k
    again = text_records.byte_rows(records, 16)
    assert (again.x[k] != rows.x[k]).any()
    for name in ("x", "y", "weights"):
        before, after = getattr(rows, name), getattr(again, name)
        np.testing.assert_array_equal(after[others], before[others])


def test_files_are_read_record_by_record(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"say": "one"}\n\n{"say": "two"}\n')
    (tmp_path / "b.csv").write_text('say,who\n"three, four",x\n')
    (tmp_path / "c.txt").write_text("five six seven eight nine\nten\n\nshort\n")
    found = text_records.read(str(tmp_path), "say")
    assert [record.text for record in found] == [
        "one",
        "two",
        "three, four",
        "five six seven eight nine ten",
    ]
    labelled = text_records.read(str(tmp_path / "b.csv"), "say", "who")
    assert labelled == [Record("three, four", "x")]


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.jsonl", '{"other": 1}\n', "has no 'text', but other.*--text_field"),
        ("a.jsonl", "no json\n", "line 1: not JSON"),
        ("a.jsonl", "3\n", "line 1: must be like"),
        ("a.csv", "x,y\n1,2\n", "has no 'text', but x, y"),
        ("a.txt", "short\n", "no text in it"),
        ("a.pdf", "", "no such file or directory"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=words):
        text_records.read(str(tmp_path / name))


def test_a_label_that_is_not_public_is_refused_and_not_shown():
    with pytest.raises(UsageError, match="another label than good, bad") as caught:
        text_records.classes([Record("x", "secret")], ["good", "bad"])
    assert "secret" not in str(caught.value)


# Trained weights.


@pytest.mark.thinned(2)
@pytest.mark.parametrize("train", text_records.TRAINED)
def test_a_model_begins_as_the_public_one_and_trains_what_was_asked(train):
    public = tiny.build(SMALL)
    values = {k: v + 0.1 for k, v in tiny.weights(public).items()}
    tiny.assign(public, values)
    model = fine_tuning.Tiny(SMALL, values).model(train, 2)
    x = text_records.byte_rows([Record(t) for t in texts(3)], SMALL.length).x
    np.testing.assert_allclose(model(x), public(x), rtol=1e-5, atol=1e-5)
    names = {v.name for v in model.trainable_variables}
    parts = {name.split("/")[-1].split(":")[0] for name in names}
    count = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    if train == "full":
        assert count == public.count_params()
    else:
        low_rank = {"lora": {"lora_a", "lora_b"}, "ffa_lora": {"lora_b"}}
        wanted = {**low_rank, "bias": {"bias"}}
        assert parts == wanted.get(train, {"kernel", "bias"})


def test_merged_weights_are_the_model_without_lora():
    model = tiny.build(SMALL, "lora", 2)
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    merged = tiny.build(SMALL)
    tiny.assign(merged, tiny.weights(model))
    x = text_records.byte_rows([Record(t) for t in texts(3)], SMALL.length).x
    np.testing.assert_allclose(merged(x), model(x), rtol=1e-3, atol=1e-3)
    assert {name.split("/")[1] for name in tiny.low_rank(model)} == {"lora_a", "lora_b"}


def test_scores_count_tokens_of_records_and_no_padding():
    model = tiny.build(SMALL)
    records = [Record("abc"), Record("a much longer one")]
    rows = text_records.byte_rows(records, SMALL.length)
    both = fine_tuning.score(model, rows)
    assert both.tokens.tolist() == [4, 12]
    alone = fine_tuning.score(model, text_records.byte_rows(records[:1], SMALL.length))
    np.testing.assert_allclose(alone.losses, both.losses[:1], rtol=1e-5)
    gain, half = both.gain(both)
    assert gain == half == 0
    assert both.perplexity == pytest.approx(np.exp(both.losses.sum() / 16))


# The program.


def arguments(data, *more):
    network = ["--layers=1", "--width=8"]
    flags = {flag.split("=")[0] for flag in more}
    if flags.isdisjoint(("--weights", "--preset", "--public")):
        network.append(f"--public={data / 'public.txt'}")
    if "--preset" in flags:
        network = []
    return [
        "fine_tune",
        f"--private={data / 'private.jsonl'}",
        f"--output_dir={data / 'out'}",
        "--length=12",
        *network,
        "--delta=1e-3",
        "--epsilon=8",
        "--batch_size=30",
        "--epochs=1",
        "--samples=1",
        *more,
    ]


@pytest.mark.slow
def test_a_run_writes_weights_scores_samples_and_a_card(data):
    fine_tune.main(arguments(data, "--seed=1"))
    out = data / "out"
    public, merged = np.load(out / "public.npz"), np.load(out / "merged.npz")
    assert sorted(public.files) == sorted(merged.files)
    low = np.load(out / "lora.npz")
    for name in public.files:
        changed = np.abs(merged[name] - public[name]).max() > 0
        layer, kind = name.split("/")
        assert changed == (kind == "kernel" and f"{layer}/lora_a" in low.files), name
    assert {row["model"] for row in rows_of(out, "scores")} == {"public", "private"}
    assert len(rows_of(out, "samples")) == 2
    card = (out / "MODEL_CARD.md").read_text()
    assert "row of its own" in card and "Poisson" in card and "0.001" in card
    assert "test records" in words_of(out)


@pytest.mark.slow
@pytest.mark.parametrize("train", ["full", "head"])
def test_a_classifier_is_trained_from_labels(data, train):
    more = "--label_field=label", "--labels=a,b", f"--train={train}"
    fine_tune.main(arguments(data, *more))
    assert not (data / "out" / "lora.npz").exists()
    again = f"--weights={data / 'out' / 'public.npz'}"
    fine_tune.main(arguments(data, *more, again, "--physical_batch_size=16"))


@pytest.mark.slow
def test_records_at_a_time_are_found_from_the_memory(data, capsys):
    fine_tune.main(arguments(data, "--step_memory=64"))
    printed = capsys.readouterr().out
    rows = int(re.search(r"At most (\d+) records at a time", printed).group(1))
    assert rows > 0 and (data / "out" / "MODEL_CARD.md").exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--private="], "--private=: must be a text that is not empty"),
        (["--labels=a,b"], "--label_field and --labels belong together"),
        (["--public="], "--public=: must be a text that is not empty"),
        (["--preset=gpt2", "--layers=2"], "--preset takes the place of --layers"),
        (["--weights=a.npz", "--public=b"], "--weights takes the place of --public"),
        (["--width=6"], "--width: must be a multiple of 4"),
        (
            ["--step_memory=64", "--physical_batch_size=8"],
            "--step_memory and --physical_batch_size",
        ),
        (["--delta=0.1"], "records for training.*delta"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(data, flags, words):
    with pytest.raises(SystemExit, match=words):
        fine_tune.main(arguments(data, *flags))


@pytest.mark.parametrize("missing", ["private", "public"])
def test_records_and_public_texts_are_asked_for(data, missing):
    given = [a for a in arguments(data) if not a.startswith(f"--{missing}=")]
    with pytest.raises(SystemExit, match=f"flag --{missing}: .*--{missing}="):
        fine_tune.main(given)


def test_a_preset_without_keras_hub_names_the_extra(data, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"--preset=gpt2.*tfdpclip\[hub\]"):
        fine_tune.main(arguments(data, "--preset=gpt2"))


HUB = stack.KERAS_3 and importlib.util.find_spec("keras_hub") is not None


@pytest.mark.slow
@pytest.mark.parametrize("train", tiny.LOW_RANK)
@pytest.mark.skipif(not HUB, reason="keras_hub is not installed")
def test_a_preset_in_a_directory_is_tuned_and_saved(data, train):
    import keras_hub

    models = keras_hub.models
    symbols = ["<|endoftext|>", "th", *sorted({*"".join(WORDS), "Ġ", "T"})]
    tokenizer = models.GPT2Tokenizer({s: k for k, s in enumerate(symbols)}, ["t h"])
    backbone = models.GPT2Backbone(len(symbols), 1, 2, 8, 16, max_sequence_length=32)
    preprocessor = models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=16)
    task = models.GPT2CausalLM(backbone=backbone, preprocessor=preprocessor)
    task.save_to_preset(str(data / "preset"))
    more = f"--preset={data / 'preset'}", f"--train={train}"
    fine_tune.main(arguments(data, *more))
    assert (data / "out" / "model.lora.h5").exists()
    before = models.GPT2CausalLM.from_preset(str(data / "preset"))
    after = models.GPT2CausalLM.from_preset(str(data / "out" / "merged"))
    pairs = zip(before.get_weights(), after.get_weights(), strict=True)
    changed = [np.abs(a - b).max() > 0 for a, b in pairs]
    assert sum(changed) == 2  # Query and value of a block, with LoRA merged.


def train_as_the_page_says(folder):
    """Runs the program of docs/tutorials/fine_tuning.md on a preset of the folder."""
    page = source_tree.ROOT / "docs" / "tutorials" / "fine_tuning.md"
    text = page.read_text()
    code = re.search(r"^```py\n(import keras_hub.*?)^```", text, re.S | re.M)
    code = code[1].replace("bert_tiny_en_uncased", str(folder / "preset"))
    names = {}
    exec(code.replace("private.keras", str(folder / "private.keras")), names)
    paths = [weight.path for weight in names["task"].backbone.trainable_variables]
    assert len(paths) == 4 and not any("lora_kernel_a" in path for path in paths)
    assert names["plan"].ledger.steps == names["plan"].steps
    # KerasHub loads a task with its own optimizer, and with all weights (serving.md).
    loaded = tf.keras.models.load_model(str(folder / "private.keras"))
    assert len(loaded.backbone.trainable_variables) > 10
    with pytest.raises(ValueError, match="none of this plan"):
        names["plan"].replace(epochs=1).fit(loaded, (names["texts"], names["labels"]))
    texts = np.array(names["texts"][:2])
    np.testing.assert_allclose(loaded.predict(texts), names["task"].predict(texts))


@pytest.mark.slow
@pytest.mark.skipif(not HUB, reason="keras_hub is not installed")
def test_a_classifier_from_a_preset_in_a_directory_is_tuned_and_saved(data):
    import keras_hub

    models = keras_hub.models
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(WORDS))]
    tokenizer = models.BertTokenizer(words, lowercase=True)
    backbone = models.BertBackbone(len(words), 1, 2, 8, 16, max_sequence_length=32)
    preprocessor = models.BertTextClassifierPreprocessor(tokenizer, sequence_length=16)
    task = models.BertTextClassifier(
        backbone=backbone, num_classes=2, preprocessor=preprocessor
    )
    task.save_to_preset(str(data / "preset"))
    train_as_the_page_says(data)
    more = "--label_field=label", "--labels=a,b", f"--preset={data / 'preset'}"
    fine_tune.main(arguments(data, *more))
    after = models.BertTextClassifier.from_preset(str(data / "out" / "merged"))
    pairs = zip(task.backbone.weights, after.backbone.weights, strict=True)
    changed = [np.abs(np.subtract(a, b)).max() > 0 for a, b in pairs]
    assert sum(changed) == 2  # Query and value of a block, with LoRA merged.
    assert {row["model"] for row in rows_of(data / "out", "scores")} == {
        *("public", "private")
    }


@pytest.mark.slow
def test_the_study_goes_on_where_it_was_stopped(data):
    flags = [
        "fine_tune_study",
        f"--private={data / 'private.jsonl'}",
        f"--public={data / 'public.txt'}",
        f"--output_dir={data / 'study'}",
        "--length=12",
        "--layers=1",
        "--width=8",
        "--delta=1e-3",
        "--batch_size=20",
        "--epochs=1",
        "--epsilons=8",
        "--clip_epsilon=8",
        "--clip_norms=0.1",
        "--ways=LoRA 4",
        "--learning_rates=0.01",
        "--seeds=2",
    ]
    fine_tune_study.main(flags)
    first = (data / "study" / "trials.jsonl").read_text().splitlines()
    assert len(first) == 1 + 2 * 2
    fine_tune_study.main([*flags, "--seeds=3"])
    lines = (data / "study" / "trials.jsonl").read_text().splitlines()
    assert lines[:5] == first and len(lines) == 7
    assert {row["clip"] for row in rows_of(data / "study", "results")} == {
        "default",
        "0.1",
    }
    tf.keras.backend.clear_session()
