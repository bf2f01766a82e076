"""BUILD has one right target for every module, and the check of that can fail."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from tools import build_file

ROOT = pathlib.Path(__file__).resolve().parents[1]

TREE = {
    "tfdpclip/__init__.py": "from tfdpclip.clipping import FixedClip\n",
    "tfdpclip/noise.py": "import numpy as np\n",
    "tfdpclip/clipping.py": "def f():\n    from tfdpclip import noise\n",
    "tfdpclip/keras/__init__.py": "from .optimizers import DPSGD\n",
    "tfdpclip/keras/optimizers.py": (
        "from typing import TYPE_CHECKING\n"
        "from .. import clipping, noise\n"
        "if TYPE_CHECKING:\n    from tfdpclip import keras\n"
    ),
    "keras_examples/digits.py": (
        "import tfdpclip as dpc\nif __name__ == '__main__':\n    pass\n"
    ),
    "tests/conftest.py": "",
    "tests/keras/optimizers_test.py": "import tfdpclip.keras.optimizers\n",
    "tools/pytest_main.py": "import pytest\nif __name__ == '__main__':\n    pass\n",
}


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """A small repository whose BUILD is right."""
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    targets = build_file.expected_targets(tmp_path)
    (tmp_path / "BUILD").write_text(build_file.render(targets))
    return tmp_path


def edit_build(tree: pathlib.Path, old: str, new: str) -> None:
    text = (tree / "BUILD").read_text()
    assert old in text
    (tree / "BUILD").write_text(text.replace(old, new, 1))


def test_build_is_complete_and_right():
    found = build_file.problems(ROOT)
    assert not found, "\n".join([*found, "Run `make BUILD`."])


def test_bazel_reads_build(tmp_path):
    bazel = shutil.which("bazel")
    if bazel is None:
        pytest.skip("bazel is not installed")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        # Without a server, which would outlive the test.
        command = [bazel, "--batch", f"--output_user_root={tmp_path}", *arguments]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=240
        )

    if run("help").returncode:
        pytest.skip("bazel does not start")
    # Not `deps(...)`: it would download the tools on which all rules depend.
    query = "//... union labels(srcs, //...) union labels(deps, //...)"
    result = run("query", "--noshow_progress", query)
    assert result.returncode == 0, result.stderr
    labels = {label.removeprefix("//:") for label in result.stdout.split()}
    paths = set(build_file.find_modules(ROOT).values())
    targets = {build_file.target_name(path) for path in paths} | {"project"}
    assert paths | targets <= labels
    # Bazel takes an unknown label for a file, without looking whether there is one.
    unknown = {label for label in labels - targets if not (ROOT / label).is_file()}
    assert not unknown


def test_targets_follow_the_imports(tree):
    targets = {target.name: target for target in build_file.expected_targets(tree)}
    assert len(targets) == len(TREE)
    assert targets["tfdpclip"].deps == ("tfdpclip/clipping",)
    assert targets["tfdpclip/noise"].deps == ()
    assert targets["tfdpclip/clipping"].deps == ("tfdpclip/noise",)
    assert targets["tfdpclip/keras"].deps == ("tfdpclip/keras/optimizers",)
    assert targets["tfdpclip/keras/optimizers"].deps == (
        "tfdpclip/clipping",
        "tfdpclip/noise",
    )
    assert targets["keras_examples/digits"].rule == "py_binary"
    test = targets["tests/keras/optimizers_test"]
    assert test.rule == "py_test"
    assert test.deps == ("tests/conftest", "tfdpclip/keras/optimizers")


def test_parsing_gives_back_what_was_rendered(tree):
    targets = build_file.expected_targets(tree)
    assert build_file.parse(build_file.render(targets)) == targets


def test_check_accepts_a_right_build(tree):
    assert build_file.problems(tree) == []


def test_check_finds_a_missing_build(tree):
    (tree / "BUILD").unlink()
    assert len(build_file.problems(tree)) == len(TREE)


def test_check_finds_a_module_without_target(tree):
    (tree / "tfdpclip" / "tuning.py").write_text("")
    assert build_file.problems(tree) == ["tfdpclip/tuning.py has no target."]


def test_check_finds_a_target_without_module(tree):
    (tree / "keras_examples" / "digits.py").unlink()
    assert build_file.problems(tree) == [
        "keras_examples/digits is a target without a module."
    ]


def test_check_finds_a_missing_dependency(tree):
    (tree / "tfdpclip" / "noise.py").write_text("import tools.pytest_main\n")
    assert build_file.problems(tree) == [
        "tfdpclip/noise imports tools/pytest_main without depending on it."
    ]


def test_check_finds_a_needless_dependency(tree):
    (tree / "tfdpclip" / "clipping.py").write_text("")
    assert build_file.problems(tree) == [
        "tfdpclip/clipping depends on tfdpclip/noise without importing it."
    ]


def test_check_finds_a_wrong_rule(tree):
    (tree / "keras_examples" / "digits.py").write_text("import tfdpclip\n")
    assert build_file.problems(tree) == [
        "keras_examples/digits should be a py_library, not a py_binary."
    ]


def test_check_finds_wrong_sources(tree):
    edit_build(tree, '["tfdpclip/noise.py"]', '["tfdpclip/clipping.py"]')
    assert build_file.problems(tree) == [
        "tfdpclip/noise should have the sources ['tfdpclip/noise.py']."
    ]


def test_check_finds_two_targets_of_one_name(tree):
    noise = build_file.Target("py_library", "tfdpclip/noise", ("tfdpclip/noise.py",))
    with (tree / "BUILD").open("a") as file:
        file.write(noise.render())
    assert build_file.problems(tree) == ["tfdpclip/noise has two targets."]


def test_check_finds_other_edits(tree):
    edit_build(tree, "visibility:public", "visibility:private")
    assert build_file.problems(tree) == [
        "The text of BUILD is not what `make BUILD` writes."
    ]


def test_check_finds_imports_in_a_ring(tree):
    (tree / "tfdpclip" / "noise.py").write_text("import tfdpclip.clipping\n")
    assert build_file.problems(tree)[-1] == (
        "These import each other in a ring: "
        "tfdpclip/clipping -> tfdpclip/noise -> tfdpclip/clipping."
    )


def test_check_finds_an_import_of_nothing(tree):
    (tree / "tfdpclip" / "noise.py").write_text("import tfdpclip.gone\n")
    assert build_file.problems(tree) == [
        "tfdpclip/noise.py imports tfdpclip.gone, which is in no file here."
    ]


def test_library_depends_on_no_driver():
    for target in build_file.expected_targets(ROOT):
        if target.name.split("/")[0] == "tfdpclip":
            outside = [dep for dep in target.deps if not dep.startswith("tfdpclip")]
            assert not outside, f"{target.name} imports {outside}"
