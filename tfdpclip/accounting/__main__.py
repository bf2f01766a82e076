r"""Answers privacy questions on the command line.

The questions: which epsilon, noise or number of steps; for the privacy of people,
whether to draw people or examples; and which epsilon a run of tensorflow-privacy's
optimizers had:

    python -m tfdpclip.accounting epsilon --noise_multiplier=1.1 --steps=1000 \
        --rate=0.01 --delta=1e-5
    python -m tfdpclip.accounting noise --epsilon=1,3,8 --epochs=15 \
        --batch_size=256 --population=60000
    python -m tfdpclip.accounting steps --epsilon=3 --noise_multiplier=1 --rate=0.01
    python -m tfdpclip.accounting people --epsilon=3 --steps=1000 --batch_size=256 \
        --people=10000 --population=200000 --per_person=1,4,16 --delta=1e-6
    python -m tfdpclip.accounting past_run --examples=60000 --batch_size=256 \
        --epochs=20 --noise=1.1

`people` compares two ways of sampling, for the same budget, steps, and `--batch_size`
of expected examples in a step: drawing people, each with `--per_person` examples that
are clipped together (`Poisson`), and drawing examples, each clipped separately, from
data with at most `--per_person` examples of each person (`CappedPoisson`).
`--population` counts examples, and every person is taken to have equally many.

Flags that take a list give one row per combination. A flag without effect on the answer
is an error: a flag that the question does not use, a flag that a second flag makes
needless (`--rate` next to `--batch_size`), or a flag that is given twice.
"""

import difflib
import itertools
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dp_accounting
from absl import flags

from tfdpclip import accounting, sampling
from tfdpclip._notebook import aligned
from tfdpclip.accounting import _command_flags
from tfdpclip.sampling.events import RELATION_NAMES

# A separate object, so that importing this module adds no flags to other programs.
_FLAGS = flags.FlagValues()


def _number_list(name: str, text: str) -> None:
    flags.DEFINE_list(name, [], text, flag_values=_FLAGS)


_number_list("noise_multiplier", "z: noise standard deviation over clip norm; a list.")
_number_list("epsilon", "Privacy target; a list.")
_number_list("steps", "Steps (noise draws, or rounds); a list.")
_number_list("epochs", "Instead of steps: passes over the data; a list.")
_number_list("rate", "Poisson sampling rate; a list.")
_number_list("batch_size", "Records per step; a list. With Poisson: expected.")
flags.DEFINE_integer(
    "population", None, "Number of records or clients.", flag_values=_FLAGS
)
_number_list("per_person", "Examples of a person, for `people`; a list.")
flags.DEFINE_integer(
    "people", None, "Number of people, for `people`.", flag_values=_FLAGS
)
flags.DEFINE_float("delta", 1e-5, "The delta of the guarantee.", flag_values=_FLAGS)
flags.DEFINE_enum(
    "sampling",
    "poisson",
    [
        "poisson",
        "random_allocation",
        "fixed_size",
        "with_replacement",
        "shuffled",
        "full",
    ],
    "How records are drawn.",
    flag_values=_FLAGS,
)
flags.DEFINE_enum(
    "accountant",
    "pld",
    ["pld", "rdp", "gdp"],
    "How privacy is added up.",
    flag_values=_FLAGS,
)
flags.DEFINE_enum(
    "unit",
    "example",
    ["example", "client", "batch", "group"],
    "The unit of clipping.",
    flag_values=_FLAGS,
)
for _alias, _name in _command_flags.ALIASES.items():
    flags.DEFINE_alias(_alias, _name, flag_values=_FLAGS)

_HELP = {"-h", "-help", "--help", "--helpshort", "--helpfull"}
_QUESTIONS = tuple(_command_flags.USES)


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2 or argv[1] not in _QUESTIONS:
        meant = difflib.get_close_matches("".join(argv[1:2]), _QUESTIONS, 1)
        raise ValueError(
            f"Ask one of {', '.join(_QUESTIONS)}"
            f"{''.join(f'. Did you mean {name}?' for name in meant) or ':'} "
            f"python -m tfdpclip.accounting {(*meant, 'epsilon')[0]} --help"
        )
    answer(argv[1])


