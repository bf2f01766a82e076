"""TensorFlow Federated's main branch, for the day of a wheel: its names that we use.

Read from the sources of the main branch at commit 63f73de (21 August 2026; its version
is still 0.88.0; it asks for Python 3.12, TensorFlow 2.21, Keras 3.12 and
federated_language 0.5.3) and from the wheel of federated_language 0.5.4. A name is
listed if the package's public modules (no underscore, no `python`) have it. The list
holds the names that `tfdpclip/federated/_tff.py` and `tff_tasks` use, and no more.
"""

COMMIT = "63f73de486b2a98e1de1538b4d22834eaaea19ab"

#: What stayed below `tensorflow_federated`.
STAYED = {
    "aggregators.SumFactory",
    "aggregators.UnweightedAggregationFactory",
    "aggregators.UnweightedMeanFactory",
    "aggregators.WeightedAggregationFactory",
    "backends.mapreduce.federated_secure_modular_sum",
    "backends.native.compile_to_mergeable_comp_form",
    "backends.native.create_async_local_cpp_execution_context",
    "backends.native.create_sync_local_cpp_execution_context",
    "backends.native.desugar_and_transform_to_native",
    "backends.test.create_async_test_cpp_execution_context",
    "backends.test.create_sync_test_cpp_execution_context",
    "backends.test.replace_secure_intrinsics_with_bodies",
    "framework.MergeableCompExecutionContext",
    "framework.RemoteExecutor",
    "framework.RemoteExecutorGrpcStub",
    "framework.ResourceManagingExecutorFactory",
    "learning.LoopImplementation",
    "learning.algorithms",
    "learning.algorithms.build_unweighted_fed_avg",
    "learning.models.ModelWeights",
    "learning.models.from_keras_model",
    "learning.optimizers.build_sgdm",
    "structure.Struct",
    "templates.AggregationProcess",
    "templates.EstimationProcess",
    "templates.MeasuredProcessOutput",
    "tensorflow.computation",
    "tensorflow.transform_args",
    "tensorflow.transform_result",
}

#: What is below `federated_language`.
MOVED = {
    "CLIENTS",
    "FederatedType",
    "SERVER",
    "StructType",
    "StructType.items",
    "StructWithPythonType",
    "TensorType",
    "Type",
    "federated_broadcast",
    "federated_computation",
    "federated_eval",
    "federated_map",
    "federated_secure_sum_bitwidth",
    "federated_sum",
    "federated_zip",
    "framework.AsyncContext",
    "framework.AsyncExecutionContext",
    "framework.get_context_stack",
    "framework.type_contains",
    "framework.type_to_py_container",
    "program.FederatedDataSource",
    "program.FederatedDataSourceIterator",
    "program.NativeFederatedContext",
    "program.materialize_value",
    "to_type",
}

#: What differs from 0.87 in a name above, and what it means for the calls here. The
#: signatures of all remaining names take the same calls.
DIFFERENCES = {
    "StructType.items": (
        "In place of structure.iter_elements, which is gone. structure.from_container "
        "and pack_sequence_as became private, so that _tff.py walks containers itself."
    ),
    "structure.Struct": (
        "Deprecated: making one warns. type_to_py_container converts nothing else; "
        "federated_language.framework.Struct is a building block, not this class."
    ),
    "TensorType": (
        "The attribute dtype is a numpy.dtype in both; only tf.as_dtype reads it here."
    ),
    "templates.MeasuredProcessOutput": (
        "A NamedTuple, not an attrs class: it is iterable, and equal by its values."
    ),
    "program.NativeFederatedContext": (
        "The parameter context is named ctx: give it by position. Structures come back "
        "in the containers of their type, not as Struct."
    ),
    "framework.AsyncExecutionContext": (
        "The compiler is cached by functools.lru_cache, not by a CompilerPipeline."
    ),
    "framework.MergeableCompExecutionContext": (
        "Caches the compiler likewise. Values at the clients inside structures are "
        "divided among the subrounds correctly, where 0.87 could repeat them."
    ),
    "learning.optimizers.build_sgdm": (
        "Has a parameter nesterov, False by default, which nothing here sets."
    ),
    "learning.algorithms.build_unweighted_fed_avg": (
        "Has a parameter measure_timing, False by default: True releases the least, "
        "the largest and the mean time of the clients, without noise."
    ),
    "learning.models.from_keras_model": (
        "Takes Keras 3 models as well, and compiled ones."
    ),
    "learning.models.ModelWeights": (
        "from_model reads Keras 3 variables, as copies, outside of a graph."
    ),
    "federated_eval": (
        "A function with a parameter raises ValueError, where 0.87 raises TypeError."
    ),
}
