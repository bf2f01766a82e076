"""Assertions in a running step tell no numbers of its records."""

import ast
import pathlib

import tfdpclip

ROOT = pathlib.Path(tfdpclip.__file__).parent
# The numbers of steps, and of clients whom a server counts anyway.
PUBLIC = {"noise/kept.py", "federated/distributed.py"}
# The names of variables.
NAMES = {"changed"}


def assertions():
    for path in sorted(ROOT.rglob("*.py")):
        place = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if ast.unparse(node.func.value) == "tf.debugging":
                    yield place, node


def test_an_assertion_of_a_step_prints_a_message_and_no_size_of_a_draw():
    """The number of drawn records is private: no epsilon covers it in an error."""
    seen = 0
    for place, node in assertions():
        if place in PUBLIC or not node.func.attr.lower().startswith("assert"):
            continue
        seen += 1
        # `assert_equal` and its like print both sides.
        assert node.func.attr == "Assert", f"{place}:{node.lineno}"
        for part in node.args[1].elts:
            text = ast.unparse(part)
            assert "tf." not in text, f"{place}:{node.lineno} prints {text}"
            is_text = "see(" in text or text[0] in "\"'f_" or "message" in text
            is_text |= text.isupper() or text in NAMES or "not_a_number" in text
            assert is_text, f"{place}:{node.lineno} prints {text}"
    assert seen > 5
