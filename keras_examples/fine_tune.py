r"""Fine-tunes a language model or a text classifier with differential privacy.

    python -m keras_examples.fine_tune --public=plays/hamlet.txt,plays/lear.txt \
        --private=plays/macbeth.txt --epsilon=3

--preset names a preset of KerasHub or a directory with one (Keras 3, and the extra
`hub`). Without it there is a small decoder over bytes, which is first trained on
--public. Private texts come as JSON lines, CSV, or text, whose paragraphs are the
records; with --label_field and --labels a classifier is trained.

A record is the protected unit: one line, or one speech. It is a row of its own, cut at
--length tokens. By default LoRA alone trains: its weights are saved, and all weights
with it merged into them, and a model card with the privacy statement.

The results on the test records (perplexity, accuracy) are not covered by the statement;
keep them to yourself, or use public records for the test.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

import tfdpclip as dpc
from driver_kit import npz_files, programs, settings
from driver_kit.lazy import tf
from driver_kit.settings import UsageError
from keras_examples import fine_tuning, text_records, tiny_language

_CARD = "MODEL_CARD.md"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    private: str | None = settings.words(
        None, "Files of private records (.jsonl, .csv, .txt), or directories of them."
    )
    text_field: str = settings.words("text", "The field or column of the text.")
    label_field: str | None = settings.words(
        None, "The field of the label; then a classifier is trained.", good="label"
    )
    labels: str = settings.words(
        "", "All labels, separated by commas: public, and not taken from the data."
    )
    preset: str | None = settings.words(
        None,
        "A preset of KerasHub, or a directory. By default a small decoder.",
        instead_of=("public", "public_epochs", "weights", "layers", "width"),
    )
    public: str | None = settings.words(
        None, "Public texts that the small decoder learns first."
    )
    public_epochs: int = settings.count(3, "How often it goes through them.")
    weights: str | None = settings.words(
        None,
        "public.npz of an earlier run, for --public.",
        instead_of=("public", "public_epochs"),
    )
    length: int = settings.count(64, "Tokens of a record; the rest is cut.", least=4)
    layers: int = settings.count(2, "Blocks of the small decoder.")
    width: int = settings.count(64, "Its width, a multiple of 4.")
    train: str = settings.choice(
        "lora", text_records.TRAINED, "What trains on private records."
    )
    rank: int = settings.count(4, "Of LoRA.")
    epsilon: float = settings.number(3.0, "Privacy budget.", above=0)
    delta: float = settings.delta()
    batch_size: int = settings.count(256, "Expected number of records per step.")
    physical_batch_size: int | None = settings.count(
        None, "Most records that the device holds at a time.", good=64
    )
    step_memory: int | None = settings.count(
        None,
        "MiB that a step may take beside weights and data: finds that number, by steps "
        "on zeros.",
        least=16,
        good=4096,
        instead_of=("physical_batch_size",),
    )
    epochs: int = settings.count(5, "How often to go through the private records.")
    learning_rate: float = settings.number(3e-3, "Of Adam.", above=0)
    clip_norm: float | None = settings.number(
        None, "A fixed clip norm, in place of the default rule.", good=0.1, above=0
    )
    test_share: float = settings.number(
        0.1, "The share of the records that is kept for the test.", above=0, below=1
    )
    prompt: str = settings.words("The ", "What samples go on from.")
    samples: int = settings.count(3, "How many texts to draw.", least=0)
    seed: int | None = settings.seed()
    output_dir: str = settings.output_dir("fine_tune")

    @property
    def classes(self) -> tuple[str, ...]:
        """The labels; none for a language model."""
        return tuple(self.labels.split(",")) if self.labels else ()


def run(used: Settings) -> programs.Outcome:
    """Trains as the settings say.

    Raises:
      UsageError: if the settings do not go together, or files cannot be read.
    """
    _check(used)
    if used.seed is not None:
        tf.keras.utils.set_random_seed(used.seed)
    records = text_records.read(used.private, used.text_field, used.label_field)
    training, test = text_records.split(records, used.test_share)
    plan = _plan(used, len(training))
    print(plan, flush=True)
    network = _network(used)
    rows, test_rows = (network.rows(r, used.classes) for r in (training, test))
    model = network.model(used.train, used.rank)
    before = fine_tuning.score(model, test_rows)
    drawn = {"before": _samples(used, network, model)}
    clip = None if used.clip_norm is None else dpc.FixedClip(used.clip_norm)
    plan = _within_memory(used, plan, network, rows, clip)
    fine_tuning.tune(model, rows, plan, used.learning_rate, clip, used.seed)
    after = fine_tuning.score(model, test_rows)
    drawn["after"] = _samples(used, network, model)
    written = network.save(model, pathlib.Path(used.output_dir))
    gain, half = after.gain(before)
    trained = int(sum(np.prod(v.shape) for v in model.trainable_variables))
    what = {"lora": "LoRA", "ffa_lora": "FFA-LoRA"}.get(used.train, used.train)
    what += f" of rank {used.rank}" if used.train in tiny_language.LOW_RANK else ""
    rows_ = [
        {
            "model": name,
            "perplexity": found.perplexity,
            "accuracy": found.accuracy,
            "loss": found.loss,
        }
        for name, found in (("public", before), ("private", after))
    ]
    findings = [
        f"{network.name}, {what}: {trained} of {model.count_params()} parameters "
        f"trained on {len(training)} records of at most {used.length} tokens.",
        f"On {len(test)} test records, perplexity went from {before.perplexity:.4g} to "
        f"{after.perplexity:.4g} and accuracy from {before.accuracy:.1%} to "
        f"{after.accuracy:.1%}. The loss fell by {gain:.4f} +- {half:.4f} nats per "
        "token (95 %, over test records; of this one run).",
    ]
    samples = [
        {"model": name, "text": text} for name, texts in drawn.items() for text in texts
    ]
    return programs.Outcome(
        title="Private fine-tuning of a text model",
        findings=findings,
        privacy=plan.statement(),
        caveats=[
            "A record is one line or one paragraph. Whoever wrote several of them is "
            "protected by less than the statement says.",
            "Scores of test records carry no noise and are not covered.",
            "What the model was trained on before is taken to be public.",
            f"Written besides: {', '.join(written)}.",
        ],
        tables={"scores": rows_, "samples": samples},
        texts={_CARD: _card(used, network, findings, plan)},
        shown=("scores", "samples"),
        numbers={"gain": gain, "half_width": half, "trained": trained},
    )


def _check(used: Settings) -> None:
    if not used.private:
        raise UsageError("flag --private: say which records, --private=notes.jsonl.")
    if bool(used.labels) != (used.label_field is not None):
        raise UsageError(
            "flags --label_field and --labels belong together, for example "
            "--label_field=label --labels=good,bad."
        )
    if not used.preset and not (used.public or used.weights):
        raise UsageError(
            "flag --public: the small decoder knows nothing before it has seen public "
            "text, --public=book.txt; or --preset takes a model of KerasHub."
        )
    if used.width % 4:
        raise UsageError(
            "flag --width: must be a multiple of 4, for example --width=64."
        )


def _plan(used: Settings, count: int) -> dpc.keras.PrivacyPlan:
    try:
        return dpc.keras.PrivacyPlan(
            used.epsilon,
            used.delta,
            examples=count,
            batch_size=min(used.batch_size, count),
            epochs=used.epochs,
            physical_batch_size=used.physical_batch_size,
        )
    except ValueError as error:
        raise UsageError(f"{count} records for training: {error}") from error


def _within_memory(used, plan, network, rows, clip) -> dpc.keras.PrivacyPlan:
    """The plan, with batches whose steps stay within --step_memory."""
    if not used.step_memory:
        return plan

    def training(trial):
        model = network.model(used.train, used.rank)
        rate, seed = used.learning_rate, used.seed
        return model, fine_tuning.begun(model, rows, trial, rate, clip, seed)

    try:
        plan = plan.within_memory(used.step_memory * 2**20, training)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"flag --step_memory={used.step_memory}: {error}") from error
    print(f"At most {plan.physical_batch_size} records at a time.", flush=True)
    return plan


def _network(used: Settings):
    classes = len(used.classes)
    if used.preset:
        return fine_tuning.Hub(used.preset, used.length, classes)
    shape = tiny_language.Shape(used.length, used.layers, used.width, classes=classes)
    if used.weights:
        names = list(np.load(used.weights).files)
        values = npz_files.read_npz(used.weights, names)
    else:
        public = text_records.read(used.public, used.text_field)
        values = fine_tuning.pretrain(shape, public, used.public_epochs)
        np.savez(pathlib.Path(used.output_dir) / "public.npz", **values)
    return fine_tuning.Tiny(shape, values)


def _samples(used, network, model) -> list[str]:
    if used.classes:
        return []
    return [network.continued(model, used.prompt, k) for k in range(used.samples)]


def _card(used, network, findings, plan) -> str:
    return "\n".join(
        [
            "# Model card",
            "",
            f"Made from {network.name} by `python -m keras_examples.fine_tune`.",
            "",
            *(f"{text}\n" for text in findings),
            "## Privacy",
            "",
            f"What is protected is one record: one text, cut at {used.length} tokens, "
            "in a row of its own. Scores of test records, as above, are not covered.",
            "",
            plan.statement(format="markdown"),
        ]
    )


def main(argv: list[str] | None = None) -> None:
    """The program."""
    programs.launch(__doc__, Settings, run, argv)


if __name__ == "__main__":
    main()
