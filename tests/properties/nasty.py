"""Values that no argument is meant to get, and the allowed results."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

LIBRARY = pathlib.Path(__file__).resolve().parents[2] / "tfdpclip"
# Not errors of ours, but documented: the accountant's word about a scheme.
REFUSALS = (ValueError, TypeError, dp_accounting.UnsupportedEventError)

NOT_FINITE = [
    math.nan,
    math.inf,
    -math.inf,
    np.float32("nan"),
    np.float64("inf"),
    tf.constant(math.nan),
]
WRONG_KINDS = [
    "a",
    b"a",
    "1",
    1 + 2j,
    np.complex128(1 + 1j),
    np.array(["a", "b"]),
    np.array([None, 1], object),
    np.array([1j, 2]),
    np.datetime64("2020-01-01"),
    tf.constant("a"),
    tf.constant([1 + 1j, 2]),
    object(),
    {"a": 1},
    {1: {2: []}},
    {"class_name": "FixedClip", "config": {"none such": 1}},
    {"class_name": []},
    {"class_name": "ExponentialDecay", "config": 3},
    [[1.0, [2.0]], []],
    lambda: 1,
    lambda a, b, c: None,
    Ellipsis,
    NotImplemented,
    range(3),
]
EMPTY = ["", b"", [], (), {}, set(), np.zeros(0), np.zeros((0, 3)), tf.zeros([0])]
NUMBERS = [
    -1,
    0,
    -0.0,
    1,
    True,
    False,
    np.bool_(True),
    0.5,
    1e308,
    -1e308,
    1e-320,
    5e-324,
    2**31,
    2**63,
    2**64 + 1,
    -(2**63),
    10**400,
    10**5000,
    np.float16(1.0),
    np.int8(-1),
    np.uint64(2**64 - 1),
]
ARRAYS = [
    np.zeros((1, 1, 1)),
    np.ones((2, 3), np.float16),
    np.array([1.0]),
    np.array([[1.0]]),
    np.array([math.nan]),
    np.array([math.inf, 1.0]),
    np.array([-1.0, 2.0]),
    np.array([1e308, 1e308]),
    np.array([[math.nan, 1.0], [1.0, 2.0]]),
    tf.ones([2, 2], tf.int32),
    tf.ones([1], tf.bfloat16),
    tf.constant([[math.inf]]),
    [math.nan, 1.0],
    [1e308, 1e308, 1e308],
    (-1, 2),
    [None],
    [True, False],
]
# Values that are wrong for every argument.
NEVER = [math.nan, np.float64("nan"), object(), 1 + 2j, Ellipsis]


class Slow(Exception):
    """A call that does not end."""


def listed(models: list[Any]) -> list[Any]:
    """Every value that is always tried."""
    return [None, *NOT_FINITE, *WRONG_KINDS, *EMPTY, *NUMBERS, *ARRAYS, *models]


def generated() -> st.SearchStrategy:
    """Values that hypothesis makes up."""
    numbers = st.one_of(
        st.floats(allow_subnormal=True),
        st.integers(),
        st.integers(min_value=-(2**70), max_value=2**70),
        st.floats(width=16).map(np.float16),
        st.booleans(),
        st.complex_numbers(),
        st.fractions(),
        st.decimals(),
    )
    texts = st.one_of(st.text(max_size=8), st.binary(max_size=8), st.none())
    leaves = st.one_of(numbers, texts)
    nests = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=3), inner, max_size=2),
        ),
        max_leaves=5,
    )
    arrays = st.builds(
        lambda shape, value, dtype: np.full(shape, value).astype(dtype),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.floats(-10, 10),
        st.sampled_from([np.float16, np.float64, np.int8, np.uint64, bool, complex]),
    )
    return st.one_of(numbers, texts, nests, arrays)


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raises `Slow` in the block if it runs longer than `seconds`."""

    def late(*_):
        raise Slow(f"still running after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def raised_by_us(error: BaseException) -> bool:
    """Whether the innermost frame of the traceback is in this library."""
    frames = traceback.extract_tb(error.__traceback__)
    return pathlib.Path(frames[-1].filename).is_relative_to(LIBRARY)


def numbers_in(result: Any, skip: frozenset[str] = frozenset()) -> Iterator[float]:
    """Every number of a result: of numbers, arrays, containers and data classes."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        for field in dataclasses.fields(result):
            if field.name not in skip:
                yield from numbers_in(getattr(result, field.name))
    elif isinstance(result, dict):
        for value in result.values():
            yield from numbers_in(value)
    elif isinstance(result, (list, tuple, set)):
        for value in result:
            yield from numbers_in(value)
    elif isinstance(result, (int, float, np.ndarray, np.generic)):
        array = np.asarray(result)
        if array.dtype.kind == "f":
            yield from array.ravel().tolist()


def complaint(
    call: Callable[..., Any],
    arguments: dict[str, Any],
    name: str,
    *,
    must_refuse: bool,
    infinite: bool = False,
    also_named: tuple[str, ...] = (),
    skip: frozenset[str] = frozenset(),
    seconds: int = 20,
) -> str | None:
    """The fault in a call with an odd `arguments[name]`; None if it is handled well.

    Args:
      call: the public function.
      arguments: all its arguments; `name` is the one with an odd value.
      name: the argument.
      must_refuse: whether no result is right.
      infinite: whether infinity is a documented result.
      also_named: other words that name the argument in a message.
      skip: fields of the result that may be NaN.
      seconds: the time allowed for a call.
    """
    try:
        with deadline(seconds):
            result = call(**arguments)
    except REFUSALS as error:
        text = str(error)
        if not raised_by_us(error):
            where = traceback.extract_tb(error.__traceback__)[-1]
            return (
                f"{type(error).__name__} from {where.filename}:{where.lineno}: "
                f"{text[:150]}"
            )
        if not any(word in text for word in (name, *also_named)):
            return f"message without {name!r}: {text[:200]}"
        return None
    except Slow as error:
        return str(error)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"{type(error).__name__} from {where.filename}:{where.lineno}: "
            f"{str(error)[:150]}"
        )
    if must_refuse:
        return f"accepted, result {str(result)[:100]}"
    for number in numbers_in(result, skip):
        if math.isnan(number):
            return f"accepted, and the result has NaN: {str(result)[:100]}"
        if math.isinf(number) and not infinite:
            return f"accepted, and the result is not finite: {str(result)[:100]}"
    return None
