"""`python -m tfdpclip.accounting`."""

import contextlib
import importlib
import itertools
import re
import subprocess
import sys
import zlib

import pytest

from tfdpclip import accounting, sampling

command = importlib.import_module("tfdpclip.accounting.__main__")


def _run(capsys, *arguments):
    command._FLAGS.unparse_flags()
    for name in command._FLAGS:
        command._FLAGS[name].unparse()
    command.run(["accounting", *arguments])
    return capsys.readouterr().out


def _rows(text):
    """The table as a list of {column: cell}."""
    lines = text.splitlines()
    rule = lines[1]
    edges = [0] + [i + 1 for i in range(1, len(rule)) if rule[i - 1 : i + 1] == " -"]
    edges = [0, *(i for i in range(1, len(rule)) if rule[i - 1 : i + 1] == " -"), None]
    cut = [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    names = [lines[0][part].strip() for part in cut]
    rows = []
    for line in lines[2:]:
        if not line:
            break
        rows.append(dict(zip(names, [line[part].strip() for part in cut], strict=True)))
    return rows


def test_epsilon(capsys):
    text = _run(capsys, "epsilon", "--noise_multiplier=1,2", "--steps=100,200",
                "--rate=0.01")  # fmt: skip
    rows = _rows(text)
    assert len(rows) == 4
    expected = accounting.epsilon(1.0, 200, sampling.Poisson(0.01), 1e-5)
    assert float(rows[1]["epsilon"]) == pytest.approx(expected, rel=1e-5)
    for part in ("delta: 1e-05", "add or remove one record", "accountant: pld"):
        assert part in text


def test_noise(capsys):
    text = _run(capsys, "noise", "--epsilon=1", "--epochs=15", "--batch_size=256",
                "--population=60000")  # fmt: skip
    (row,) = _rows(text)
    assert row["steps"] == "3516"
    assert float(row["noise multiplier"]) == pytest.approx(1.185138, rel=1e-3)


def test_steps(capsys):
    text = _run(capsys, "steps", "--epsilon=1", "--noise_multiplier=5",
                "--sampling=full", "--accountant=gdp")  # fmt: skip
    (row,) = _rows(text)
    assert row["steps"] == "1"


_PEOPLE = ("people", "--epsilon=3", "--steps=50", "--people=1000",
           "--population=20000", "--delta=1e-6")  # fmt: skip


@pytest.mark.slow
def test_people(capsys):
    text = _run(capsys, *_PEOPLE, "--per_person=1,4,40", "--batch_size=100")
    rows = _rows(text)
    drawn = ["people", "examples"] * 3
    assert [row["drawn"] for row in rows] == drawn
    for people, examples, k in zip(rows[::2], rows[1::2], (1, 4, 40), strict=True):
        # Everybody has 20 examples.
        rate = 100 / (1000 * min(k, 20))
        found = {}
        for row, scheme, clipped in (
            (people, sampling.Poisson(rate), 100 / min(k, 20)),
            (examples, sampling.CappedPoisson(rate, k), 100),
        ):
            z = accounting.noise_multiplier(3.0, 1e-6, 50, scheme, unit="person")
            found[row["drawn"]] = z / clipped
            assert row["per person"] == str(k)
            assert row["steps"] == "50"
            assert row["epsilon"] == "3"
            for name, value in {
                "rate": rate,
                "clipped in a step": clipped,
                "noise multiplier": z,
                "noise of the mean": z / clipped,
                "times that of people": z / clipped / found["people"],
            }.items():
                assert float(row[name]) == pytest.approx(value, rel=1e-3), name
    # Persons with one example cost the same either way; with several examples, an
    # example is drawn with less noise, but has the larger norm.
    assert float(rows[1]["times that of people"]) == 1
    assert float(rows[3]["times that of people"]) < 1
    for part in ("delta: 1e-06", "unit clipped: person", "at most 40 examples",
                 "in clip norms of the clipped", "mean is shorter"):  # fmt: skip
        assert part in text


def test_people_is_said_of_people_only(capsys):
    text = _run(capsys, "epsilon", "--noise_multiplier=1", "--steps=1", "--rate=0.1")
    assert "person" not in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fixed_size", "with_replacement", "shuffled"])
def test_every_scheme_can_be_asked_for(kind, capsys):
    text = _run(
        capsys,
        "epsilon",
        "--noise_multiplier=2",
        "--epochs=1",
        "--batch_size=10",
        "--population=100",
        f"--sampling={kind}",
    )
    # fmt: skip
    assert "replace one record" in text
    assert ("no amplification" in text) == (kind == "shuffled")


def test_approximations_are_labelled(capsys):
    text = _run(capsys, "epsilon", "--noise_multiplier=2", "--steps=10",
                "--rate=0.1", "--accountant=gdp")  # fmt: skip
    assert "not a bound" in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "Ask one of"),
        (["what"], "Ask one of"),
        (["epsilon"], "Give --population"),
        (["epsilon", "--rate=0.1"], "Give --noise_multiplier"),
        (["epsilon", "--rate=0.1", "--noise_multiplier=1"], "Give --steps"),
        (["epsilon", "--rate=2", "--noise_multiplier=1", "--steps=1"], "rate"),
        (["epsilon", "--rate=0.1", "--noise_multiplier=x", "--steps=1"], "numbers"),
        (["epsilon", "--rate=0.1", "--noise_multiplier=1", "--steps=1.5"], "whole"),
        (["epsilon", "--nonsense"], "nonsense"),
        ([*_PEOPLE], "Give --per_person"),
        ([*_PEOPLE, "--per_person=2"], "Give --batch_size"),
        ([*_PEOPLE, "--per_person=0", "--batch_size=5"], "--per_person"),
        ([*_PEOPLE, "--per_person=2.5", "--batch_size=5"], "--per_person"),
        ([*_PEOPLE, "--per_person=2", "--batch_size=2001"], "2000 examples"),
        ([*_PEOPLE, "--per_person=2", "--batch_size=0"], "--batch_size"),
        ([*_PEOPLE, "--people=30000", "--per_person=2", "--batch_size=5"], "--people"),
        ([*_PEOPLE, "--per_person=2", "--batch_size=5", "--accountant=rdp"], "pld"),
        (["epsilon", "--rate=0.1", "--noise_multiplier=1", "--steps=1",
          "--delta=1"], "delta"),
    ],
)  # fmt: skip
def test_errors_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as info:
        _run(capsys, *arguments)
    assert info.value.code == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


