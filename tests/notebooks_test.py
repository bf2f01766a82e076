"""The notebooks run, and their files show a run's output."""

import ast
import re

import pytest

from tests import notebooks
from tests.docs_links_test import anchors

PATHS = notebooks.paths()
NAMES = [path.stem for path in PATHS]


def test_every_notebook_of_the_site_is_there():
    assert NAMES == ["federated", "lora", "mnist", "tabular"]
    for page in ("README.md", "docs/index.md"):
        assert "notebooks/" in (notebooks.ROOT / page).read_text()
    index = (notebooks.ROOT / "docs/index.md").read_text()
    for name in NAMES:
        assert f"notebooks/{name}.ipynb" in index
        assert f"\nnotebooks/{name}\n" in index


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_notebook_has_jupyters_format(path):
    notebook = notebooks.read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) and 10 <= len(ids) <= 40
    for cell in notebook["cells"]:
        assert re.fullmatch(r"[\w-]{1,64}", cell["id"])
        common = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert set(cell) == {*common, "execution_count", "outputs"}
        else:
            assert cell["cell_type"] == "markdown" and set(cell) == common
    assert notebooks.text_of(notebook["cells"][0]).startswith("# ")


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_outputs_belong_to_the_code(path):
    """If not: `python -m tests.notebooks NAME` runs the cells and writes the file."""
    notebook = notebooks.read(path)
    assert notebook["metadata"]["tfdpclip"]["outputs_of"] == notebooks.digest(notebook)
    cells = notebooks.code_cells(notebook)
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    assert any("attacks" in text for text in notebooks.recorded(notebook))


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_jupyter_shows_no_more_than_is_recorded(path):
    for cell in notebooks.code_cells(notebooks.read(path)):
        assert not notebooks.last_line_is_shown(cell), notebooks.text_of(cell)
        ast.parse(notebooks.text_of(cell))


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_links_lead_somewhere(path):
    cells = notebooks.read(path)["cells"]
    text = "\n".join(notebooks.text_of(c) for c in cells if c["cell_type"] != "code")
    links = re.findall(r"\]\(([^)#:\s]+)(?:#([\w-]+))?\)", text)
    assert links
    for target, anchor in links:
        page = (path.parent / target).resolve()
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), (target, anchor)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_run_prints_what_the_file_shows(path):
    notebook = notebooks.read(path)
    wanted = notebook["metadata"]["tfdpclip"]["stack"]
    if not notebooks.RUNS[wanted]:
        pytest.skip(f"the notebook is for another stack: {wanted}")
    shown = notebooks.recorded(notebook)
    found = notebooks.run(notebook)
    for number, (one, other) in enumerate(zip(shown, found, strict=True), 1):
        assert notebooks.without_chance(one) == notebooks.without_chance(other), number
