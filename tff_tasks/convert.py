"""Makes the files that the federated benchmarks read, from data of your own.

    python -m tff_tasks.convert --task=shakespeare_character --input=posts.csv \\
        --client=user --columns=snippets=body --output_dir=data
    python -m tff_tasks.shakespeare_character --data_dir=data

reads CSV, JSON lines, NPZ or text; a column names the client, or each file of a folder
is a client. Clients, not examples, are split into training and test. --format=plays
makes clients of the speakers of plays, and --dealt_to=600 deals an image set (IDX or
NPZ) to simulated clients. The file is read again before it takes its name; --check=FILE
reads any. docs/your_clients.md has examples from the download to the trained model.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence

from driver_kit import idx_files, large_files, programs, settings
from driver_kit.progress import Progress
from driver_kit.settings import UsageError
from tfdpclip import files
from tff_tasks.client_files import DataFileError, FederatedFile
from tff_tasks.conversion import checks, clients, image_sets, targets, vocabularies
from tff_tasks.conversion.targets import Target
from tff_tasks.conversion.writer import ClientWriter

_FORMATS = ("auto", "csv", "jsonl", "npz", "text", "plays")
_EVERY = 500


@dataclasses.dataclass(frozen=True)
class Settings:
    """The conversion's settings.

    Raises:
      ValueError: if a setting is out of range or does not go with the rest.
    """

    task: str | None = settings.choice(
        None,
        targets.WITH_FILES,
        "The benchmark that the file is for.",
        good="shakespeare_character",
    )
    input: str | None = settings.words(
        None, "The file or folder to read.", good="posts.csv"
    )
    output_dir: str = settings.words("data", "Where to write the file.")
    format: str = settings.choice(
        "auto",
        _FORMATS,
        "What is read; auto: by the ending of each file (.csv, .tsv, .jsonl, .ndjson, "
        ".npz, .txt; .gz after them, but not after .npz).",
    )
    client: str | None = settings.words(
        None,
        "The column of client ids. Without it, each file of the folder is a client.",
        good="user",
    )
    columns: str | None = settings.words(
        None,
        "The column of each feature, where its name is another: FEATURE=COLUMN, "
        "separated by commas; FEATURE=FIRST:LAST for several columns of a CSV file.",
        good="snippets=body",
    )
    text_examples: str = settings.choice(
        "lines",
        ("lines", "paragraphs", "file"),
        "What of a text file is one example.",
    )
    pixels: str | None = settings.choice(
        None,
        targets.PIXELS,
        "How pixels of EMNIST's benchmarks are given: ink is 0 and paper 1, as in "
        "their files; ink is 1; or ink is 255, as in MNIST. Default: ink_255 for IDX "
        "files, else ink_0.",
        good="ink_255",
    )
    only_digits: bool = settings.switch(
        False, "For EMNIST's benchmarks: labels are 0 to 9, for their --only_digits."
    )
    dealt_to: int | None = settings.count(
        None,
        "Deal an image set without clients out to so many simulated ones, and its "
        "test images to others.",
        good=600,
    )
    dirichlet: float = settings.number(
        0.3,
        "With --dealt_to: the concentration of the Dirichlet distribution of a "
        "client's labels; small numbers make clients differ.",
        above=0,
        only_with=("dealt_to",),
    )
    test_share: float = settings.number(
        0.2, "Share of the clients for the test.", above=0, below=1
    )
    heldout_share: float = settings.number(
        0.1, "For Stack Overflow: share of clients held out.", above=0, below=1
    )
    seed: int = settings.count(
        0, "Another seed splits and deals otherwise.", least=0, most=2**31 - 1
    )
    least_examples: int = settings.count(
        1, "Leave clients with fewer examples out.", good=2
    )
    count_words: bool = settings.switch(
        False,
        "For Stack Overflow: write the vocabularies as well, counted over training "
        "clients. These counts are exact: they are not private.",
    )
    overwrite: bool = settings.switch(False, "Replace files that are there.")
    check: str | None = settings.words(
        None,
        "Read this file again, and convert nothing.",
        good="data/emnist_all.sqlite",
        instead_of=(
            "input",
            "output_dir",
            "client",
            "columns",
            "dealt_to",
            "count_words",
            "overwrite",
        ),
    )

    def __post_init__(self):
        settings.check(self)
        if self.check is not None:
            return
        for name, good in (("task", "shakespeare_character"), ("input", "posts.csv")):
            if getattr(self, name) is None:
                raise ValueError(
                    f"{name} must be given, for example --{name}={good}; see --help."
                )
        words = str(self.task).startswith("stackoverflow")
        emnist = str(self.task).startswith("emnist")
        if self.count_words and not words:
            raise ValueError(f"count_words is for Stack Overflow, not {self.task}.")
        if (self.only_digits or self.pixels) and not emnist:
            name = "only_digits" if self.only_digits else "pixels"
            raise ValueError(f"{name} is for EMNIST's benchmarks, not {self.task}.")
        if self.test_share + self.heldout_share >= 1 and words:
            raise ValueError(
                f"test_share={self.test_share:g} and heldout_share="
                f"{self.heldout_share:g} leave no training client."
            )
        if self.dealt_to is not None:
            given = [
                name
                for name, wanted in (
                    ("client", None),
                    ("columns", None),
                    ("format", "auto"),
                )
                if getattr(self, name) != wanted
            ]
            if given or not (emnist or self.task == "cifar100_image"):
                reason = (
                    f"leave --{given[0]} out" if given else f"{self.task} has no images"
                )
                raise ValueError(
                    f"dealt_to={self.dealt_to} is for image sets without clients: "
                    f"{reason}."
                )


def run(used: Settings) -> str:
    """Converts or checks; returns the report.

    Raises:
      DataFileError: if the input does not do; names the file, the line and the column.
      UsageError: if settings do not go with the input.
    """
    if used.check is not None:
        return _check(pathlib.Path(used.check), used)
    path = pathlib.Path(str(used.input))
    idx = path.is_dir() and idx_files.are_in(path)
    if idx and used.dealt_to is None:
        raise UsageError(
            f"flag --dealt_to is missing: {path} has images without clients; for "
            "example --dealt_to=600."
        )
    pixels = used.pixels or ("ink_255" if idx else "ink_0")
    target = Target(str(used.task), used.only_digits, pixels)
    output = pathlib.Path(used.output_dir) / target.file_name
    wanted = [output.with_name(name) for name in vocabularies.names(target)]
    made = [output, *(wanted if used.count_words else [])]
    _refuse_existing(made, used.overwrite)
    programs.make_directory(used.output_dir)
    with large_files.replacing(output) as temporary:
        lines = _write(temporary, path, target, used)
        summary = _checked(temporary, target)
        if summary.both:
            raise DataFileError(f"{path}: {summary.notices[0]}")
        words = vocabularies.contents(temporary, target) if used.count_words else {}
        # A file that appeared in the meantime belongs to the user, too.
        _refuse_existing(made, used.overwrite)
    for name, content in words.items():
        files.write_atomically(output.with_name(name), content)
    report = [f"\nWritten to {', '.join(map(str, made))}; read again, and right."]
    report += [f"  {line}" for line in summary.lines()]
    notices = lines + summary.notices
    notices += [vocabularies.NOT_PRIVATE] if words else []
    notices += [
        f"{one} is missing, and {target.task_name} needs it: get a public one, or "
        "convert again with --count_words --overwrite."
        for one in wanted
        if not one.exists()
    ]
    report += [f"Notice: {line}" for line in notices]
    command = [f"python -m tff_tasks.{used.task} --data_dir={used.output_dir}"]
    command += ["--only_digits"] if used.only_digits else []
    command += vocabularies.flags(words, target)
    population = len(summary.splits["train"].sizes)
    if population < target.task.paper.clients_per_round:
        # The noised count of a single client would reveal more than the default noise
        # allows.
        cohort = min(population, max(2, population // 10))
        command.append(f"--clients_per_round={cohort}")
    return "\n".join([*report, f"Train: {' '.join(command)}"])


def _refuse_existing(paths: list[pathlib.Path], overwrite: bool) -> None:
    for path in paths:
        if path.exists() and not overwrite:
            raise UsageError(
                f"{path} is there already. Replace it with --overwrite, or write "
                "elsewhere: --output_dir=data/mine."
            )


def _write(
    path: pathlib.Path, source: pathlib.Path, target: Target, used: Settings
) -> list[str]:
    """Writes the file; returns notices."""
    notices: list[str] = []
    writer = ClientWriter(path)
    try:
        if used.dealt_to is not None:
            _deal(writer, source, target, used)
        else:
            notices += _read(writer, source, target, used)
        shares = {"test": used.test_share}
        if "heldout" in target.splits:
            shares["heldout"] = used.heldout_share
        progress = Progress("Writing clients", writer.num_clients, unit="client")
        try:
            left_out = writer.finish(
                target.splits, shares, used.seed, used.least_examples, progress.show
            )
        finally:
            progress.close()
    finally:
        writer.close()
    if left_out:
        notices.append(
            f"{len(left_out)} clients have fewer than {used.least_examples} examples "
            f"and were left out ({checks.some(left_out)})."
        )
    return notices


def _deal(
    writer: ClientWriter, source: pathlib.Path, target: Target, used: Settings
) -> None:
    parts = image_sets.load(source)
    total = sum(len(part.labels) for part in parts.values())
    examples = image_sets.deal(
        parts, target, int(used.dealt_to or 1), used.dirichlet, used.seed
    )
    progress = Progress("Dealing images", total, unit="image")
    try:
        for i, (client, content, purpose) in enumerate(examples, 1):
            writer.add(client, content, purpose)
            if i % _EVERY == 0 or i == total:
                progress.show(i)
    finally:
        progress.close()


def _read(
    writer: ClientWriter, source: pathlib.Path, target: Target, used: Settings
) -> list[str]:
    reader = clients.Reader(
        target,
        source,
        used.format,
        used.client,
        clients.parse_columns(used.columns, target),
        used.text_examples,
    )
    # Not examples: how many there are is known at the end.
    kilobytes = max(1, -(-reader.size // 1000))
    progress = Progress("Reading", kilobytes, unit="kB")
    try:
        for i, (client, content) in zip(itertools.count(1), reader, strict=False):
            writer.add(client, content)
            if i % _EVERY == 0:
                progress.show(min(kilobytes, reader.meter.done // 1000))
        progress.show(kilobytes)
    finally:
        progress.close()
    empty = reader.empty
    if not empty:
        return []
    if used.format == "plays":
        what = "have no speakers, so are no plays, and were skipped"
    else:
        what = "have no examples, so no client, and were skipped"
    return [f"{len(empty)} of {len(reader.files)} files {what}: {', '.join(empty)}."]


def _checked(path: pathlib.Path, target: Target) -> checks.Summary:
    bars: list[Progress] = []

    def checked(done: int, total: int) -> None:
        if not bars:
            bars.append(Progress("Reading again", total, unit="client"))
        bars[0].show(done)

    try:
        return checks.check_file(path, target, checked)
    finally:
        for bar in bars:
            bar.close()


def _check(path: pathlib.Path, used: Settings) -> str:
    names = [n for n in targets.WITH_FILES if Target(n).file_name == path.name]
    names = names if used.task is None else [used.task]
    if not names:
        raise UsageError(
            f"flag --check={path}: no benchmark reads a file of this name. Say which "
            "one it is for, for example --task=shakespeare_character."
        )
    file = FederatedFile(path)
    splits = file.splits()
    file.close()
    # Public files of EMNIST have both data sets, and converted files either.
    digits = "digits_only_train" in splits and "all_train" not in splits
    target = Target(names[0], used.only_digits or digits)
    summary = _checked(path, target)
    report = [f"\n{path} is right for {names[0]}."]
    report += [f"  {line}" for line in summary.lines()]
    return "\n".join([*report, *(f"Notice: {line}" for line in summary.notices)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program.

    Args:
      arguments: without the program's name; by default the process's arguments.

    Raises:
      SystemExit: with one clear sentence if the settings or the data are wrong.
    """
    argv = None if arguments is None else ["convert", *arguments]
    programs.run_program(__doc__, Settings, run, argv, errors=(DataFileError,))


if __name__ == "__main__":
    main()
