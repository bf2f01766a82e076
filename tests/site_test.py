"""The documentation site, but for its building, which `make docs` does."""

from __future__ import annotations

import doctest
import re

import pytest

import tfdpclip
from tests import source_tree, stack
from tests.packaging_test import lines_of_pins, pins_for
from tools import site

pytestmark = pytest.mark.skipif(
    not stack.FEDERATED, reason="the reference has the federated half, too"
)
ROOT = source_tree.ROOT


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    """The reference's pages, by package."""
    return {package: site.reference_page(package) for package in site.PACKAGES}


def test_every_public_name_is_documented_once(reference):
    documented = re.findall(
        r"^\.\. auto(?:class|function):: (\S+)$", "\n".join(reference.values()), re.M
    )
    assert len(documented) == len(set(documented)) > 150
    for name, value in site.public_names().items():
        package = name.split(".")[1]
        if not site.is_documented_here(value):
            assert name.rpartition(".")[2] in reference[package]
            continue
        home = site.homes()[name]
        assert home in documented, name
        assert home == name or f"`{home}`" in reference[package], name


def test_every_name_at_the_top_level_has_a_home():
    placed = site.homes()
    for name in tfdpclip.__all__:
        assert name == "__version__" or f"tfdpclip.{name}" in placed, name


def test_every_public_package_is_in_the_reference():
    assert set(site.PACKAGES) == {
        n for n in tfdpclip.__all__ if n.islower() and n[0] != "_"
    }
    overview = site.overview_page()
    for package in site.PACKAGES:
        assert f":doc:`dpc.{package} <{package}>`" in overview


def test_a_public_method_without_a_docstring_is_an_error():
    class Wordless:
        """Says nothing of its method."""

        def method(self):
            pass

    Wordless.__module__ = "tfdpclip.made_up"
    with pytest.raises(ValueError, match="Wordless.method is public and has no doc"):
        site.members(Wordless)


def test_a_name_without_a_docstring_is_an_error():
    with pytest.raises(ValueError, match="tfdpclip.made_up is public and has no doc"):
        site._first_sentence("tfdpclip.made_up", lambda: None)


def test_methods_that_are_inherited_within_the_library_are_shown():
    shown = site.members(tfdpclip.keras.DPAdam)
    assert {"noise_multiplier", "clip_norm", "clip_state"} <= set(shown)
    # Keras documents these names.
    assert "update_step" not in shown and "learning_rate" not in shown
    # `map` is documented here although TensorFlow has it; `shuffle` is refused.
    assert "map" in site.members(tfdpclip.sampling.Batches)
    assert "shuffle" not in site.members(tfdpclip.sampling.Batches)


@pytest.mark.parametrize(
    "text, home",
    [
        ("dpc.keras.DPSGD", "tfdpclip.keras.DPSGD"),
        ("dpc.keras.film(model)", "tfdpclip.keras.film"),
        ("dpc.FixedClip(1.0, normalize=True)", "tfdpclip.clipping.FixedClip"),
        ("dpc.keras", "tfdpclip.keras"),
        ("dpc.keras.DPSGD or another", None),
        ("dpc.keras.NoSuchOptimizer", None),
        ("clip=dpc.FixedClip(1.0)", None),
    ],
)
def test_code_in_pages_leads_to_the_reference(text, home):
    assert site.find_home(text, site.homes()) == home


def test_examples_of_the_extension():
    result = doctest.testmod(site)
    assert result.attempted and not result.failed


def pages_without_blocks() -> dict[str, str]:
    """The text of each page, without its blocks of code."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    return {
        str(page): re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for page in pages
    }


@pytest.mark.parametrize(
    "word, parts",
    [
        ("CappedPoisson", ["Capped", "Poisson"]),
        ("multi_worker_strategy", ["multi_", "worker_", "strategy"]),
        ("__getitem__", ["__getitem__"]),
        ("plan.fit(x,y)", ["plan.", "fit(", "x,", "y)"]),
        ("clip=dpc.AutomaticClip()", ["clip=", "dpc.", "Automatic", "Clip()"]),
        ("PrivacyPlan(...)", ["Privacy", "Plan(...)"]),
        ("rate=0.1", ["rate=", "0.1"]),
        ("docs/pitfalls.md", ["docs/", "pitfalls.", "md"]),
        ("unit=&quot;batch&quot;", ["unit=", "&quot;batch&quot;"]),
        ("<span class='a.bC'>a.bC</span>", ["<span class='a.bC'>a.", "b", "C</span>"]),
    ],
)
def test_a_name_goes_on_in_the_next_line_between_its_words(word, parts):
    marked = site.mark_breaks(f"<p>a.bC <code>{word}</code> a.bC</p>")
    assert marked.startswith("<p>a.bC <code>") and marked.endswith("</code> a.bC</p>")
    shown = marked.removeprefix("<p>a.bC <code>").removesuffix("</code> a.bC</p>")
    assert re.split(r"<wbr[^>]*>", shown) == parts


def test_no_name_of_a_page_is_wider_than_a_telephone():
    # A line of a telephone holds 40 letters of code; wider names break at any letter.
    texts = [*pages_without_blocks().values(), "`" + "` `".join(site.homes()) + "`"]
    pieces = [
        piece
        for text in texts
        for word in " ".join(re.findall(r"`([^`]+)`", text)).split()
        for piece in site.BREAK.split(word)
    ]
    assert len(pieces) > 5000
    assert [piece for piece in pieces if len(piece) > 40] == []


def test_pictures_that_lead_somewhere_are_left_alone():
    once = site.link_pictures('<p><img alt="A" src="a.png" /></p>')
    assert once == '<p><a href="a.png"><img alt="A" src="a.png" /></a></p>'
    assert site.link_pictures(once) == once


def test_tables_of_pages_are_whole():
    # A row behind an empty line is shown as text.
    for page, text in pages_without_blocks().items():
        for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
            assert re.search(r"^\|[-:| ]+\|$", table, re.M), (page, table[:80])


def test_names_in_pages_are_names_of_the_library():
    missing = []
    for page, text in pages_without_blocks().items():
        for name in re.findall(r"`((?:dpc|tfdpclip)(?:\.\w+)+)", text):
            value = tfdpclip
            for part in name.split(".")[1:]:
                value = getattr(value, part, None)
            # docs/architecture.md says where a rule of the reader's own would be.
            if value is None and name != "dpc.YourClip":
                missing.append((page, name))
    assert not missing


def test_pages_of_the_root_lead_to_pages_of_the_site():
    for name in site.ROOT_PAGES:
        page = site.root_page(name, ROOT)
        pages = {ROOT / f"docs/project/{here}.md" for here in site.ROOT_PAGES.values()}
        for target in re.findall(r"\]\(([^)#:]+)[)#]", page):
            path = (ROOT / "docs/project" / target).resolve()
            assert path in pages or path.exists(), target


def test_what_the_site_needs_is_pinned_beside_the_stack():
    lines = lines_of_pins("requirements-docs.txt")
    assert len(lines) > 20
    for line in lines:
        assert re.match(r"[\w.-]+==\S+\s+--hash=sha256:[0-9a-f]{64}", line), line
    pins = pins_for("requirements-docs.txt", "3.11")
    assert {"sphinx", "myst-parser", "furo"} <= set(pins)
    stack_pins = pins_for("requirements.txt", "3.11")
    for name in set(pins) & set(stack_pins):
        assert pins[name] == stack_pins[name], name
