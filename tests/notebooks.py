"""Runs the notebooks of docs/notebooks, and writes the printed outputs into them.

`python -m tests.notebooks` runs all notebooks of the installed stack in place; `python
-m tests.notebooks tabular` runs a single notebook. The cells run in order in a shared
namespace, without Jupyter. A file has the digest of the code that its outputs belong
to, so that a fast test finds a cell that was changed and not run.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import sys
import tempfile
from typing import Any

from tests import stack

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "notebooks"
#: The stacks on which a notebook runs, by the word in its metadata.
RUNS = {
    "any": True,
    "keras_hub": stack.KERAS_3 and importlib.util.find_spec("keras_hub") is not None,
    "federated": stack.FEDERATED,
}


def paths() -> list[pathlib.Path]:
    """The files of all notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: pathlib.Path) -> dict[str, Any]:
    """The contents of a notebook's file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: pathlib.Path, notebook: dict[str, Any]) -> None:
    """Writes a notebook in the format of Jupyter, version 4.5."""
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def text_of(cell: dict[str, Any]) -> str:
    """The source of a cell."""
    return "".join(cell["source"])


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of code, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: dict[str, Any]) -> str:
    """A hash of the code of all cells.

    >>> cell = {"cell_type": "code", "source": ["1 + 1"]}
    >>> digest({"cells": [cell]}) == digest({"cells": [{**cell, "id": "a"}]})
    True
    """
    sources = [text_of(cell) for cell in code_cells(notebook)]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]


def run(notebook: dict[str, Any]) -> list[str]:
    """Runs all cells of code in a shared namespace, in an empty folder.

    Returns:
      For each cell, the text that the cell prints.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as at_end:
        at_end.callback(os.chdir, before)
        os.chdir(folder)
        for number, cell in enumerate(code_cells(notebook), 1):
            code = compile(text_of(cell), f"cell {number}", "exec")
            # A file, because TensorFlow Federated gives it to its worker process.
            with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
                with contextlib.redirect_stdout(output):
                    exec(code, names)
                output.seek(0)
                printed.append(output.read())
    return printed


def recorded(notebook: dict[str, Any]) -> list[str]:
    """For each cell of code, the text in its outputs."""
    return [
        "".join(line for output in cell["outputs"] for line in output["text"])
        for cell in code_cells(notebook)
    ]


def record(notebook: dict[str, Any], printed: list[str]) -> None:
    """Puts the texts that `run` returned into the cells."""
    cells = code_cells(notebook)
    for number, (cell, text) in enumerate(zip(cells, printed, strict=True), 1):
        cell["execution_count"] = number
        lines = text.splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell["outputs"] = [stream] if text else []
    notebook["metadata"]["tfdpclip"]["outputs_of"] = digest(notebook)


def without_chance(text: str) -> list[str]:
    """The lines of a text, without the numbers that differ between private runs.

    Noise is never the same twice. A line with an epsilon keeps its numbers, because
    the accounting has no noise.

    >>> without_chance("epsilon 2.5 spent\\naccuracy  0.81 of [1e-3]\\n")
    ['epsilon 2.5 spent', 'accuracy # of [#]']

    A comma or a point after a number is text: 4.0 may be printed as 4.

    >>> without_chance("mean 4, of 1,222."), without_chance("mean 4.1, of 1.5.")
    (['mean #, of #.'], ['mean #, of #.'])
    """
    found = []
    for line in text.splitlines():
        if "epsilon" not in line.lower():
            line = re.sub(r"-?\d+(,\d{3})*(\.\d+)?(e[+-]?\d+)?", "#", line)
        found.append(" ".join(line.split()))
    return found


def last_line_is_shown(cell: dict[str, Any]) -> bool:
    """Whether Jupyter would show the value of the last line, which `run` does not.

    >>> last_line_is_shown({"source": ["x = 1\\n", "x"]})
    True
    >>> last_line_is_shown({"source": ["print(1)"]})
    False
    """
    body = ast.parse(text_of(cell)).body
    if not body or not isinstance(body[-1], ast.Expr):
        return False
    value = body[-1].value
    methods = "compile|fit|close|enter_context|write_text|summary|save_lora_weights"
    return not re.match(rf"(print|[\w.]+\.({methods}))\(", ast.unparse(value))


def main(names: list[str]) -> None:
    """Runs notebooks and writes their outputs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for path in paths():
        notebook = read(path)
        if names and path.stem not in names:
            continue
        if not RUNS[notebook["metadata"]["tfdpclip"]["stack"]]:
            print(f"{path.name}: not for this stack", file=sys.stderr)
            continue
        record(notebook, run(notebook))
        write(path, notebook)
        print(f"{path.name}: written", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
