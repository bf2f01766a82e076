"""The generated part of the documentation site: the API reference and links.

`docs/conf.py` is a Sphinx configuration and calls the functions here. Each public
package gets a page, made from its `__all__` and the docstrings of its names; a public
name, or a public method of a public class, without a docstring is an error. Pages of
the repository's root (CHANGELOG.md and others) are included with corrected links. In
all pages, code such as `dpc.keras.DPSGD` becomes a link to the reference, long names
may go on in the next line, and a picture leads to its file. Notebooks are read as pages
in Markdown, with the outputs that their files hold.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

#: Public packages, in the order of the reference, with a line on each.
PACKAGES = {
    "keras": "Optimizers, callbacks and checks for Keras",
    "clipping": "Clip rules",
    "sampling": "Schemes that draw batches and cohorts, and state what that does",
    "accounting": "Epsilon, calibration, ledgers, statements",
    "correlated": "Matrices of correlated noise: what they cost, how it is made",
    "federated": "Aggregators for TensorFlow Federated",
    "tuning": "Clip norm, batch size and learning rate, and what choosing costs",
    "testing": "Tests of privacy for your own pipelines",
    "diagnostics": "Gradients of examples, without noise",
    "gradients": "Per-example norms and clipped sums; rules for ops",
}

#: Pages of the repository's root that the site has, and their names there.
ROOT_PAGES = {
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
}


def public_names() -> dict[str, Any]:
    """Every public name, such as ``tfdpclip.keras.DPSGD``, with its value.

    >>> "tfdpclip.tuning.run_grid" in public_names()
    True
    """
    names = {}
    for package in PACKAGES:
        module = importlib.import_module(f"tfdpclip.{package}")
        for name in module.__all__:
            names[f"tfdpclip.{package}.{name}"] = getattr(module, name)
    return names


def homes() -> dict[str, str]:
    """The place where the reference documents each public name.

    A name that is exported twice has a single place: `tfdpclip.FixedClip` is documented
    as `tfdpclip.clipping.FixedClip`.
    """
    first: dict[int, str] = {}
    found = {}
    for name, value in public_names().items():
        found[name] = first.setdefault(id(value), name)
    top = importlib.import_module("tfdpclip")
    for name in top.__all__:
        home = first.get(id(getattr(top, name)))
        if home is not None:
            found[f"tfdpclip.{name}"] = home
        elif name in PACKAGES:
            found[f"tfdpclip.{name}"] = f"tfdpclip.{name}"
    return found


def is_documented_here(value: Any) -> bool:
    """Whether a public name is this library's own, and not another's passed on."""
    return inspect.getmodule(value).__name__.split(".")[0] == "tfdpclip"


def members(value: Any) -> list[str]:
    """The public methods and properties of a class that its reference shows.

    They are those that this library writes, inherited or not, except overrides of Keras
    or TensorFlow without a docstring.

    Raises:
      ValueError: if a method or property has no docstring.
    """
    if not inspect.isclass(value) or issubclass(value, BaseException):
        return []
    shown = []
    for name in dir(value):
        owners = [c for c in value.__mro__ if name in vars(c)]
        if name.startswith("_") or not owners or not _is_ours(owners[0]):
            continue
        found = inspect.getattr_static(value, name)
        is_code = isinstance(found, (property, classmethod, staticmethod))
        if not is_code and not inspect.isfunction(found):
            continue
        # Overrides that mean the same as in Keras or TensorFlow need no docstring.
        is_theirs = any(not _is_ours(owner) for owner in owners)
        if found.__doc__ or not is_theirs and inspect.getdoc(getattr(value, name)):
            shown.append(name)
        elif not is_theirs:
            raise ValueError(
                f"{value.__module__}.{value.__qualname__}.{name} is public and has no "
                "docstring; write one, or begin its name with an underscore."
            )
    return shown


def _is_ours(owner: type) -> bool:
    return owner.__module__.split(".")[0] == "tfdpclip"


def reference_page(package: str) -> str:
    """The reference of a public package, in reStructuredText.

    Raises:
      ValueError: if a public name of the package has no docstring.
    """
    module = importlib.import_module(f"tfdpclip.{package}")
    title = f"dpc.{package}"
    summary, bodies = [], []
    placed = homes()
    before: list[type] = []
    for name in module.__all__:
        value, full = getattr(module, name), f"tfdpclip.{package}.{name}"
        home = placed[full]
        if home != full:
            summary.append((f"`{home}`", f"The same as `{home}`."))
        elif not is_documented_here(value):
            owner = inspect.getmodule(value).__name__.split(".")[0]
            summary.append((f"``{name}``", f"From ``{owner}``, which documents it."))
        else:
            first = _first_sentence(full, value)
            summary.append((f":py:obj:`{name} <{full}>`", first))
            bodies.append(_directive(full, value, before))
            before += [value] if inspect.isclass(value) else []
    lines = [title, "=" * len(title), "", f".. automodule:: tfdpclip.{package}", ""]
    lines += [".. list-table::", "   :class: names", "   :widths: 35 65", ""]
    for left, right in summary:
        lines += [f"   * - {left}", f"     - {right}"]
    return "\n".join([*lines, "", *bodies])


def _first_sentence(full: str, value: Any) -> str:
    text = inspect.getdoc(value)
    if not text:
        raise ValueError(f"{full} is public and has no docstring; write one.")
    return _without_bars(" ".join(text.split("\n\n")[0].split()))


def _directive(full: str, value: Any, before: list[type]) -> str:
    """The directive that documents a name, without members of earlier classes."""
    if not inspect.isclass(value):
        return f".. autofunction:: {full}\n"
    lines = [f".. autoclass:: {full}"]
    if issubclass(value, enum.Enum):
        lines += ["   :members:", "   :undoc-members:"]
        return "\n".join([*lines, ""])
    shown = members(value)
    for other in before:
        new = [name for name in shown if not _has_same(other, value, name)]
        if 2 * len(new) < len(shown):
            lines += [f"   :members: {', '.join(new)}"] if new else []
            same = f"   What is not here is as in `tfdpclip.{full.split('.')[1]}."
            return "\n".join([*lines, "", f"{same}{other.__name__}`.", ""])
    lines += [f"   :members: {', '.join(shown)}"] if shown else []
    return "\n".join([*lines, ""])


def _has_same(other: type, value: type, name: str) -> bool:
    """Whether two classes have the very same method or property."""
    return inspect.getattr_static(other, name, None) is inspect.getattr_static(
        value, name
    )


def overview_page() -> str:
    """The reference's first page: the packages, and the names of the top level."""
    top = importlib.import_module("tfdpclip")
    placed = homes()
    short = [
        f":py:obj:`dpc.{name} <{placed[f'tfdpclip.{name}']}>`"
        for name in top.__all__
        if name[0].isupper()
    ]
    lines = ["API reference", "=============", ""]
    lines += ["``import tfdpclip as dpc`` is the documented spelling: in examples,"]
    lines += ["``dpc.keras.DPSGD`` is `tfdpclip.keras.DPSGD`.", ""]
    lines += [".. list-table::", "   :widths: 25 75", ""]
    for package, line in PACKAGES.items():
        lines += [f"   * - :doc:`dpc.{package} <{package}>`", f"     - {line}"]
    lines += ["", "At the top level are also " + ", ".join(short) + ".", ""]
    lines += [".. toctree::", "   :hidden:", ""]
    return "\n".join([*lines, *(f"   {package}" for package in PACKAGES), ""])