# Whole commands, with every way to say a thing.
_ANSWERED = {
    "epsilon": [
        {"noise_multiplier": "2", "steps": "20", "rate": "0.02"},
        {"noise_multiplier": "2", "epochs": "3", "rate": "0.02"},
        {"noise_multiplier": "2", "steps": "20", "batch_size": "10",
         "population": "1000"},
        {"noise_multiplier": "2", "epochs": "3", "batch_size": "10",
         "population": "1000", "sampling": "fixed_size"},
        {"noise_multiplier": "2", "steps": "20", "sampling": "full"},
    ],
    "noise": [
        {"epsilon": "3", "steps": "20", "rate": "0.02"},
        {"epsilon": "3", "epochs": "3", "batch_size": "10", "population": "1000",
         "sampling": "shuffled"},
    ],
    "steps": [
        {"epsilon": "3", "noise_multiplier": "2", "rate": "0.02"},
        {"epsilon": "3", "noise_multiplier": "2", "batch_size": "10",
         "population": "1000", "sampling": "with_replacement"},
    ],
    "people": [
        {"epsilon": "3", "steps": "20", "people": "100", "population": "1000",
         "per_person": "2", "batch_size": "10"},
    ],
    "past_run": [
        {"noise_multiplier": "2", "epochs": "3", "batch_size": "10",
         "population": "1000"},
    ],
}  # fmt: skip
_VALUES = {
    "noise_multiplier": ["1.3", "2.5", "1.3,2.5"],
    "epsilon": ["1.5", "4"],
    "steps": ["30", "40"],
    "epochs": ["2", "5"],
    "rate": ["0.03", "0.05"],
    "batch_size": ["15", "25"],
    "population": ["150", "1500", "2500"],
    "per_person": ["3", "5"],
    "people": ["150", "250"],
    "delta": ["1e-4", "1e-6"],
    "sampling": ["poisson", "fixed_size", "with_replacement", "shuffled", "full"],
    "accountant": ["pld", "rdp", "gdp"],
    "unit": ["example", "client", "batch", "group"],
}


