"""The state that the library keeps between calls is listed here, and refused elsewhere.

A reviewer of the privacy has to know the state that a call leaves for the next call: in
modules, as attributes of TensorFlow's and Keras's objects, or on Python's stack.
"""

import ast

import pytest

from tests import source_tree

# Objects of modules that change while a program runs. Caches of functions do not count.
MUTABLE = {
    # The draws, releases and counts of the process.
    "tfdpclip._notes.NOTES",
    # Additions by users' modules.
    "tfdpclip._registered.REGISTERED",
    # How losses are traced now, for a step that XLA compiles.
    "tfdpclip._devices.TRACING",
    # The element of the step that this thread takes.
    "tfdpclip.gradients.loss.drawn_rows._CURRENT",
    # The time by which a round of this task must be over.
    "tfdpclip.federated._workers._deadline",
    # The flags of a command.
    "tfdpclip.accounting.__main__._FLAGS",
}
# Modules that read Python's stack.
FRAMES = {
    # Keras names neither the callbacks of `fit` to a callback, nor the running method
    # to a training step. After an error in `fit`, no callback is called.
    "tfdpclip._keras_marks",
    # TensorFlow asks for a value at a call, without the arguments of the call.
    "tfdpclip.sampling.handed_out",
    # TensorFlow Federated calls an inner factory without a reference to the outer
    # factory, and the same way as in a learning process.
    "tfdpclip.federated._wrappers",
}
# Attributes that the library gives to objects of TensorFlow, with the kind of object.
MARKS = {
    "_tfdpclip_graph": "a graph",
    "_tfdpclip_op": "an op",
    "_tfdpclip_variable": "a variable",
}

MAKERS = set(
    """Condition ContextVar Counter Event Lock OrderedDict Queue RLock Semaphore
    SimpleQueue WeakKeyDictionary WeakSet WeakValueDictionary bytearray count cycle
    defaultdict deque dict iter list local set""".split()
)
CHANGES = set(
    """add append appendleft clear discard extend insert pop popitem popleft remove
    setdefault sort update""".split()
)


def modules():
    known = source_tree.find_modules()
    return {
        name: source_tree.read(path)
        for name, path in known.items()
        if name.split(".")[0] == "tfdpclip"
    }


def frozen_classes(trees):
    """The classes whose objects do not change, by name."""
    found = {"TypeVar"}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            heads = [*map(ast.unparse, node.decorator_list + node.bases)]
            if any("frozen=True" in h or h.endswith("NamedTuple") for h in heads):
                found.add(node.name)
    return found


def assigned(body):
    """The names that statements bind, with the values."""
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.value is not None:
                yield node.target.id, node.value


def may_change(value, frozen):
    """Whether a value is an empty container, or an object that is made to change."""
    if isinstance(value, (ast.Dict, ast.List, ast.Set)):
        return not ast.unparse(value).strip("[]{}() ")
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).split(".")[-1].split("[")[0]
    bare = name.lstrip("_")
    if name in MAKERS:
        return True
    return bare[:1].isupper() and not bare.isupper() and name not in frozen


def changed_names(tree):
    """The names that code changes in place, or binds as `global`."""
    for node in ast.walk(tree):
        target = None
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value if node.func.attr in CHANGES else None
        elif isinstance(node, (ast.Subscript, ast.Attribute)):
            stored = isinstance(node.ctx, (ast.Store, ast.Del))
            target = node.value if stored else None
        if isinstance(target, ast.Name):
            yield target.id


def mutable_objects(trees):
    """The objects of modules and classes that change, by their full names."""
    frozen = frozen_classes(trees.values())
    found = set()
    for module, tree in trees.items():
        bodies = [(module, tree.body)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bodies.append((f"{module}.{node.name}", node.body))
        at_top = {name for name, _ in assigned(tree.body)}
        for home, body in bodies:
            for name, value in assigned(body):
                if may_change(value, frozen):
                    found.add(f"{home}.{name}")
        found |= {f"{module}.{name}" for name in at_top & set(changed_names(tree))}
    return found


def test_objects_of_modules_that_change_are_these():
    assert mutable_objects(modules()) == MUTABLE


@pytest.mark.parametrize(
    "code",
    [
        "A = {}",
        "A: list[int] = []",
        "A = weakref.WeakKeyDictionary()",
        "A = collections.deque(maxlen=4)",
        "A = _Current()",
        "A = [0]\ndef f():\n    A[0] += 1",
        "A = {1: 2}\ndef f():\n    A.update(x)",
        "A = 1\ndef f():\n    global A\n    A = 2",
        "A = f(1)\nA.append(2)",
    ],
)
def test_an_object_that_changes_is_seen(code):
    assert mutable_objects({"m": ast.parse(code)}) == {"m.A"}


def test_an_object_of_a_class_that_changes_is_seen():
    tree = ast.parse("class B:\n    seen = set()")
    assert mutable_objects({"m": tree}) == {"m.B.seen"}


@pytest.mark.parametrize(
    "code",
    [
        "A = {1: 2}",
        "A = frozenset(x)",
        "A = ()",
        "def f():\n    A = {}\n    A[1] = 2",
        "@dataclass(frozen=True)\nclass B: ...\nA = B()",
        "class B(NamedTuple): ...\nA = B()",
    ],
)
def test_what_does_not_change_is_no_finding(code):
    assert mutable_objects({"m": ast.parse(code)}) == set()


def reads_frames(tree):
    """Whether a module reads Python's stack."""
    names = {"currentframe", "_getframe", "f_back", "f_locals", "tb_frame"}
    stacks = {"inspect.stack", "traceback.extract_stack", "traceback.walk_stack"}
    return any(
        isinstance(node, ast.Attribute)
        and (node.attr in names or ast.unparse(node) in stacks)
        for node in ast.walk(tree)
    )


def test_modules_that_read_the_stack_are_these():
    assert {name for name, tree in modules().items() if reads_frames(tree)} == FRAMES


def marks(tree):
    """The names of attributes that only this library sets."""
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("add_to_collection", "get_collection_ref"):
                name = f"collection {ast.unparse(node.args[0])}"
        if name and name.startswith(("_tfdpclip_", "collection ")):
            yield name


def test_marks_on_foreign_objects_are_of_one_module():
    by_module = {name: {*marks(tree)} for name, tree in modules().items()}
    assert {name: by_module[name] for name in by_module if by_module[name]} == {
        "tfdpclip._object_notes": set(MARKS)
    }
