"""Counts the lines of code of files that a program runs.

    python -m tests.kernel.trusted_lines

runs the program of README.md, and prints the number of lines that it ran for each row
of the table of docs/kernel.md, with the lines of code of the row's files.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import threading
import tokenize
from collections.abc import Iterator

from tests import source_tree

LIBRARY = source_tree.ROOT / "tfdpclip"
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_BLOCKS = (ast.FunctionDef, ast.ClassDef, ast.If, ast.For, ast.While, ast.With, ast.Try)


def rows() -> dict[str, list[str]]:
    """For each promise of docs/kernel.md, the files that it rests on."""
    page = (source_tree.ROOT / "docs" / "kernel.md").read_text(encoding="utf-8")
    _, table = page.split("| promise |")
    found = {}
    for line in table.split("\n\n")[0].splitlines():
        cells = line.split("|")
        globs = re.findall(r"`([\w/*]+\.py)`", "".join(cells[2:3]).split(";")[0])
        # Guards, which nobody has to trust, have no numbers.
        if globs and cells[3].strip():
            files = [path for glob in globs for path in LIBRARY.glob(glob)]
            assert len(files) >= len(globs), f"{globs} name no files"
            found[cells[1].strip()] = [str(path) for path in files]
    return found


def code_lines(source: str) -> set[int]:
    """The numbers of lines that are no blank line, comment or docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines -= set(range(first.lineno, first.end_lineno + 1))
    return lines


def statements(source: str) -> Iterator[range]:
    """The lines of each statement that contains no other."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and not isinstance(node, _BLOCKS):
            yield range(node.lineno, node.end_lineno + 1)


def run_readme() -> dict[str, set[int]]:
    """Runs the first program of README.md: the lines that ran, for each file."""
    ran: dict[str, set[int]] = {}

    def note(frame, event, argument):
        del event, argument
        ran[frame.f_code.co_filename].add(frame.f_lineno)
        return note

    def enter(frame, event, argument):
        name = frame.f_code.co_filename
        if not name.startswith(str(LIBRARY)):
            return None
        ran.setdefault(name, set())
        return note(frame, event, argument)

    text = (source_tree.ROOT / "README.md").read_text(encoding="utf-8")
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    threading.settrace(enter)
    sys.settrace(enter)
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})  # noqa: S102
    sys.settrace(None)
    threading.settrace(None)
    return ran


def count(path: str, ran: set[int]) -> tuple[int, int]:
    """How many lines of code of a file ran, statements as a whole, and all."""
    with open(path, encoding="utf-8") as file:
        source = file.read()
    whole = ran.union(*(s for s in statements(source) if ran.intersection(s)))
    code = code_lines(source)
    return len(code & whole), len(code)


def main() -> None:
    """Prints the table."""
    files, ran = rows(), run_readme()
    total = [0, 0]
    for promise, paths in files.items():
        counts = [count(path, ran.get(path, set())) for path in paths]
        sums = [sum(column) for column in zip(*counts, strict=True)]
        total = [a + b for a, b in zip(total, sums, strict=True)]
        print(promise, *sums, sep="\t")
    print("total", *total, sep="\t")


if __name__ == "__main__":
    main()
