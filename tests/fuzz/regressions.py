"""Models that failed a check in the past, and models that must always work."""

# ruff: noqa: E501  lines as they are printed

from __future__ import annotations

import dataclasses

from tests.fuzz.outcome import CAUGHT, EXACT, HARMLESS, REFUSED, WARNED
from tests.fuzz.spec import Spec

SAFE = (EXACT, WARNED, REFUSED, HARMLESS)
WORKS = (EXACT, WARNED)


@dataclasses.dataclass(frozen=True)
class Regression:
    """A model that failed.

    Attributes:
      name: the special feature of the model.
      spec: the model.
      allowed: the outcomes that are right.
      slow: whether it is left out of the fast suite.
      known: why it still fails, loudly; empty if it does not.
    """

    name: str
    spec: Spec
    allowed: tuple[str, ...] = SAFE
    slow: bool = True
    known: str = ""


def _case(
    name: str, text: str, allowed=SAFE, slow: bool = True, known: str = ""
) -> Regression:
    return Regression(name, Spec.from_json(text), allowed, slow, known)


_MIXER = (CAUGHT,)

REGRESSIONS = [
    # Wrong norms or sums.
    _case(
        "grouped_convolution",
        '{"input": "sequence", "body": [["dense", {"units": 4}], '
        '["conv1d", {"groups": 2}]]}',
        WORKS,
        slow=False,
    ),
    _case(
        "grouped_image_convolution",
        '{"input": "image", "body": [["conv2d", {"groups": 2}]]}',
        WORKS,
    ),
    _case(
        "recurrence_over_folded_examples",
        '{"input": "image", "body": [["fold", {"how": "twofold"}, '
        '[["recurrent", {"kind": "lstm"}]]]]}',
        slow=False,
    ),
    _case(
        "time_distributed_recurrence",
        '{"input": "image", "body": [["time_distributed", {"layer": "lstm"}]]}',
    ),
    _case(
        "hierarchy_of_recurrences",
        '{"input": "image", "body": [["fold", {"how": "twofold"}, '
        '[["recurrent", {"kind": "gru"}]]], ["recurrent", {"kind": "gru"}]], '
        '"mode": {"dynamic": true}}',
    ),
    _case(
        "recomputed_random_numbers",
        '{"body": [["function", {"how": "recompute"}, '
        '[["random", {}], ["dense", {}]]]]}',
    ),
    # Mixers.
    _case(
        "segments_by_data",
        '{"body": [["dense", {}], ["mix", {"how": "segment_mean"}]]}',
        _MIXER,
        slow=False,
    ),
    _case(
        "stopped_segments",
        '{"body": [["dense", {}], ["mix", {"how": "stopped_segment"}]]}',
        _MIXER,
        slow=False,
    ),
    _case(
        "gate_that_opens",
        '{"body": [["dense", {}], ["mix_gate", {"on": "zero"}]]}',
        _MIXER,
    ),
    _case(
        "gate_that_opens_to_a_stopped_mean",
        '{"body": [["dense", {}], ["mix_gate", {"on": "zero", "stop": true}]]}',
        _MIXER,
    ),
    _case(
        "memory_of_the_batch",
        '{"body": [["dense", {}], ["mix_memory", {}]]}',
        _MIXER,
    ),
    _case(
        "trained_memory_of_the_batch",
        '{"body": [["dense", {}], ["mix_memory", {"trained": true}]]}',
        _MIXER,
    ),
    _case(
        "integers_into_slow_variables",
        '{"input": "tokens", "body": [["mix", {"how": "stopped_mean"}], '
        '["recurrent", {"kind": "rnn"}]]}',
        _MIXER,
    ),
    *(
        _case(f"stopped_statistic_after_{name}", text, _MIXER)
        for name, text in {
            "cond": '{"body": [["cond", {"on": "variable"}, [["dense"]]], '
            '["mix", {"how": "stopped_mean"}]]}',
            "function": '{"body": [["function", {}, [["elementwise"]]], '
            '["mix", {"how": "stopped_std"}]]}',
            "map_fn": '{"body": [["each", {}, [["elementwise"]]], '
            '["mix", {"how": "stopped_std"}]]}',
        }.items()
    ),
    _case(
        "stopped_statistic_in_function",
        '{"body": [["dense"], ["function", {}, [["mix", {"how": "stopped_std"}]]]]}',
        _MIXER,
    ),
    _case(
        "stopped_statistic_in_cond",
        '{"body": [["dense"], ["cond", {}, [["mix", {"how": "stopped_mean"}]]]]}',
        _MIXER,
    ),
    _case(
        "memory_after_grouped_convolution",
        '{"seed": 412, "batch": 6, "input": "image", "body": [["conv1d", {"groups": 2}], '
        '["mix_memory", {"trained": true}]], "loss": {"reduction": "entries_mean"}, '
        '"mode": {"dynamic": true}}',
        _MIXER,
    ),
    # Decisions for the whole batch, behind ops that hide which axis counts examples.
    *(
        _case(f"decision_of_the_batch_by_{how}", text, _MIXER)
        for how, text in {
            "any": '{"body": [["function", {}, [["dense"]]], ["mix", {"how": "any"}]]}',
            "number_of_values": '{"body": [["function", {}, [["dense"]]], ["mix", {"how": "unique_count"}]]}',
            "cond": '{"input": "image", "body": [["cond", {}, [["conv2d"]]], ["reorder", {"how": "flatten"}], ["mix", {"how": "cond"}]]}',
        }.items()
    ),
    _case(
        "decision_of_the_batch_that_moves_later",
        '{"seed": 202, "batch": 4, "input": "image", "body": [["cond", {"on": "size"}, [["conv2d", {"filters": 2, "kernel": 2, "padding": "same", "stride": 1, "dilation": 2, "groups": 1, "bias": true}]]], ["reorder", {"how": "flatten"}], ["tied", {"how": "both_sides"}], ["mix", {"how": "cond"}]], "loss": {"kind": "squared_hinge", "reduction": "masked", "weighted": true}}',
        _MIXER,
    ),
    _case(
        "memory_in_a_function",
        '{"body": [["dense"], ["function", {"how": "twofold"}, [["mix_memory"]]]]}',
        _MIXER,
    ),
    # Errors that say nothing.
    _case(
        "gated_statistic_after_a_while",
        '{"seed": 744, "batch": 6, "input": "sequence", "body": [["recurrent", {"kind": '
        '"lstm", "activation": "relu"}], ["mix_gate", {"stop": true}]]}',
        _MIXER,
    ),
    _case(
        "recomputed_loop",
        '{"input": "sequence", "body": [["function", {"how": "recompute"}, '
        '[["scan_time", {"kind": "foldl"}]]]]}',
    ),
    _case(
        "dot_with_ones",
        '{"seed": 983, "batch": 4, "input": "sequence", "body": [["time_major", {"how": '
        '"conv"}], ["within", {"how": "softmax"}], ["time_distributed", {"layer": '
        '"conv"}]], "loss": {"kind": "poisson", "reduction": "dot", "head": false}, '
        '"mode": {"dynamic": true, "rule": "automatic"}}',
    ),
    _case(
        "memory_and_a_dot_with_ones",
        '{"seed": 345, "batch": 6, "input": "tokens", "body": [["conv1d", {"kernel": 1, '
        '"dilation": 2, "groups": 2, "bias": false}], ["batch_identity", {"how": '
        '"slices"}], ["elementwise", {"form": "affine", "axis": "first"}], '
        '["mix_memory", {"trained": true}], ["within", {"how": "clip"}]], "loss": '
        '{"kind": "mse", "reduction": "dot"}, "mode": {"level": "minimize", "dynamic": '
        'true, "accumulate": 2}}',
        _MIXER,
    ),
    _case(
        "gated_statistic_after_time_major",
        '{"input": "sequence", "body": [["time_major", {"how": "recurrent"}], ["mix_gate", {"on": "one"}], ["matmul"]]}',
        _MIXER,
    ),
    _case(
        "time_distributed_recurrence_with_padding",
        '{"seed": 689, "batch": 3, "input": "image", "body": [["reorder", {"how": "tile"}], ["time_distributed", {"layer": "gru"}]], "loss": {"kind": "poisson", "reduction": "two", "head": false}, "mode": {"dynamic": true, "rule": "automatic", "poison": "padding"}}',
    ),
    _case(
        "compiled_loop_on_the_slow_path",
        '{"seed": 903, "batch": 6, "input": "image", "body": [["recurrent", {"kind": "rnn", "sequences": true, "wrapped": "cell"}]], "mode": {"jit": true}}',
    ),
    _case(
        "recurrence_over_rows_of_time_first",
        '{"input": "image", "body": [["fold", {"how": "transpose"}, [["mix", {"how": "stopped_mean"}], ["recurrent", {"kind": "gru"}]]]]}',
        _MIXER,
    ),
    _case(
        "loop_over_a_layer_over_time",
        '{"seed": 507, "batch": 5, "input": "tokens", "body": [["function", {"how": "custom"}, [["parallel", {}, [["prelu", {"shared": false}]]]]], ["each", {"how": "map_fn"}, [["time_distributed", {"layer": "lstm"}]]], ["time_distributed", {"layer": "conv"}]], "loss": {"kind": "binary", "reduction": "none"}, "mode": {"level": "fit", "dynamic": true, "accumulate": 2, "rule": "fixed"}}',
        SAFE,
    ),
    _case(
        "compiled_branch_on_the_slow_path",
        '{"seed": 581, "batch": 6, "input": "tokens", "body": [["conv2d", {"filters": 3, "kernel": 1, "padding": "valid", "stride": 2, "dilation": 1, "groups": 1, "bias": false}], ["time_distributed", {"layer": "conv"}], ["cond", {"on": "variable"}, [["parallel", {}, [["matmul", {"form": "batched", "units": 2}]]]]], ["residual", {"how": "gate"}, [["transformed_conv", {"how": "softmax"}], ["reorder", {"how": "tile"}]]]], "loss": {"kind": "cosine", "reduction": "masked"}, "mode": {"level": "sum", "dynamic": true, "jit": true, "rule": "fixed"}}',
        WORKS,
    ),
    _case(
        "variable_for_all_places_at_once",
        '{"seed": 368, "batch": 4, "input": "tokens", "body": [["fold", {"how": "twofold"}, [["reorder", {"how": "batch_gather"}], ["function", {"how": "recompute"}, [["time_major", {"how": "scan"}], ["prelu", {"shared": false}]]]]], ["elementwise", {"form": "where", "axis": "first"}], ["embedding", {"size": 6, "units": 3, "mask": true, "repeat": false}], ["mix_gate", {"on": "zero", "stop": false}]], "loss": {"kind": "binary", "reduction": "keras_sum"}, "mode": {"level": "sum", "dynamic": false, "rule": "fixed"}}',
        _MIXER,
    ),
    _case(
        "locally_connected_in_a_dynamic_batch",
        '{"seed": 458, "batch": 4, "input": "sequence", "body": [["matmul", {"form": "einsum", "units": 4}], ["function", {"how": "plain"}, [["scan_time", {"kind": "foldl"}]]], ["locally_connected", {"filters": 2}], ["twice", {"how": "other"}, [["fold", {"how": "minus_one"}, [["prelu", {"shared": false}]]], ["elementwise", {"form": "lerp", "axis": "last"}]]]], "loss": {"kind": "hinge", "reduction": "keras"}, "mode": {"level": "minimize", "dynamic": true, "accumulate": 2, "rule": "layerwise"}}',
        WORKS,
    ),
    _case(
        "parts_that_cancel",
        '{"seed": 114, "batch": 4, "input": "tokens", "body": [["recurrent", {"kind": "lstm", "units": 2, "sequences": false, "unroll": true, "back": false, "mask": false, "activation": "relu", "wrapped": "bidirectional"}], ["embedding", {"size": 4, "units": 3, "mask": true, "repeat": true}], ["recurrent", {"kind": "gru", "units": 2, "sequences": false, "unroll": true, "back": true, "mask": true, "activation": "relu", "wrapped": "bidirectional"}], ["tied_table", {"how": "logits", "size": 6}]], "loss": {"kind": "cosine", "reduction": "masked", "weighted": true}, "mode": {"level": "sum", "dynamic": false, "rule": "layerwise"}}',
        WORKS,
    ),
    _case(
        "coarse_parts_that_cancel",
        '{"seed": 495, "batch": 4, "input": "tokens", "body": [["fold", {"how": "transpose"}, [["matmul", {"form": "matvec", "units": 2}]]], ["reorder", {"how": "split"}], ["conv_transpose", {"rank": 2, "filters": 3, "kernel": 3, "padding": "valid", "stride": 1}], ["tied_table", {"how": "bag", "size": 6}]], "loss": {"kind": "categorical", "reduction": "none", "head": false}, "mode": {"level": "sum", "dynamic": true, "dtype": "mixed_bfloat16", "rule": "fixed"}}',
        WORKS,
    ),
    _case(
        "bias_that_softmax_does_not_see",
        '{"seed": 613, "batch": 4, "input": "vector", "body": [["conv2d", {"filters": 3, "kernel": 3, "padding": "same", "stride": 2, "dilation": 1, "groups": 2, "bias": true}], ["prelu", {"shared": true}], ["fold", {"how": "twofold"}, [["tied", {"how": "recurrence"}]]], ["each", {"how": "vectorized_map"}, [["elementwise", {"form": "bias", "axis": "first"}]]]], "loss": {"kind": "categorical", "reduction": "keras", "head": false}, "mode": {"level": "fit", "dynamic": false, "rule": "layerwise"}}',
        WORKS,
    ),
    _case(
        "table_in_a_branch",
        '{"seed": 42, "batch": 4, "input": "sequence", "body": [["cond", {"on": "constant"}, [["embedding", {"size": 6, "units": 2, "mask": true, "repeat": true}]]], ["append", {"form": "add_position"}], ["reorder", {"how": "unstack_time"}], ["parallel", {}, [["fold", {"how": "twofold"}, [["within", {"how": "log_softmax"}]]]]]], "loss": {"kind": "hinge", "reduction": "masked", "weighted": true}, "mode": {"level": "sum", "dynamic": false, "dtype": "mixed_bfloat16", "rule": "fixed"}}',
        WORKS,
    ),
    _case(
        "rows_that_are_taken_one_by_one",
        '{"seed": 414, "batch": 5, "input": "sequence", "body": [["each", {"how": "map_fn"}, [["elementwise", {"form": "difference", "axis": "first"}], ["fold", {"how": "shape"}, [["matmul", {"form": "matvec", "units": 3}]]]]], ["cond", {"on": "case"}, [["dense", {"units": 1, "activation": "swish", "bias": true, "flat": false}]]], ["each", {"how": "vectorized_map"}, [["fold", {"how": "minus_one"}, [["tied", {"how": "difference"}], ["dense", {"units": 5, "activation": "tanh", "bias": true, "flat": true}]]]]], ["tied", {"how": "bilinear"}]], "loss": {"kind": "log_cosh", "reduction": "keras", "head": false}, "mode": {"level": "fit", "dynamic": true, "rule": "fixed"}}',
        (REFUSED,),
    ),
    _case(
        "compiled_time_major_dense",
        '{"seed": 926, "batch": 4, "input": "tokens", "body": [["conv2d", {"filters": 2, "kernel": 2, "padding": "same", "stride": 1, "dilation": 2, "groups": 2, "bias": false}], ["time_major", {"how": "dense"}]], "loss": {"kind": "poisson", "reduction": "weighted_mean"}, "mode": {"level": "sum", "dynamic": true, "jit": true, "rule": "layerwise"}}',
        WORKS,
    ),
    _case(
        "table_in_a_branch_before_time_major",
        '{"seed": 505, "batch": 4, "input": "sequence", "body": [["cond", {"on": "case"}, [["residual", {"how": "add"}, [["embedding", {"size": 6, "units": 3, "mask": false, "repeat": false}], ["reorder", {"how": "stack"}]]]]], ["time_major", {"how": "dense"}], ["scan_time", {"kind": "foldl"}]], "loss": {"kind": "squared_hinge", "reduction": "keras", "weighted": true}, "mode": {"level": "fit", "dynamic": false, "accumulate": 2, "rule": "fixed"}}',
        WORKS,
    ),
    _case(
        "unrolled_cell_over_steps",
        '{"seed": 154, "batch": 4, "input": "sequence", "body": [["dense", {"units": 5, "activation": "relu", "bias": false, "flat": false}], ["fold", {"how": "minus_one"}, [["function", {"how": "recompute"}, [["recurrent", {"kind": "rnn", "units": 2, "sequences": false, "unroll": true, "back": false, "mask": false, "activation": "relu", "wrapped": "no"}]]]]], ["dense", {"units": 1, "activation": "linear", "bias": false, "flat": false}]], "loss": {"kind": "cosine", "reduction": "own_weights"}, "mode": {"level": "sum", "dynamic": true, "rule": "fixed", "poison": "inf"}}',
        WORKS,
    ),
    _case(
        "token_for_every_step_in_xla",
        '{"seed": 822, "batch": 5, "input": "vector", "body": [["elementwise", {"form": "atan2", "axis": "all"}], ["fold", {"how": "shape"}, [["twice", {"how": "other"}, [["append", {"form": "tile"}]]]]], ["elementwise", {"form": "lerp", "axis": "first"}]], "loss": {"kind": "huber", "reduction": "entries_mean"}, "mode": {"level": "sum", "dynamic": true, "jit": true, "rule": "fixed"}}',
        WORKS,
    ),
    _case(
        "dot_with_ones_of_steps",
        '{"seed": 513, "batch": 3, "input": "image", "body": [["depthwise", {"kind": "2d", "multiplier": 1, "kernel": 2, "padding": "same", "stride": 1}], ["gate_gradient", {"how": "first_feature"}], ["transformed", {"how": "normalise", "units": 2}], ["prelu", {"shared": false}]], "loss": {"kind": "sparse", "reduction": "dot"}, "mode": {"level": "minimize", "dynamic": true, "accumulate": 2, "rule": "fixed"}}',
        SAFE,
    ),
    _case(
        "compiled_call_of_a_loop_on_the_slow_path",
        '{"seed": 184, "batch": 4, "input": "sequence", "body": [["time_major", {"how": "recurrent"}], ["residual", {"how": "concat"}, [["norm", {"kind": "layer"}]]], ["dense", {"units": 3, "activation": "gelu", "bias": false, "flat": true}]], "loss": {"kind": "binary", "reduction": "mean", "weighted": true}, "mode": {"level": "minimize", "dynamic": true, "jit": true, "rule": "fixed"}}',
        WORKS,
    ),
    _case(
        "compiled_loop_over_examples",
        '{"seed": 688, "batch": 4, "input": "sequence", "body": [["residual", {"how": "add"}, [["transformed", {"how": "slice", "units": 2}], ["gate_gradient", {"how": "cumsum"}]]], ["each", {"how": "map_fn"}, [["elementwise", {"form": "maximum", "axis": "first"}], ["recurrent", {"kind": "lstm", "units": 2, "sequences": true, "unroll": true, "back": true, "mask": true, "activation": "relu", "wrapped": "cell"}]]]], "loss": {"kind": "smoothed", "reduction": "two", "weighted": true}, "mode": {"level": "sum", "dynamic": true, "jit": true, "rule": "automatic"}}',
        (REFUSED,),
        known="a loop over examples, copied for one example, ends in an error of XLA",
    ),
    _case(
        "compiled_recurrence_of_unknown_batches",
        '{"seed": 578, "batch": 6, "input": "tokens", "body": [["transformed_conv", {"how": "cast"}], ["gate_gradient", {"how": "one_hot"}], ["recurrent", {"kind": "rnn", "units": 3, "sequences": true, "unroll": false, "back": false, "mask": true, "activation": "relu", "wrapped": "bidirectional"}]], "loss": {"kind": "hinge", "reduction": "entries"}, "mode": {"level": "sum", "dynamic": true, "jit": true, "rule": "fixed"}}',
        WORKS,
    ),
    _case(
        "compiled_loop_of_unknown_rows",
        '{"seed": 938, "batch": 6, "input": "image", "body": [["locally_connected", {"filters": 2}], ["function", {"how": "custom"}, [["recurrent", {"kind": "rnn", "units": 2, "sequences": true, "unroll": false, "back": true, "mask": false, "activation": "tanh", "wrapped": "cell"}]]]], "loss": {"kind": "raw", "reduction": "own_focus", "head": false}, "mode": {"level": "sum", "dynamic": true, "jit": true, "rule": "fixed"}}',
        SAFE,
    ),
    # Ordinary models.
    _case(
        "coarse_tied_table",
        '{"input": "tokens", "body": [["tied_table", {"how": "mixed"}], ["function", {"how": "custom"}, [["dense"]]]], "mode": {"level": "minimize", "accumulate": 2, "dtype": "mixed_bfloat16", "rule": "layerwise"}}',
        WORKS,
    ),
    _case(
        "time_major_dense",
        '{"body": [["time_major", {"how": "dense"}]], "mode": {"dynamic": true}}',
        WORKS,
    ),
    _case(
        "branches_of_other_ranks_one_by_one",
        '{"input": "sequence", "body": [["penalty", {"how": "square"}], ["function", {"how": "twofold"}, [["cond", {"on": "variable"}, [["conv2d", {"stride": 2}], ["tied_table", {"how": "bag"}]]], ["time_distributed", {"layer": "gru"}]]]], "mode": {"level": "sum", "dynamic": true}}',
        WORKS,
    ),
    _case(
        "attention_over_rows_of_time_first",
        '{"input": "sequence", "body": [["fold", {"how": "transpose"}, [["attention"]]]]}',
    ),
    _case(
        "hinge",
        '{"body": [["dense", {}]], "loss": {"kind": "hinge", "reduction": "keras"}, '
        '"mode": {"level": "fit"}}',
        WORKS,
    ),
]