class _Asked:
    """Replaces the accountants by hashes of their questions.

    Two questions that no accountant can tell apart get the same hash, so the answer
    changes if and only if the accounted mechanism does.
    """

    def __init__(self, monkeypatch, capsys):
        self._capsys, self._answers = capsys, {}
        for name in ("epsilon", "noise_multiplier", "steps_for"):
            monkeypatch.setattr(command.accounting, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(command.accounting, "past_run", self._past_run)

    @staticmethod
    def _number(scheme, z, steps, unit, *rest):
        event = scheme.event(z, steps, unit=unit)
        # Zero would be no answer, and below 10^6 a float prints all digits.
        return 1 + zlib.crc32(repr((event, rest)).encode()) % 899_999

    def _epsilon(self, z, steps, sampling, *, unit, **rest):
        return self._number(sampling, z, steps, unit, rest)

    def _noise_multiplier(self, *, epsilon, steps, sampling, unit, **rest):
        rest["epsilon"] = epsilon
        return self._number(sampling, 1.0, steps, unit, rest)

    def _steps_for(self, *, epsilon, noise_multiplier, sampling, unit,
                   **rest):  # fmt: skip
        rest["epsilon"] = epsilon
        return self._number(sampling, noise_multiplier, 7, unit, rest)

    @staticmethod
    def _past_run(*settings):
        return zlib.crc32(repr(settings).encode())

    def __call__(self, question, flags):
        """The command's answer; None if it refuses the flags."""
        key = question, *sorted(flags.items())
        if key not in self._answers:
            words = [f"--{name}={value}" for name, value in flags.items()]
            try:
                text = _run(self._capsys, question, *words)
                # The text below the table repeats the flags; but the unit is part of
                # the answer, even where each unit costs the same.
                unit = re.search("unit clipped: .*", text)[0]
                table = text.split("\n\n")[0]
                self._answers[key] = table, unit
            except SystemExit:
                assert "Traceback" not in self._capsys.readouterr().err
                self._answers[key] = None
        return self._answers[key]


@pytest.mark.parametrize("question", sorted(_ANSWERED))
@pytest.mark.thinned(5)
def test_every_flag_changes_the_answer_or_is_refused(question, monkeypatch, capsys):
    """Whole commands, to which any two flags are added, or whose values change."""
    assert set(_VALUES) == set(command._FLAGS) - set(command._command_flags.ALIASES)
    asked, answered = _Asked(monkeypatch, capsys), 0
    for base in _ANSWERED[question]:
        assert asked(question, base) is not None, base
        for a, b in itertools.combinations(_VALUES, 2):
            for pair in itertools.product(_VALUES[a], _VALUES[b]):
                flags = {**base, a: pair[0], b: pair[1]}
                answer = asked(question, flags)
                if answer is None:
                    continue
                answered += 1
                for name in flags:
                    others = [
                        asked(question, {**flags, name: value})
                        for value in _VALUES[name]
                        if value != flags[name]
                    ]
                    assert any(other != answer for other in others), (
                        f"{question} {flags}: --{name} changes nothing"
                    )
    assert answered > 20


@pytest.mark.parametrize("question", _ANSWERED)
def test_a_flag_without_effect_is_an_error_that_names_it(question, monkeypatch, capsys):
    _Asked(monkeypatch, capsys)
    for base in _ANSWERED[question]:
        for name in set(_VALUES) - set(base) - {"delta", "accountant"}:
            flags = {**base, name: _VALUES[name][-1]}
            words = [f"--{name}={value}" for name, value in flags.items()]
            with contextlib.suppress(SystemExit):
                _run(capsys, question, *words)
                continue
            error = capsys.readouterr().err
            assert f"--{name}" in error, error
            assert error.count("\n") == 1 and len(error.split()) < 60


def test_a_past_run_of_fit_gets_both_answers(capsys):
    """`fit` of arrays shuffles; what was published counted Poisson draws."""
    words = "--N=60000", "--batch_size=256", "--epochs=20", "--noise_multiplier=1.1"
    text = _run(capsys, "past_run", *words)
    run = accounting.past_run(60_000, 256, 20, 1.1, 1e-5, False)
    assert f"batch size 256, 20 epochs, noise 1.1: {run}" in text
    for part in (f"epsilon {run.shuffled:.3g}", f"{run.poisson:.3g} for adding"):
        assert part in text


@pytest.mark.parametrize("flag", ["examples=1000", "N=1000"])
def test_flags_have_the_names_of_the_arguments_of_plans(flag, capsys):
    words = "--batch_size=10", "--steps=20"
    plain = _run(capsys, "epsilon", *words, "--population=1000", "--noise_multiplier=2")
    assert _run(capsys, "epsilon", *words, f"--{flag}", "--noise=2") == plain


@pytest.mark.parametrize(
    "words, meant",
    [
        (["epsilo"], "Did you mean epsilon?"),
        (["pastrun"], "Did you mean past_run?"),
        (["epsilon", "--exampels=10"], "Did you mean: examples"),
        (["epsilon", "--noise_multiplyer=1"], "Did you mean: noise_multiplier"),
        (["epsilon", "--population=10", "--examples=20"], "given twice"),
        (["past_run", "--used_microbatching"], "of several examples, write --unit=b"),
        (["past_run", "--noused_microbatching"], "Leave the flag out if every example"),
        (["past_run", "--used_microbatching=false"], "Leave the flag out"),
        (["epsilon", "--num_microbatches=4"], "write --unit=batch"),
        (["epsilon", "--l2_norm_clip=1"], "is noise over the clip norm"),
        (["past_run", "--max_examples_per_user=2"], "`people --per_person=8`"),
    ],
)
def test_a_misspelled_word_is_told_the_word(words, meant, capsys):
    with pytest.raises(SystemExit):
        _run(capsys, *words)
    assert meant in capsys.readouterr().err


def test_a_flag_that_is_given_twice_is_refused(capsys):
    base = ["epsilon", "--noise_multiplier=1", "--rate=0.1"]
    for twice in (
        ["--steps=1", "--steps=2"],
        ["--steps", "1", "-steps=1"],
        ["--steps=1", "--delta=1e-5", "--delta=1e-6"],
    ):
        with pytest.raises(SystemExit):
            _run(capsys, *base, *twice)
        assert "is given twice" in capsys.readouterr().err


def test_a_rate_does_not_hide_a_batch_size(capsys):
    """An earlier version printed 2.85; the batch size had 15.6."""
    with pytest.raises(SystemExit):
        _run(capsys, "epsilon", "--noise_multiplier=1", "--steps=1000", "--rate=0.01",
             "--batch_size=5000", "--population=60000")  # fmt: skip
    error = capsys.readouterr().err
    assert "--rate and --batch_size contradict each other" in error


@pytest.mark.slow
def test_runs_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "tfdpclip.accounting", "epsilon",
         "--noise_multiplier=1", "--steps=10", "--rate=0.1"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "epsilon" in result.stdout
    shown = subprocess.run(
        [sys.executable, "-m", "tfdpclip.accounting", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "--noise_multiplier" in shown.stdout


def test_a_reader_that_stops_ends_the_program_without_a_traceback():
    command = f"{sys.executable} -u -m tfdpclip.accounting --help"
    process = subprocess.Popen(
        command.split(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()  # Before the program writes.
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() != 0


def test_accounting_imports_little_beyond_dp_accounting():
    # dp_accounting alone takes 0.4 s to import.
    code = (
        "import sys, dp_accounting, absl.app, absl.flags\n"
        "before = set(sys.modules)\n"
        "import tfdpclip.accounting.__main__, tfdpclip.sampling\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "new -= {'tfdpclip', *sys.stdlib_module_names}\n"
        "assert not new, new\n"
        "tfdpclip.accounting.epsilon(1.0, 10, tfdpclip.sampling.Poisson(0.1), 1e-5)\n"
        "ledger = tfdpclip.accounting.Ledger(1e-5)\n"
        "scheme = tfdpclip.sampling.Poisson(0.1)\n"
        "ledger.begin(noise_multiplier=1.0, sampling=scheme, clip=0.5)\n"
        "assert ledger.phases[0].clip == '0.5'\n"
        "assert not {'tensorflow', 'matplotlib', 'pandas'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
