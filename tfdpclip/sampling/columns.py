"""Turns each array of the caller into an array of numbers or of texts, or an error.

Each error names the array by its place in the data, and shows the line to write.
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpclip._docs import see
from tfdpclip.sampling.row_weights import names_of_parts

_TEXTS = (str, bytes)
_NUMBERS = (bool, int, float, np.number, np.bool_)
_DATES = (datetime.date, datetime.time, datetime.timedelta, np.datetime64)
# The names of the types of missing values.
GAPS = ("NoneType", "NAType", "NaTType")
# How many rows are compared with the first, and how long a comparison may take.
_COMPARED, _MOST_WORK = 64, 10_000
# The largest number of types, or fields, in a message.
_SHOWN = 3


def as_column(value: Any, name: str) -> np.ndarray:
    """An array whose first axis runs over records; see `as_array`."""
    column = as_array(value, name)
    if column.ndim == 0:
        raise ValueError(
            f"data: {name} must be arrays with one row per record, got a scalar."
        )
    # An array on disk is not read as a whole.
    if not isinstance(value, np.memmap) and _holds_nan(column):
        warnings.warn(
            f"data: {name} holds NaN. If the model does not replace it, such a record "
            "has a loss of NaN, and a step gives the record no weight. Give a public "
            f"value, np.nan_to_num({name}, nan=0.0), or leave such records out."
            + see("one-bad-example"),
            stacklevel=2,
        )
    return column


def rows_overlap(rows: Any) -> bool:
    """Whether rows share memory with a later row, as windows of a series do.

    Args:
      rows: an array, or a list of arrays, a row each.
    """
    if isinstance(rows, list):
        rows = [row for row in rows if isinstance(row, np.ndarray) and row.size]
        starts = {row.__array_interface__["data"][0] for row in rows}
        if len(starts) < len(rows):
            return True
    elif not isinstance(rows, np.ndarray) or rows.ndim < 2:
        return False
    return any(share_memory(rows[0], row) for row in rows[1:_COMPARED])


def share_memory(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays share memory; False where too much work would tell."""
    try:
        return bool(np.shares_memory(one, other, max_work=_MOST_WORK))
    except RuntimeError:
        return False


def refuse_other_rows(named: Iterable[tuple[str, Any]]) -> None:
    """Raises if frames and columns of pandas have their rows in different orders.

    Rows go together by their places. Labels in another order show that rows that go
    together are at different places; labels from 0 on may have been made anew.

    Args:
      named: the name of each array in messages, and the array.
    """
    first: tuple[str, Any] | None = None
    for name, value in named:
        if not (hasattr(value, "iloc") and hasattr(value, "index")):
            continue
        if first is None:
            first = name, value.index
            continue
        index, other = value.index, first[1]
        if len(index) != len(other) or index.equals(other):
            continue
        shared = index.isin(other)
        alike = shared.all() and other.isin(index).all()
        made = _is_counted(index) or _is_counted(other)
        if alike or (shared.any() and not made):
            raise ValueError(
                f"data: the rows of {name} have another order, or are others, than the "
                f"rows of {first[0]}: their indices differ, and rows go together by "
                f"their places. Write {name}.loc[{first[0]}.index]; or, if the places "
                f"are right, {name}.to_numpy()." + see("records-of-several-rows")
            )


def _is_counted(index: Any) -> bool:
    """Whether an index is 0, 1, 2, ..., as of a frame that was made anew."""
    return index.dtype.kind in "iu" and np.array_equal(index, np.arange(len(index)))


