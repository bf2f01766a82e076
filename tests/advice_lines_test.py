"""Lines of code in messages are code, and name what exists."""

from __future__ import annotations

import ast
import functools
import inspect
import pathlib
import re
import textwrap

import numpy as np
import pytest
import tensorflow as tf

import tfdpclip as dpc

_ROOT = pathlib.Path(__file__).resolve().parents[1] / "tfdpclip"


def _text(node: ast.AST) -> str | None:
    """A string that is written in the source; a value in it is the name `value`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [_text(part) for part in node.values]
        return "".join("value" if part is None else part for part in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None and right is None else (left or "") + (right or "")
    return None


@functools.cache
def _messages() -> list[tuple[str, str]]:
    """The places and texts of all strings of the library that are no docstrings."""
    found = []
    for path in sorted(_ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        inner: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                inner.add(id(node.value))
            if id(node) in inner or (text := _text(node)) is None:
                continue
            inner.update(id(part) for part in ast.walk(node))
            found.append((f"{path.relative_to(_ROOT)}:{node.lineno}", text))
    return found


def _blocks(text: str) -> list[str]:
    """The lines of a message that are indented by four spaces, block by block."""
    lines = re.findall(r"(?:^|\n)((?:    [^\n]*(?:\n(?=    )|$|(?=\n)))+)", text)
    return [textwrap.dedent(block).rstrip("\n ") for block in lines]


_BLOCKS = [
    pytest.param(block, id=f"{place}-{i}")
    for place, text in _messages()
    for i, block in enumerate(_blocks(text))
    if "(" in block and "Raises:" not in text  # No list of ops, and no docstring.
]


@pytest.mark.parametrize("block", _BLOCKS)
def test_an_advised_block_of_code_is_code(block):
    # A sentence may follow in the last line: "... See docs/pitfalls.md#...".
    code = re.sub(r" (See docs/|A step compiled).*$", "", block, flags=re.S)
    code = re.sub(r":$", ": ...", code)
    assert ast.parse(code).body


def test_names_in_messages_are_names_of_the_library():
    pytest.importorskip("tensorflow_federated")  # Names of tfdpclip.federated, too.
    missing = []
    for place, text in _messages():
        for name in re.findall(r"\b(?:dpc|tfdpclip)((?:\.[A-Za-z]\w*)+)", text):
            parts = [part for part in name[1:].split(".") if part != "value"]
            module = _ROOT.joinpath(*parts)
            value = dpc
            for part in parts:
                value = getattr(value, part, None)
            if value is None and not module.with_suffix(".py").exists():
                missing.append((place, name))
    assert not missing


def test_pages_in_messages_are_pages_with_their_headings():
    missing = []
    for place, text in _messages():
        for page, anchor in re.findall(r"(docs/[\w/]+\.md)(?:#([\w-]+))?", text):
            path = _ROOT.parent / page
            heads = (
                re.findall(r"^#+ (.*)$", path.read_text(), re.M)
                if path.exists()
                else []
            )
            slugs = {
                re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-")
                for h in heads
            }
            if not heads or (anchor not in ("", "value") and anchor not in slugs):
                missing.append((place, page, anchor))
    assert not missing


def _calls(text: str) -> list[str]:
    """Calls within the sentences of a message, up to the closing bracket."""
    found = []
    for start in re.finditer(r"(?<![\w.\"'])[A-Za-z_][\w.]*\w\(", text):
        depth, end = 0, start.end() - 1
        for end in range(start.end() - 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if not depth:
                break
        found.append(text[start.start() : end + 1])
    return found


def test_calls_in_messages_are_code():
    wrong = []
    for place, text in _messages():
        for call in _calls(text):
            # An option that is a value of the message: "PrivacyBudget(..., value)".
            call = call.replace(", value)", ")")
            try:
                ast.parse(call)
            except SyntaxError as error:
                wrong.append((place, call, error.msg))
    assert not wrong


_PACKAGES = (
    *("keras", "federated", "accounting", "sampling", "correlated", "tuning"),
    *("testing", "clipping"),
)


def _objects() -> dict[str, list]:
    """What the names of messages may be: modules, public names, and their objects."""
    found: dict[str, list] = {"dpc": [dpc], "tfdpclip": [dpc], "tf": [tf], "np": [np]}
    for name in _PACKAGES:
        package = getattr(dpc, name)
        for public in package.__all__:
            found.setdefault(public, []).append(getattr(package, public))
    found["count_stddevs"].append(dpc.ClipRule.count_stddevs)
    return found | {
        "plan": found["PrivacyPlan"],
        "budget": [dpc.keras.PrivacyBudget, dpc.accounting.RoundBudget],
        "ledger": [dpc.accounting.Ledger],
        "scheme": [dpc.sampling.Poisson],
        "model": [tf.keras.Model],
    }


def _meant(call: ast.Call, objects: dict[str, list]) -> list:
    """The functions that a call in a message may mean; none where nobody can tell."""
    parts = ast.unparse(call.func).split(".")
    if not all(part.isidentifier() for part in parts) or parts[0] not in objects:
        return []
    found = objects[parts[0]]
    for part in parts[1:]:
        found = [getattr(root, part) for root in found if hasattr(root, part)]
    return found


def _refused(call: ast.Call, function: object) -> list[str]:
    """The arguments of a call that a function does not have."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []  # Written in C.
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return []
    names = {p.name for p in parameters}
    wrong = {k.arg for k in call.keywords if k.arg} - names
    return sorted(wrong - {"value"})  # A name that the message fills in.


def test_calls_in_messages_have_the_arguments_of_their_functions():
    """`PrivacyPlan(..., views=2)` in a message: plans have `views`."""
    pytest.importorskip("tensorflow_federated")
    objects, wrong, bound = _objects(), [], 0
    for place, text in _messages():
        for written in _calls(text):
            tree = ast.parse(written.replace(", value)", ")"))
            for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
                meant = _meant(call, objects)
                refused = [_refused(call, function) for function in meant]
                bound += bool(meant and call.keywords)
                if meant and all(refused):
                    wrong.append((place, written, refused))
    assert not wrong
    assert bound > 100


def test_an_error_is_at_most_60_words():
    long = []
    for path in sorted(_ROOT.rglob("*.py")):
        raised = (
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Raise)
        )
        for node in raised:
            call = node.exc
            texts = map(_text, call.args) if isinstance(call, ast.Call) else ()
            words = sum(len(text.split()) for text in texts if text)
            if words > 60:
                long.append((path.name, node.lineno, words))
    assert not long


def test_most_messages_with_advice_are_read():
    """The tests above see blocks and calls, not an empty list."""
    assert len(_BLOCKS) >= 6
    assert sum(len(_calls(text)) for _, text in _messages()) > 400