def root_page(name: str, root: pathlib.Path) -> str:
    """A page of the repository's root, with its links as they are from docs/project."""
    text = (root / name).read_text(encoding="utf-8").replace("](docs/", "](../")
    for other, here in ROOT_PAGES.items():
        text = text.replace(f"]({other}", f"]({here}.md")
    return text


def write_pages(docs: pathlib.Path) -> None:
    """Writes docs/reference and docs/project, which are not under version control."""
    pages = {"reference/index.rst": overview_page()}
    pages |= {f"reference/{name}.rst": reference_page(name) for name in PACKAGES}
    for name, here in ROOT_PAGES.items():
        pages[f"project/{here}.md"] = root_page(name, docs.parent)
    for name, text in pages.items():
        path = docs / name
        path.parent.mkdir(exist_ok=True)
        # An unchanged file keeps its date, so that Sphinx reads only changed files.
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def notebook_page(text: str) -> str:
    """A notebook's file as a page in Markdown: texts, code, and printed outputs.

    >>> code = {"cell_type": "code", "source": ["print(1)"], "outputs": [
    ...     {"output_type": "stream", "text": ["1\\n"]}]}
    >>> print(notebook_page(json.dumps({"cells": [code]})))
    ```python
    print(1)
    ```
    <BLANKLINE>
    ````text
    1
    ````
    """
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output["text"]) for output in cell["outputs"])
        if printed:
            parts.append(f"````text\n{printed.rstrip()}\n````")
    return "\n\n".join(parts)


