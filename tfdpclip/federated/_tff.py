"""Every symbol of TensorFlow Federated that this package uses, and its places.

`_kept` names a symbol that has one place, below `tensorflow_federated`. `_moved` names
a symbol that is below `tensorflow_federated` in 0.87, and below `federated_language`
on the main branch, which has no wheel. tests/tff_head.py lists the main branch's names
and notes what differs in them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib
import inspect
import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import grpc

from tfdpclip._arguments import instance

try:
    import tensorflow_federated as tff
except ImportError as error:
    raise ImportError(
        "tfdpclip.federated needs TensorFlow Federated 0.87, which is not installed. "
        "It exists only for Python 3.11 and TensorFlow 2.14: install requirements.txt "
        "of this library's repository there, by pip install --no-deps --require-hashes "
        "-r requirements.txt."
    ) from error


class _Missing(str):
    """The places of a symbol that the installed packages lack."""


def _found(*places: str) -> Any:
    """The symbol at the first of its places that has it, or `_Missing`."""
    for place in places:
        package, _, names = place.partition(".")
        with contextlib.suppress(ImportError, AttributeError):
            return operator.attrgetter(names)(importlib.import_module(package))
    return _Missing(" or ".join(places))


def _kept(place: str) -> Any:
    return _found(f"tensorflow_federated.{place}")


def _moved(place: str, now: str | None = None) -> Any:
    return _found(f"tensorflow_federated.{place}", f"federated_language.{now or place}")


UnweightedAggregationFactory = _kept("aggregators.UnweightedAggregationFactory")
WeightedAggregationFactory = _kept("aggregators.WeightedAggregationFactory")
EstimationProcess = _kept("templates.EstimationProcess")
SumFactory = _kept("aggregators.SumFactory")
UnweightedMeanFactory = _kept("aggregators.UnweightedMeanFactory")

AggregationProcess = _kept("templates.AggregationProcess")
MeasuredProcessOutput = _kept("templates.MeasuredProcessOutput")

tf_computation = _kept("tensorflow.computation")
federated_computation = _moved("federated_computation")

AnyType = _moved("Type")
TensorType = _moved("TensorType")
StructType = _moved("StructType")
FederatedType = _moved("FederatedType")
CLIENTS = _moved("CLIENTS")
SERVER = _moved("SERVER")
to_type = _moved("to_type")

federated_broadcast = _moved("federated_broadcast")
federated_eval = _moved("federated_eval")
federated_map = _moved("federated_map")
federated_sum = _moved("federated_sum")
federated_zip = _moved("federated_zip")
secure_sum_bitwidth = _moved("federated_secure_sum_bitwidth")
secure_modular_sum = _kept("backends.mapreduce.federated_secure_modular_sum")

build_sgdm = _kept("learning.optimizers.build_sgdm")

FederatedDataSource = _moved("program.FederatedDataSource")
FederatedDataSourceIterator = _moved("program.FederatedDataSourceIterator")

AsyncContext = _moved("framework.AsyncContext")
ProgramContext = _moved("program.NativeFederatedContext")

# Used in this module only.
_StructWithPythonType = _moved("StructWithPythonType")
_Struct = _kept("structure.Struct")
_elements = _moved("structure.iter_elements", "StructType.items")
_contained = _moved("types.type_to_py_container", "framework.type_to_py_container")
_type_contains = _moved("types.contains", "framework.type_contains")
_context_stack = _moved("framework.get_context_stack")
_materialize = _moved("program.materialize_value")
# By whether secure sums are simulated, and whether the context is asynchronous.
_CONTEXTS = {
    (False, False): _kept("backends.native.create_sync_local_cpp_execution_context"),
    (False, True): _kept("backends.native.create_async_local_cpp_execution_context"),
    (True, False): _kept("backends.test.create_sync_test_cpp_execution_context"),
    (True, True): _kept("backends.test.create_async_test_cpp_execution_context"),
}
_without_secure = _kept("backends.test.replace_secure_intrinsics_with_bodies")
_compile_natively = _kept("backends.native.desugar_and_transform_to_native")
_compile_mergeable = _kept("backends.native.compile_to_mergeable_comp_form")
_Context = _moved("framework.AsyncExecutionContext")
_MergeableContext = _kept("framework.MergeableCompExecutionContext")
_Executor = _kept("framework.RemoteExecutor")
_ExecutorFactory = _kept("framework.ResourceManagingExecutorFactory")
_Stub = _kept("framework.RemoteExecutorGrpcStub")
_transform_args = _kept("tensorflow.transform_args")
_transform_result = _kept("tensorflow.transform_result")

_symbols = [*globals().values(), *_CONTEXTS.values()]
if _missing := [symbol for symbol in _symbols if isinstance(symbol, _Missing)]:
    raise ImportError(
        f"TensorFlow Federated {tff.__version__} lacks {', '.join(_missing)}, which "
        "tfdpclip.federated uses. Install the release of requirements.txt, 0.87; or "
        "write the new places into tfdpclip/federated/_tff.py."
    )
if not tff.__version__.startswith("0.87."):
    # A worker program of the release runs the noise: untested noise is no guarantee.
    raise ImportError(
        "The noise of tfdpclip.federated was tested with TensorFlow Federated 0.87, "
        f"and {tff.__version__} is installed. Install the release of requirements.txt; "
        "or, to port the library, allow the release in tfdpclip/federated/_tff.py, and "
        "run all of tests/federated on it, the slow tests too."
    )


def is_plain_sum(factory: Any) -> bool:
    """Whether `factory` is a sum of values, without further steps."""
    return type(factory) is SumFactory


def is_plain_mean(factory: Any) -> bool:
    """Whether `factory` is a mean of plain sums."""
    if type(factory) is not UnweightedMeanFactory:
        return False
    parts = ("_value_sum_factory", "_count_sum_factory")
    return all(is_plain_sum(getattr(factory, part, None)) for part in parts)


def at_clients(value_type: Any) -> Any:
    """The type of a value at each client."""
    return FederatedType(value_type, CLIENTS)


def named_leaves(value_type: Any) -> list[tuple[str, Any]]:
    """The tensor types inside `value_type`, in order, each with its path.

    A part of a path is the element's name, or its position if it has none.
    """
    if isinstance(value_type, TensorType):
        return [("0", value_type)]
    instance("value_type", value_type, StructType, "a tensor or a structure of tensors")
    leaves = []
    for i, (name, element) in enumerate(_elements(value_type)):
        part = str(i) if name is None else name
        if isinstance(element, TensorType):
            leaves.append((part, element))
        else:
            leaves += [(f"{part}/{path}", t) for path, t in named_leaves(element)]
    return leaves


def elements(struct_type: Any) -> list[tuple[str | None, Any]]:
    """The names and types of a structure's elements, in order."""
    return list(_elements(struct_type))


