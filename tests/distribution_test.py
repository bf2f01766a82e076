"""The published package: source distribution, metadata, citation and reporting."""

from __future__ import annotations

import email
import email.message
import pathlib
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile

import pytest
from packaging.requirements import Requirement

from tests import source_tree
from tests.packaging_test import copy_repository

ROOT = source_tree.ROOT
VERSION = runpy.run_path(str(ROOT / "tfdpclip" / "_version.py"))["__version__"]
# The files that setuptools adds to those in MANIFEST.in.
BESIDE_MODULES = {
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "MANIFEST.in",
    "PKG-INFO",
    "README.md",
    "SECURITY.md",
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
    "tfdpclip/py.typed",
}


def installed_modules() -> set[str]:
    return {
        path
        for path in source_tree.find_modules().values()
        if path.split("/")[0] in source_tree.INSTALLED
    }


def run(*command: str, directory: pathlib.Path) -> None:
    result = subprocess.run(
        [sys.executable, *command], cwd=directory, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> pathlib.Path:
    """The source distribution, built as `python -m build --sdist` does."""
    directory = tmp_path_factory.mktemp("sdist")
    copy_repository(directory / "source")
    code = f"from setuptools import build_meta as b; b.build_sdist({str(directory)!r})"
    run("-c", code, directory=directory / "source")
    (path,) = directory.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> pathlib.Path:
    """The wheel that is made of the source distribution alone."""
    directory = tmp_path_factory.mktemp("wheel")
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--wheel-dir", str(directory), str(sdist)]
    run(*command, directory=directory)
    (path,) = directory.iterdir()
    return path


def metadata_of(wheel: pathlib.Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_source_distribution_has_the_package_and_nothing_else(sdist):
    assert sdist.name == f"tfdpclip-{VERSION}.tar.gz"
    with tarfile.open(sdist) as archive:
        paths = [m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()]
    made = {path for path in paths if "egg-info/" in path}
    assert set(paths) - made == installed_modules() | BESIDE_MODULES


@pytest.mark.slow
def test_the_source_distribution_suffices_for_the_wheel(wheel):
    assert wheel.name == f"tfdpclip-{VERSION}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    described = {name for name in names if ".dist-info/" in name}
    assert names - described == installed_modules() | {"tfdpclip/py.typed"}
    assert {name.partition(".dist-info/")[2] for name in described} >= {
        "METADATA",
        "RECORD",
        "WHEEL",
    }


def test_metadata_is_complete(wheel):
    metadata = metadata_of(wheel)
    once = "Name Version Summary Author Keywords Requires-Python".split()
    for name in (*once, "Description-Content-Type"):
        assert len(metadata.get_all(name, [])) == 1, name
    assert metadata["Version"] == VERSION
    licence = metadata["License"] or metadata["License-Expression"]
    assert licence == "Apache-2.0"
    assert len(metadata["Summary"]) < 100 and "\n" not in metadata["Summary"]
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    for line in metadata.get_all("Requires-Dist"):
        assert Requirement(line)
    # No host or person is named here: a publisher adds an address.
    assert not metadata.get_all("Project-URL") and "Author-email" not in metadata


def test_what_is_shown_where_it_is_listed_has_no_dead_links(wheel):
    text = metadata_of(wheel).get_payload(decode=True).decode().strip()
    readme = (ROOT / "README.md").read_text().strip()
    assert len(re.findall(r"\]\(", readme)) > 20
    for target in re.findall(r"\]\(([^)]*)\)", text):
        assert target.startswith("https://"), target
    # Code and words are unchanged.
    fences = re.compile(r"^```.*?^```", re.S | re.M)
    assert fences.findall(text) == fences.findall(readme) != []
    bare = re.sub(r"\]\((?!https:)[^)]*\)", "]", fences.sub("", readme))
    assert re.findall(r"\w+", fences.sub("", text)) == re.findall(r"\w+", bare)


def test_the_version_is_in_one_place():
    said = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert said == [VERSION]
    places = [
        path
        for path in source_tree.find_modules().values()
        if path.startswith(source_tree.INSTALLED)
        and f'"{VERSION}"' in (ROOT / path).read_text()
    ]
    assert places == ["tfdpclip/_version.py"]


def test_all_four_papers_are_cited():
    cited = re.findall(
        r"^    title: (?:>-\n)?([^\n]*(?:\n      [^\n]*)*)\n    year: (\d+)",
        (ROOT / "CITATION.cff").read_text(),
        re.M,
    )
    page = " ".join((ROOT / "docs" / "papers.md").read_text().split())
    assert len(cited) == 4
    for title, year in cited:
        plain = " ".join(title.strip().strip('"').split())
        assert f"*{plain}* ({year})" in page, plain


def test_how_to_report_a_privacy_bug_is_said_without_an_address():
    text = (ROOT / "SECURITY.md").read_text()
    assert "private vulnerability report" in " ".join(text.split())
    assert "@" not in text
