"""How many lines the user of README's program trusts, as docs/kernel.md says."""

import os
import re
import subprocess
import sys

import pytest

from tests import source_tree
from tests.kernel import trusted_lines

# Of lines that run. Seven rows of the page's table, and the goal.
MOST = 3500


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""A docstring."""\n\n# A comment.\nx = (1,\n     2)\n', {4, 5}),
        ('def f():\n    """A\n    docstring."""\n    return 1\n', {1, 4}),
        ("", set()),
    ],
)
def test_lines_of_code_are_no_comments_and_no_docstrings(source, lines):
    assert trusted_lines.code_lines(source) == lines


def test_a_statement_counts_as_a_whole(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("x = [\n    1,\n]\nif x:\n    y = 2\nelse:\n    y = 3\n")
    assert trusted_lines.count(str(path), {1, 4, 5}) == (5, 7)


@pytest.mark.slow
def test_readme_trusts_as_many_lines_as_the_page_says(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(source_tree.ROOT)}
    printed = subprocess.run(
        [sys.executable, "-m", "tests.kernel.trusted_lines"],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=500,
    ).stdout
    rows = re.findall(r"^(.+)\t(\d+)\t(\d+)$", printed, re.MULTILINE)
    assert len(rows) == len(trusted_lines.rows()) + 1
    page = (source_tree.ROOT / "docs" / "kernel.md").read_text(encoding="utf-8")
    for promise, ran, code in rows[:-1]:
        _, cells = page.split(f"| {promise} |")
        numbers = re.findall(r"\| ([\d,]+) (?=\|)", cells)
        said = [int(number.replace(",", "")) for number in numbers]
        assert said[:2] == [pytest.approx(int(n), rel=0.05) for n in (code, ran)]
    assert int(rows[-1][1]) <= MOST