def flatten(value: Any) -> list[Any]:
    """The leaves of a value, as a TensorFlow computation receives it."""
    parts = _parts(value)
    if parts is None:
        return [value]
    return [leaf for part in parts for leaf in flatten(part)]


def _parts(value: Any) -> list[Any] | None:
    """The parts of a container, in their order in its type; None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list, _Struct)):
        return list(value)
    if attrs.has(type(value)):
        return list(attrs.astuple(value, recurse=False))
    return None


def pack(leaves: list[Any], value_type: Any) -> Any:
    """The inverse of `flatten`, with the Python containers of `value_type`."""
    return _contained(_packed(iter(leaves), value_type), value_type)


def _packed(leaves: Iterator[Any], value_type: Any) -> Any:
    if isinstance(value_type, TensorType):
        return next(leaves)
    parts = [(name, _packed(leaves, part)) for name, part in _elements(value_type)]
    return _Struct(parts)


def with_dtype(value_type: Any, dtype: Any) -> Any:
    """`value_type` with every leaf of `dtype`."""
    if isinstance(value_type, TensorType):
        return TensorType(dtype, value_type.shape)
    parts = [(name, with_dtype(part, dtype)) for name, part in _elements(value_type)]
    if isinstance(value_type, _StructWithPythonType):
        return _StructWithPythonType(parts, value_type.python_container)
    return StructType(parts)


def current_context() -> Any:
    """The context in which a computation would run now."""
    return _context_stack().current


def install(context: Any) -> Any:
    """A context manager in which `context` runs the computations of this thread."""
    return _context_stack().install(context)


def computed_now(context: Any, computation: Any, argument: Any) -> Any:
    """Returns the result of a computation in `context`, awaited if asynchronous.

    Args:
      context: any execution context. A context that only traces returns no number.
      computation: the computation.
      argument: its argument.
    """

    async def compute():
        with install(context):
            result = computation(argument)
        if inspect.isawaitable(result):
            result = await result
        return await _materialize(result)

    # A thread may have a running loop already, as programs do.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, compute()).result()


def count_clients(computation: Any, argument: Any) -> int | None:
    """The number of clients that a computation gets data of; None without such data."""
    return _count_clients(computation.type_signature.parameter, argument)


def _count_clients(value_type: Any, value: Any) -> int | None:
    if isinstance(value_type, FederatedType):
        many = value_type.placement is CLIENTS and not value_type.all_equal
        return len(value) if many and hasattr(value, "__len__") else None
    if not isinstance(value_type, StructType):
        return None
    kinds = [kind for _, kind in _elements(value_type)]
    found = map(_count_clients, kinds, _parts(value) or ())
    return max((n for n in found if n is not None), default=None)


def new_local_context(
    simulate_secure_sums: bool,
    asynchronous: bool,
    around: Callable[[int | None], contextlib.AbstractContextManager[None]],
) -> tuple[Any, Callable[[], None]]:
    """An execution context, and a function that ends its worker process.

    Args:
      simulate_secure_sums: whether secure sums are computed without cryptography.
      asynchronous: whether computations return awaitables.
      around: makes the context, given the number of clients, of each computation.

    Raises:
      RuntimeError: if this release of TensorFlow Federated keeps its worker elsewhere.
    """
    context = _CONTEXTS[simulate_secure_sums, asynchronous]()
    # The executor factory's function holds the service manager of the worker process.
    start = getattr(context.executor_factory, "_executor_stack_fn", None)
    cells = [cell.cell_contents for cell in getattr(start, "__closure__", None) or ()]
    managers = [found for found in cells if hasattr(found, "_process")]
    if len(managers) != 1:
        raise RuntimeError(
            f"TensorFlow Federated {tff.__version__} does not keep its worker process "
            "where tfdpclip looks for it, so that it could not be ended. Use the "
            "version of requirements.txt."
        )
    (manager,) = managers
    start_if_needed = manager.get_stub

    def get_stub():
        with _outputs_of_process():
            return start_if_needed()

    manager.get_stub = get_stub

    def end_worker():
        process, manager._process, manager._stub = manager._process, None, None
        if process is not None:
            # The worker has no state to save, and may ignore an interrupt.
            process.kill()
            process.wait()

    run = context.invoke

    def invoke(computation, argument):
        with around(count_clients(computation, argument)):
            return run(computation, argument)

    async def invoke_later(computation, argument):
        with around(count_clients(computation, argument)):
            return await run(computation, argument)

    context.invoke = invoke_later if asynchronous else invoke
    if asynchronous:
        context = ProgramContext(context)
    return context, end_worker


@contextlib.contextmanager
def _outputs_of_process() -> Iterator[None]:
    """Puts the process's outputs in the place of outputs that are no files.

    A worker starts with `sys.stdout` and `sys.stderr`, which must have a descriptor:
    notebooks and `contextlib.redirect_stdout(io.StringIO())` have none.
    """
    with contextlib.ExitStack() as replaced:
        for redirect, output, real in (
            (contextlib.redirect_stdout, sys.stdout, sys.__stdout__),
            (contextlib.redirect_stderr, sys.stderr, sys.__stderr__),
        ):
            try:
                output.fileno()
            except (AttributeError, OSError, ValueError):
                replaced.enter_context(redirect(real))
        yield


def worker_binary() -> str:
    """The path of the worker binary in TensorFlow Federated's wheel.

    Raises:
      RuntimeError: if the wheel has none.
    """
    path = os.path.join(os.path.dirname(tff.__file__), "data", "worker_binary")
    if not os.access(path, os.X_OK):
        raise RuntimeError(
            f"TensorFlow Federated {tff.__version__} has no worker at {path}, where "
            "its wheel for Linux has one. Use the version of requirements.txt."
        )
    return path


class WorkerStub(_Stub):
    """Calls of a worker. A failure to forget a value is ignored: the worker is gone."""

    def dispose(self, request: Any) -> None:
        """Forgets values."""
        with contextlib.suppress(grpc.RpcError, ValueError):
            super().dispose(request)

    def dispose_executor(self, request: Any) -> None:
        """Forgets an executor with all its values."""
        with contextlib.suppress(grpc.RpcError, ValueError):
            super().dispose_executor(request)


class _RemoteExecutor(_Executor):
    """An executor that its worker forgets when no reference to it is left here.

    TensorFlow Federated makes an executor for each number of clients, and drops
    executors unclosed if there are too many numbers. A worker would keep their values.
    """

    def __del__(self):
        self.close()


class WorkerContext(_Context):
    """Runs computations on one worker, and repeats them if needed.

    Args:
      connected: returns the worker's stub, once the worker answers.
      compiler: the compiler of the computations.
    """

    def __init__(self, connected: Callable[[], WorkerStub], compiler: Any):
        self._connected = connected
        self._executors: weakref.WeakSet = weakref.WeakSet()
        super().__init__(
            executor_fn=_ExecutorFactory(self._executor),
            compiler_fn=compiler,
            transform_args=_transform_args,
            transform_result=_transform_result,
        )

    def _executor(self, cardinalities):
        # Values are forgotten one by one: a batch of values can be all clients' data.
        executor = _RemoteExecutor(self._connected(), dispose_batch_size=1)
        executor.set_cardinalities({CLIENTS: 0, **cardinalities})
        self._executors.add(executor)
        return executor

    def try_out(self) -> None:
        """Makes an executor on the worker, and has the worker forget it."""
        self._executor({}).close()

    def has_given(self) -> bool:
        """Whether the worker may still hold values from here."""
        return bool(self._executors)

    def forget(self) -> None:
        """Has the worker forget all values from here."""
        for executor in list(self._executors):
            executor.close()


def worker_compiler(simulate_secure_sums: bool) -> Callable[[Any], Any]:
    """Compiles for several workers, each computation once."""
    lock = threading.Lock()

    @functools.lru_cache(maxsize=64)
    def compile_once(computation):
        if simulate_secure_sums:
            computation = _without_secure(computation)
        return _compile_natively(computation)

    def compile_for_workers(computation):
        with lock:
            return compile_once(computation)

    return compile_for_workers


class MergingContext(_MergeableContext):
    """Gives each context a part of the clients, and merges the partial results.

    Args:
      contexts: asynchronous contexts.
      simulate_secure_sums: whether secure sums are computed without cryptography.
      subrounds: the number of parts.
    """

    def __init__(self, contexts: list[Any], simulate_secure_sums: bool, subrounds: int):
        self._several = subrounds > 1

        def compile_in_parts(computation):
            if simulate_secure_sums:
                computation = _without_secure(computation)
            return _compile_mergeable(computation)

        super().__init__(contexts, compile_in_parts, num_subrounds=subrounds)

    def invoke(self, comp: Any, arg: Any = None) -> Any:
        """Runs a computation.

        Raises:
          ValueError: if part of its result would be computed more than once.
        """
        result_type = comp.type_signature.result
        if self._several and _has_single_clients(result_type):
            # Steps after the merge would run for each part, and draw noise again.
            raise ValueError(
                "The computation returns a value of each client (...@CLIENTS). On "
                "several workers, steps after the sum would run once for each part, "
                "with fresh noise on the same sum. Return values at the server only, "
                "or run it in dpc.federated.local_context()."
            )
        result = super().invoke(comp, arg)
        # Replacing secure sums loses the containers.
        return _contained(_as_structs(result, result_type), result_type)


def _has_single_clients(value_type):
    return _type_contains(
        value_type, lambda t: isinstance(t, FederatedType) and not t.all_equal
    )


def _as_structs(value, value_type):
    if isinstance(value_type, FederatedType):
        if value_type.all_equal:
            return _as_structs(value, value_type.member)
        return [_as_structs(one, value_type.member) for one in value]
    if not isinstance(value_type, StructType):
        return value
    parts = zip(_parts(value) or [], _elements(value_type), strict=True)
    return _Struct([(name, _as_structs(part, kind)) for part, (name, kind) in parts])