def find_home(text: str, placed: dict[str, str]) -> str | None:
    """The home of the public name or method that code in a page names.

    >>> find_home("dpc.FixedClip(1.0)", homes())
    'tfdpclip.clipping.FixedClip'
    """
    match = re.fullmatch(r"(?:dpc|tfdpclip)((?:\.\w+)+)(?:\(.*\))?", text, re.S)
    return placed.get(f"tfdpclip{match[1]}") if match else None


def as_rst(lines: list[str]) -> list[str]:
    """A docstring's tables, code and bars, which are Markdown's, as Sphinx wants them.

    >>> as_rst(["| a | b |", "| --- | --- |", "| `c` | d |"])[4:8]
    ['   * - a', '     - b', '   * - `c`', '     - d']
    >>> as_rst(["Of |g|, `|g|`:", "", "    code = |g|"])
    ['Of \\\\|g\\\\|, `|g|`:', '', '::', '', '    code = |g|']
    >>> as_rst(["noise_multiplier: z.", "z.", "fits: a word."])
    ['noise_multiplier: z\\\\.', 'z.', 'fits: a word.']
    """
    done: list[str] = []
    in_table = in_code = False
    for line in lines:
        indent, cells = re.match(r"( *)(.*)", line).groups()
        in_code = in_code and (not cells or len(indent) >= 4)
        if cells.startswith("| ") and cells.endswith(" |"):
            if not in_table:
                done += ["", f"{indent}.. list-table::", f"{indent}   :header-rows: 1"]
                done.append("")
            in_table = True
            if not set(cells) <= set("| -:"):
                first, *others = (cell.strip() for cell in cells[1:-1].split(" | "))
                done.append(f"{indent}   * - {first}")
                done += [f"{indent}     - {cell}" for cell in others]
            continue
        if in_table:
            done.append("")
        in_table = False
        above = next((text for text in reversed(done) if text), "")
        if len(indent) >= 4 and done and not done[-1] and above[:1] not in " *":
            done += [] if in_code else ["::", ""]
            in_code = True
        if not in_code and not cells.startswith((">>>", "...")):
            # For Sphinx, `z.` at the beginning would be the 26th item of a list.
            line = re.sub(r"^( *\w+: \w)\.", r"\1\.", _without_bars(line))
        done.append(line)
    return done


def _without_bars(line: str) -> str:
    """The line with the bars escaped that are in no backticks."""
    parts = re.split(r"(`+[^`]*`+)", line)
    parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
    return "".join(parts)


#: Where a name may go on in the next line: after a sign, or before a capital letter.
BREAK = re.compile(
    r"(?<=[A-Za-z0-9][._/])(?=[A-Za-z])|(?<=[(\[=,])(?=[^\s).,=])|(?<=[a-z0-9])(?=[A-Z])"
)
#: Shorter words of code are broken on telephones alone.
LONG = 24


def mark_breaks(html: str) -> str:
    """The text of a page with a mark wherever a word of its code may be broken.

    Without marks, a browser breaks a word that is too long for its column between any
    two letters.

    >>> mark_breaks("<p>a.b <code>tf.keras.layers.GroupNormalization()</code></p>")
    '<p>a.b <code>tf.<wbr>keras.<wbr>layers.<wbr>Group<wbr>Normalization()</code></p>'
    >>> mark_breaks('<code class="a.b">dpc.film</code>')
    '<code class="a.b">dpc.<wbr class="short">film</code>'
    """

    def mark_word(word: re.Match[str]) -> str:
        is_long = len(word[0]) > LONG
        return BREAK.sub("<wbr>" if is_long else '<wbr class="short">', word[0])

    def mark(code: re.Match[str]) -> str:
        parts = re.split(r"(<[^>]*>)", code[0])
        parts[::2] = [re.sub(r"\S+", mark_word, part) for part in parts[::2]]
        return "".join(parts)

    return re.sub(r"<code\b.*?</code>", mark, html, flags=re.S)