def answer(question: str) -> None:
    """Prints the table that answers a question."""
    _command_flags.refuse_without_effect(question, _FLAGS)
    if question == "past_run":
        # `fit` of arrays shuffles, which samples nothing: both answers.
        for size, epochs, z in _product("batch_size", "epochs", "noise_multiplier"):
            settings = (_needed("population"), _whole("batch_size", size), epochs, z)
            run = accounting.past_run(*settings, _FLAGS.delta, _FLAGS.unit == "batch")
            print(f"batch size {size:g}, {epochs:g} epochs, noise {z:g}: {run}")
        print(f"unit clipped: {_FLAGS.unit}\naccountant: pld")
        return
    if question == "people":
        names = ("per_person", "batch_size", "epsilon", "steps")
        rows = [row for values in _product(*names) for row in _people_rows(*values)]
    else:
        rows = [
            row
            for scheme in _schemes()
            for row in {"epsilon": _epsilon, "noise": _noise, "steps": _steps}[
                question
            ](scheme)
        ]
    print(_table([cells for cells, _ in rows]))
    schemes = {scheme for _, scheme in rows}
    relations = {RELATION_NAMES[s.neighboring_relation] for s in schemes}
    print(f"\ndelta: {_FLAGS.delta:g}")
    print(f"neighbours: {'; '.join(sorted(relations))}")
    print(f"unit clipped: {_PEOPLE if question == 'people' else _FLAGS.unit}")
    print(f"accountant: {_FLAGS.accountant}")
    if _FLAGS.accountant == "gdp" and any(s.amplified for s in schemes):
        print("NOTE: a central limit approximation of sampling, not a bound.")
    for text in sorted({text for s in schemes for text in s.assumptions()}):
        print(f"assuming: {text}")


# The cells of a row by column, and the scheme.
Row = tuple[dict[str, str], sampling.SamplingScheme]

_PEOPLE = """person
noise of the mean: noise multiplier / clipped in a step, in clip norms of the clipped
unit
NOTE: the mean is over people if people are drawn, and over examples if examples are.
A person's mean is shorter, by the root of `per person`, if the person's examples have
nothing in common, and not shorter if they are alike: the clip norm of people may be
smaller by the same factor, and so may their noise."""


def _epsilon(scheme) -> Iterator[Row]:
    for z, steps in itertools.product(_numbers("noise_multiplier"), _all_steps(scheme)):
        spent = accounting.epsilon(z, steps, scheme, **_options())
        yield _row(scheme, steps, z, spent)


def _noise(scheme) -> Iterator[Row]:
    for target, steps in itertools.product(_numbers("epsilon"), _all_steps(scheme)):
        z = accounting.noise_multiplier(
            epsilon=target, steps=steps, sampling=scheme, **_options()
        )
        yield _row(scheme, steps, z, target)


def _steps(scheme) -> Iterator[Row]:
    for target, z in _product("epsilon", "noise_multiplier"):
        steps = accounting.steps_for(
            epsilon=target, noise_multiplier=z, sampling=scheme, **_options()
        )
        yield _row(scheme, steps, z, target)


def _people_rows(per_person: float, size: float, target: float, steps: float):
    """Rows for drawing people, and for drawing examples, with equal examples a step."""
    most, count = _whole("per_person", per_person), _whole("steps", steps)
    people, examples = _needed("people"), _needed("population")
    if not 1 <= people <= examples:
        raise ValueError(
            f"--people must be from 1 to the --population of {examples} examples, got "
            f"{people}."
        )
    if most < 1:
        raise ValueError(f"--per_person must be 1 or above, got {most}.")
    kept = min(examples, most * people)
    if not 0 < size <= kept:
        raise ValueError(
            f"--batch_size must be above 0 and at most the {kept} examples that are "
            f"left with --per_person={most}, got {size:g}."
        )
    rate = size / kept
    ways = {
        "people": (sampling.Poisson(rate), rate * people),
        "examples": (sampling.CappedPoisson(rate, most), size),
    }
    noises = []
    for way, (scheme, clipped) in ways.items():
        z = accounting.noise_multiplier(
            epsilon=target, steps=count, sampling=scheme, **_options("person")
        )
        noises.append(z / clipped)
        cells = {
            "per person": str(most),
            "drawn": way,
            "rate": f"{rate:.6g}",
            "clipped in a step": f"{clipped:.6g}",
            "steps": str(count),
            "noise multiplier": f"{z:.6g}",
            "noise of the mean": f"{noises[-1]:.4g}",
            "times that of people": f"{noises[-1] / noises[0]:.4g}",
            "epsilon": f"{target:.6g}",
        }
        yield cells, scheme