def as_array(value: Any, name: str) -> np.ndarray:
    """Returns the value as one array of numbers, or of texts as objects.

    Args:
      value: an array, a tensor, lists of numbers or texts, or a column or a frame of
        pandas. float64 becomes float32, as in Keras.
      name: the place of the value in the data, such as "x['age']".

    Raises:
      ValueError: if the value cannot be converted.
    """
    if hasattr(value, "iloc") and hasattr(value, "columns"):
        return _of_frame(value, name)
    if hasattr(value, "iloc"):
        _refuse_gaps(value, name)
    if value is None:
        raise ValueError(
            f"data: {name} is None. Give values for all records, or leave {name} out "
            "of scheme.batches((x, y, sample_weight))."
        )
    if isinstance(value, tf.RaggedTensor):
        raise ValueError(
            f"data: {name} is a RaggedTensor, and batches need records of one shape: "
            f"{name}.to_tensor(shape=[None, 50]), for example, pads each record to 50. "
            "Give padding weight 0: scheme.batches((x, y, sample_weight))."
        )
    if isinstance(value, tf.SparseTensor):
        raise ValueError(
            f"data: {name} is a SparseTensor, and batches are dense: "
            f"tf.sparse.to_dense({name}); or, to convert only drawn records, "
            "scheme.batches(tf.data.Dataset.from_tensor_slices((x, y)))."
        )
    if hasattr(value, "toarray") and not hasattr(value, "__array__"):
        raise ValueError(
            f"data: {name} is a sparse {type(value).__name__}, and batches are dense: "
            f"{name}.toarray()."
        )
    if np.ma.is_masked(value):
        raise ValueError(_gaps(name, f"{name}.filled(0)"))
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise _several_lengths(name) from error
    return _canonical(array, name)


def as_keras_reads(value: Any, name: str) -> Any:
    """Returns a column of pandas or of texts as an array; Keras 3 reads neither.

    Args:
      value: held out data, for `validation_data`.
      name: the place of the value in the data.

    Raises:
      ValueError: if the value cannot be converted.
    """
    texts = isinstance(value, np.ndarray) and value.dtype.kind in "US"
    if not (texts or hasattr(value, "iloc")):
        return value
    try:
        return as_array(value, name)
    except ValueError as error:
        raise ValueError(f"validation_{error}") from None


def _holds_nan(array: np.ndarray) -> bool:
    # The least of numbers with a NaN is NaN; no second array is made.
    return array.dtype.kind == "f" and array.size > 0 and bool(np.isnan(array.min()))