def link_pictures(html: str) -> str:
    """The text of a page whose pictures lead to their files, where they are large.

    >>> link_pictures('<img src="a.png" /><a href="b"><img src="b.png" /></a>')
    '<a href="a.png"><img src="a.png" /></a><a href="b"><img src="b.png" /></a>'
    """
    picture = r'(?<!">)<img\b[^>]*\bsrc="([^"]*)"[^>]*>'
    return re.sub(picture, r'<a href="\1">\g<0></a>', html)


def setup(app: Any) -> dict[str, Any]:
    """Makes this module an extension of Sphinx."""
    from docutils import nodes
    from myst_parser.parsers.sphinx_ import MystParser
    from pygments.lexers.shell import BashLexer
    from pygments.lexers.special import TextLexer
    from sphinx import addnodes
    from sphinx.domains.python import PyObject
    from sphinx.ext import napoleon
    from sphinx.transforms import SphinxTransform

    # Docstrings say Attributes; for Sphinx they are Variables.
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"

    placed = homes()
    bare: dict[str, set[str]] = {}
    for name, home in placed.items():
        # Words in small letters are names of arguments more often than of functions.
        if (last := name.rpartition(".")[2])[0].isupper():
            bare.setdefault(last, set()).add(home)

    def link(literal: nodes.literal, home: str) -> addnodes.pending_xref:
        kind = "mod" if home.count(".") == 1 else "obj"
        reference = addnodes.pending_xref(
            "", refdomain="py", reftype=kind, reftarget=home, refwarn=True
        )
        reference += literal.deepcopy()
        return reference

    def name_role(role, rawtext, text, lineno, inliner, options=None, content=None):
        """Single backticks of a docstring: a link where the text is a public name."""
        literal = nodes.literal(rawtext, text)
        found = bare.get(text.removeprefix("dpc."), set())
        home = find_home(text, placed) or (next(iter(found)) if len(found) == 1 else "")
        return [link(literal, home) if home else literal], []

    class LinkNames(SphinxTransform):
        default_priority = 400

        def apply(self, **kwargs: Any) -> None:
            for literal in _plain_literals(self.document, nodes, addnodes):
                if home := find_home(literal.astext(), placed):
                    literal.replace_self(link(literal, home))

    def process(app, what, name, value, options, lines):
        # As Sphinx's own extension, but without taking the first words of a property's
        # docstring for a type.
        config = napoleon.Config(napoleon_numpy_docstring=False, napoleon_use_ivar=True)
        kind = "method" if what == "property" else what
        found = napoleon.GoogleDocstring(
            as_rst(lines), config, app, kind, name, value, options
        )
        lines[:] = found.lines()

    def finish_page(app, name, template, context, doctree):
        if "body" in context:
            context["body"] = link_pictures(mark_breaks(context["body"]))

    class NotebookParser(MystParser):
        supported = ("notebook",)

        def parse(self, inputstring, document):
            super().parse(notebook_page(inputstring), document)

    app.setup_extension("sphinx.ext.autodoc")
    app.setup_extension("myst_parser")
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    app.connect("autodoc-process-docstring", process)
    app.add_role("name", name_role)
    app.connect("html-page-context", finish_page)
    app.add_lexer("csv", TextLexer)
    # Blocks of commands have no prompt, without which Pygments takes a line for output.
    app.add_lexer("console", BashLexer)
    app.add_transform(LinkNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _plain_literals(document: Any, nodes: Any, addnodes: Any) -> Iterator[Any]:
    """Code within the text that is in no link or heading yet."""
    taken = (nodes.reference, nodes.title, addnodes.pending_xref, addnodes.desc)
    for literal in list(document.findall(nodes.literal)):
        parent = literal.parent
        while parent is not None and not isinstance(parent, taken):
            parent = parent.parent
        if parent is None:
            yield literal