def _row(scheme, steps: int, z: float, epsilon: float) -> Row:
    cells = {
        "sampling": scheme.describe(),
        "steps": str(steps),
        "noise multiplier": f"{z:.6g}",
        "epsilon": f"{epsilon:.6g}",
    }
    return cells, scheme


def _schemes() -> list[sampling.SamplingScheme]:
    kind = _FLAGS.sampling
    if kind == "full":
        return [sampling.FullBatch()]
    if kind == "poisson" and _FLAGS.rate:
        return [sampling.Poisson(rate) for rate in _numbers("rate")]
    population = _needed("population")
    makers: dict[str, Callable] = {
        "poisson": lambda size: sampling.Poisson(size / population),
        "random_allocation": lambda size: sampling.RandomAllocation(
            max(1, round(population / size))
        ),
        "fixed_size": lambda size: sampling.FixedSize(
            _whole("batch_size", size), population
        ),
        "with_replacement": lambda size: sampling.FixedSize(
            _whole("batch_size", size), population, replacement=True
        ),
        "shuffled": lambda size: sampling.ShuffledEpochs(
            _whole("batch_size", size), population
        ),
    }
    return [makers[kind](size) for size in _numbers("batch_size")]


def _all_steps(scheme) -> list[int]:
    if _FLAGS.steps:
        return [_whole("steps", value) for value in _numbers("steps")]
    if not _FLAGS.epochs:
        raise ValueError("Give --steps or --epochs.")
    if isinstance(scheme, sampling.Poisson):
        return [math.ceil(e / scheme.rate - 1e-9) for e in _numbers("epochs")]
    if isinstance(scheme, sampling.FullBatch):
        return [math.ceil(epochs) for epochs in _numbers("epochs")]
    if isinstance(scheme, sampling.RandomAllocation):
        return [math.ceil(e * scheme.steps - 1e-9) for e in _numbers("epochs")]
    ratio = _needed("population") / scheme.batch_size
    return [math.ceil(epochs * ratio - 1e-9) for epochs in _numbers("epochs")]


def _options(unit: str | None = None) -> dict[str, Any]:
    return {
        "delta": _FLAGS.delta,
        "accountant": _FLAGS.accountant,
        "unit": unit or _FLAGS.unit,
    }


def _numbers(name: str) -> list[float]:
    values = _FLAGS[name].value
    if not values:
        raise ValueError(f"Give --{name}.")
    try:
        return [float(value) for value in values]
    except ValueError as error:
        raise ValueError(f"--{name} must be numbers, got {values}.") from error


def _product(*names: str):
    return itertools.product(*(_numbers(name) for name in names))


def _needed(name: str) -> int:
    if _FLAGS[name].value is None:
        raise ValueError(f"Give --{name}.")
    return _FLAGS[name].value


def _whole(name: str, value: float) -> int:
    if not float(value).is_integer():
        raise ValueError(f"--{name} must be whole numbers, got {value}.")
    return int(value)


def _table(rows: list[dict[str, str]]) -> str:
    names = list(rows[0])
    lines = [names, *([row[name] for name in names] for row in rows)]
    lines.insert(1, ["-" * max(map(len, c)) for c in zip(*lines, strict=True)])
    return aligned(lines, left=range(len(names)))


def _parse(argv: Sequence[str]) -> list[str]:
    if not _HELP.isdisjoint(argv):
        print(f"{__doc__}\n{_FLAGS.main_module_help()}{_FLAGS.get_help()}")
        sys.exit(0)
    argv = _FLAGS.read_flags_from_files(list(argv), force_gnu=False)
    _command_flags.refuse_twice(argv, _FLAGS)
    return _FLAGS(argv)


def run(argv: Sequence[str] | None = None) -> None:
    """Parses the arguments and answers; errors become one line and exit code 1."""
    try:
        main(_parse(sys.argv if argv is None else argv))
    except (flags.Error, ValueError, dp_accounting.UnsupportedEventError) as error:
        flag = getattr(error, "flagname", "").removeprefix("no")
        instead = _command_flags.INSTEAD.get(flag, "")
        print(f"accounting: error: {error}{instead}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    # A reader that has read enough, such as head, ends the program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    run()