def blank(rows: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Rows without a record: zeros, or empty texts."""
    if dtype.kind == "O":
        return np.full((rows, *shape), b"", dtype=object)
    return np.zeros((rows, *shape), dtype)


def is_array(value: Any) -> bool:
    """Whether a value is an array already, rather than a list."""
    return hasattr(value, "shape") and hasattr(value, "dtype") or hasattr(value, "iloc")


def split_lists(parts: tuple) -> tuple:
    """Replaces each list of several inputs' arrays by a tuple.

    A list of arrays is either one array with a record in each row (a list of pictures),
    or one array for each input, as Keras reads a list. The number of records in
    the rest of the data decides; where both readings fit, the list is ambiguous.

    Raises:
      ValueError: if a list of arrays is ambiguous.
    """
    leaves = names_of_parts(parts)
    lists = {name: leaf for name, leaf in leaves.items() if _lists_arrays(leaf)}
    if not lists:
        return parts
    others = [leaf for name, leaf in leaves.items() if name not in lists]
    sizes = {len(leaf) for leaf in others if is_array(leaf) or isinstance(leaf, list)}
    if not sizes:
        sizes = {n for arrays in lists.values() for n in (len(arrays), len(arrays[0]))}
    possible = [
        size
        for size in sizes
        if all(_is_one(a, size) or _is_several(a, size) for a in lists.values())
    ]
    split = set()
    for name, arrays in lists.items():
        one = any(_is_one(arrays, size) for size in possible)
        several = any(_is_several(arrays, size) for size in possible)
        if one and several:
            count, rows = len(arrays), len(arrays[0])
            raise ValueError(
                f"data: {name} is a list of {count} arrays of {rows} rows: {rows} "
                f"records with {count} inputs, or {count} records? Write a tuple, "
                f"({name}[0], {name}[1], ...), for inputs or outputs, and "
                f"np.stack({name}) for records."
            )
        if several:
            split.add(id(arrays))

    def written(node):
        if isinstance(node, dict):
            return {key: written(value) for key, value in node.items()}
        if isinstance(node, tuple):
            return tuple(map(written, node))
        return tuple(node) if id(node) in split else node

    return tuple(map(written, parts))


def refuse_list_of_arrays(data: list) -> None:
    """Raises ValueError for arrays in a list in the place of (x, y)."""
    if _lists_arrays(data):
        raise ValueError(
            f"data is a list of {len(data)} arrays, each of which would be one record. "
            "Give inputs and labels as a tuple, scheme.batches((x, y)); several inputs "
            "as scheme.batches(((x1, x2), y)); and records as np.stack(data), one "
            f"array of {len(data)} records."
        )


def _lists_arrays(leaf: Any) -> bool:
    return (
        isinstance(leaf, list)
        and len(leaf) > 0
        and all(is_array(item) and len(item.shape) > 0 for item in leaf)
    )


def _is_one(arrays: list, size: int) -> bool:
    """Whether a list of arrays can be one array of `size` records."""
    return len(arrays) == size and len({tuple(array.shape) for array in arrays}) == 1


def _is_several(arrays: list, size: int) -> bool:
    """Whether each array of a list has `size` records."""
    return all(len(array) == size for array in arrays)


def _canonical(array: np.ndarray, name: str) -> np.ndarray:
    """Converts an array as Keras would."""
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype.kind in "US":
        array = array.astype(object)
    if array.dtype.kind == "O":
        return _of_objects(array, name)
    if array.dtype.kind in "Mm":
        raise _dates(name)
    if array.dtype.names:
        raise ValueError(
            f"data: {name} is a structured array with the fields "
            f"{', '.join(array.dtype.names[:_SHOWN])}: give a dict of arrays, "
            f"{{field: {name}[field] for field in {name}.dtype.names}}."
        )
    try:
        tf.as_dtype(array.dtype)
    except TypeError:
        raise ValueError(
            f"data: {name} holds {array.dtype.name}, and TensorFlow has no such type: "
            f"{name}.astype('float32')."
        ) from None
    return array


def _of_objects(array: np.ndarray, name: str) -> np.ndarray:
    """Converts an array of Python objects into an array of numbers or texts."""
    flat = array.ravel()
    kinds = set(map(type, flat))
    if all(issubclass(kind, _TEXTS) for kind in kinds):
        _refuse_surrogates(flat, name)
        return array
    if all(issubclass(kind, _NUMBERS) for kind in kinds):
        found = np.array(flat.tolist()).reshape(array.shape)
        if found.dtype.kind == "O":
            raise ValueError(
                f"data: {name} holds integers of more than 64 bits: give texts, "
                f"[str(number) for number in {name}], or {name}.astype('float32')."
            )
        return _canonical(found, name)
    missing = {kind for kind in kinds if kind.__name__ in GAPS}
    rest = kinds - missing
    if all(issubclass(kind, (*_TEXTS, float)) for kind in rest):
        numbers = {value for value in flat if isinstance(value, float)}
        if missing or all(np.isnan(value) for value in numbers):
            fill = "''" if any(issubclass(kind, _TEXTS) for kind in rest) else "0"
            raise ValueError(
                _gaps(name, f"[{fill} if pandas.isna(v) else v for v in {name}]")
            )
    if missing and all(issubclass(kind, _NUMBERS) for kind in rest):
        raise ValueError(_gaps(name, f"[0 if pandas.isna(v) else v for v in {name}]"))
    if all(issubclass(kind, (list, tuple, np.ndarray)) for kind in kinds):
        try:
            found = np.stack([np.asarray(value) for value in flat])
        except ValueError as error:
            raise _several_lengths(name) from error
        return _canonical(found.reshape(array.shape + found.shape[1:]), name)
    if all(issubclass(kind, _DATES) for kind in rest):
        raise _dates(name)
    held = ", ".join(sorted(kind.__name__ for kind in kinds)[:_SHOWN])
    if all(issubclass(kind, (*_TEXTS, *_NUMBERS)) for kind in rest):
        raise ValueError(
            f"data: {name} holds values of the types {held}, and an array has one "
            f"type: [str(value) for value in {name}] makes texts of all, for a "
            "StringLookup."
        )
    raise ValueError(
        f"data: {name} holds objects of type {held}, and tensors hold numbers or "
        f"texts: give a number for each, such as np.unique(list(map(str, {name})), "
        "return_inverse=True)[1], or several arrays as a tuple or a dict."
    )


def _refuse_surrogates(texts: np.ndarray, name: str) -> None:
    """Raises for a text that has no bytes, with which a batch cannot be made."""
    for text in texts:
        if isinstance(text, bytes) or text.isascii():
            continue
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"data: {name} holds a text that UTF-8 cannot encode (a lone "
                "surrogate, from a file read with errors='surrogateescape'): "
                f"[text.encode('utf-8', 'replace') for text in {name}]."
            ) from None


def _of_frame(frame: Any, name: str) -> np.ndarray:
    """One array of the columns of a frame, all of numbers or all of texts."""
    if all(getattr(dtype, "kind", "O") in "iuf" for dtype in frame.dtypes):
        found = np.asarray(frame)
        if found.dtype.kind != "O" and not _holds_nan(found):
            return _canonical(found, name)
    columns = [
        as_array(frame.iloc[:, place], f"{name}[{label!r}]")
        for place, label in enumerate(frame.columns)
    ]
    labels = list(frame.columns)
    texts = [column.dtype.kind == "O" for column in columns]
    if any(texts) and not all(texts):
        label = labels[texts.index(True)]
        raise ValueError(
            f"data: column {label!r} of {name} holds texts and further columns hold "
            f"numbers, and one array has one type. Give {{c: {name}[c].to_numpy() for "
            f"c in {name}}} for a model with an input for each column; or numbers, "
            f"{name}[{label!r}] = lookup({name}[{label!r}].tolist()).numpy(), with "
            "lookup = tf.keras.layers.StringLookup(vocabulary=...), public or of "
            "PrivateStatistics."
        )
    wide = [column.ndim > 1 for column in columns]
    if any(wide):
        label = labels[wide.index(True)]
        raise ValueError(
            f"data: column {label!r} of {name} holds an array for each record, and a "
            f"frame becomes one array of its columns. Give dict({name}), for a model "
            f"with an input for each column, or the column alone, {name}[{label!r}]."
        )
    return _canonical(np.stack(columns, axis=1), name)


def _refuse_gaps(series: Any, name: str) -> None:
    """Refuses a column of pandas with gaps."""
    kind = getattr(series.dtype, "kind", "O")
    if not series.isna().any():
        return
    if kind in "Mm":
        raise _dates(name)
    fill = ".fillna(0)" if kind in "iubfc" else ".astype(object).fillna('')"
    told = _gaps(name, f"{name}{fill}")
    if kind == "f":
        told += f" For a model that reads NaN, write {name}.to_numpy()."
    raise ValueError(told)


def _gaps(name: str, line: str) -> str:
    return (
        f"data: {name} has gaps (None, NA, NaN or masked values), and every record "
        f"needs a value. Fill the gaps, {line}, or leave records with gaps out."
    )


def _dates(name: str) -> ValueError:
    return ValueError(
        f"data: {name} holds dates or times, and tensors hold numbers or texts. Give a "
        f"number, such as days: ({name} - np.datetime64('2020-01-01')) / "
        "np.timedelta64(1, 'D')."
    )


def _several_lengths(name: str) -> ValueError:
    return ValueError(
        f"data: {name} must be rectangular, and holds rows of several lengths. Pad "
        f"the rows, as tf.keras.utils.pad_sequences({name}, padding='post') does, and "
        "give padding weight 0: scheme.batches((x, y, sample_weight)). A list is read "
        "as one array: give several inputs as a tuple or a dict."
    )
