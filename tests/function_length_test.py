"""A function is short: CONTRIBUTING.md says how short, and why."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
LONGEST = 80  # lines of a body, without the docstring


def measure_bodies(code):
    """Yields the name and the number of body lines of every function in `code`."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[ast.get_docstring(node) is not None :]
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            yield node.name, lines


def find_long_functions(root=ROOT / "tfdpclip"):
    """The functions under `root` with more than LONGEST lines, as `file:name`."""
    return {
        f"{path.relative_to(root).as_posix()}:{name}"
        for path in sorted(root.rglob("*.py"))
        for name, lines in measure_bodies(path.read_text())
        if lines > LONGEST
    }


def test_functions_of_the_library_are_short():
    assert not find_long_functions()


@pytest.mark.parametrize("lines, found", [(LONGEST, 0), (LONGEST + 1, 1)])
def test_a_docstring_does_not_count_and_every_other_line_does(lines, found, tmp_path):
    docstring = '    """A long text.\n' + "\n" * 50 + '    """\n'
    code = "def f():\n" + docstring + "    pass\n" * lines
    (tmp_path / "module.py").write_text(code)
    assert len(find_long_functions(tmp_path)) == found
