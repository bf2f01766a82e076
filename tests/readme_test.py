"""The code that README.md and docs/ show works."""

import gc
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests import stack

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
INDEX = ROOT / "docs" / "tutorials" / "index.md"


PAGES = sorted((ROOT / "docs").glob("*.md"))
# Each is trained from top to bottom. `make docs` lists them in their index.
TUTORIALS = sorted({*(ROOT / "docs" / "tutorials").glob("*.md")} - {INDEX})
# Of these `make test` has none: CI runs them with its part of the slow tests, always.
SLOW = {
    *("audit", "choose", "clipping", "correlated_noise", "data", "federated"),
    *("federated_plays", "fine_tuning", "mnist", "plan", "search_cost", "testing"),
    *("transfer", "csv"),
}
# Settings to make before TensorFlow is imported, as the page says: TensorFlow counts
# memory with oneDNN only, which is its default on some processors.
OWN_PROCESS = {"plan": {"TF_ENABLE_ONEDNN_OPTS": "1"}}


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def python_blocks(text=README):
    """The blocks of `text` that the installed stack can run."""
    names = r"federated|tff|aggregators?"
    return [
        block
        for block in blocks("python", text)
        if stack.FEDERATED or not re.search(rf"\b({names})\b", block)
    ]


def test_the_first_block_is_short():
    code = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert 5 <= len(code) <= 10


def test_python_blocks_run_in_order(capsys):
    names: dict = {}
    for block in python_blocks():
        exec(compile(block, "README.md", "exec"), names)
    assert int(names["model"].optimizer.iterations) == names["plan"].steps == 520
    printed = capsys.readouterr().out.splitlines()
    index = (ROOT / "docs" / "index.md").read_text()
    assert blocks("python", index)[0] == blocks("python")[0]
    shown = [line for line in blocks("text", index)[0].splitlines() if line != "  ..."]
    assert len(shown) > 6 and set(shown) <= set(printed)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow) if page.stem in SLOW else page
        for page in (*PAGES, *TUTORIALS)
    ],
    ids=lambda page: page.name,
)
def test_python_blocks_of_docs_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    assert blocks("python", text)
    if page.stem in OWN_PROCESS:
        code = "\n\n".join(python_blocks(text))
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **OWN_PROCESS[page.stem]},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return
    names: dict = {}
    for block in python_blocks(text):
        # A step of data that were not drawn is refused while an unused draw is alive.
        gc.collect()
        exec(compile(block, page.name, "exec"), names)


def test_links_between_pages_lead_somewhere():
    for page in (*sorted(ROOT.glob("*.md")), *PAGES, INDEX, *TUTORIALS):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


@pytest.mark.parametrize(
    "command",
    [
        line
        for text in (README, *(page.read_text() for page in (*PAGES, *TUTORIALS)))
        for block in blocks("console", text)
        for line in block.splitlines()
    ],
)
def test_commands_run(command):
    words = shlex.split(command)
    if words[0] == "make":
        # CI runs these targets themselves; here, that they exist.
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{words[1]}:", makefile, re.M)
        return
    assert words[0] == "python"
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "accountant: pld" in done.stdout


def test_contributing_names_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    goals = re.findall(r"(?:^|`)make ([\w-]+)", text, re.M)
    paths = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)", text)
    paths += re.findall(r"\b(tests/\w+(?:\.py)?)\b", text)
    assert len(goals) > 5 and len(paths) > 8
    for goal in goals:
        assert re.search(rf"^{goal}:", makefile, re.M), goal
    for path in paths:
        assert (ROOT / path).exists(), path


def test_every_private_name_in_the_table_exists():
    import tfdpclip as dpc

    text = "\n".join([README, *(page.read_text() for page in (*PAGES, *TUTORIALS))])
    table = "\n".join(line for line in text.splitlines() if line.startswith("| "))
    found = re.findall(r"dpc\.([a-zA-Z_.]*[a-zA-Z_])", table)
    assert found
    for name in found:
        if name.startswith("federated") and not stack.FEDERATED:
            continue
        value = dpc
        for part in name.split("."):
            value = getattr(value, part)
