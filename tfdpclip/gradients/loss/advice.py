"""Lines to write in the place of ops that combine the examples of a batch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import tensorflow as tf

from tfdpclip import _keras_marks
from tfdpclip.gradients.graph import ops

FIX = (
    "Give one loss per example instead: compile with "
    "loss=tf.keras.losses.MeanSquaredError(reduction='none') (or your own loss with "
    "reduction='none'), or pass the unreduced loss, of shape [batch], to "
    "optimizer.minimize(per_example_loss, variables, tape=tape)."
)
PER_EXAMPLE = (
    "average each example over its own entries: compile with "
    "loss=dpc.keras.PerExampleLoss(tf.keras.losses.SparseCategoricalCrossentropy("
    "from_logits=True)), or the loss that you use. "
)
BATCH_NORM = (
    "This is batch normalisation in training mode. Replace it: "
    "model = dpc.keras.convert_batchnorm(model) makes GroupNormalization of it; in a "
    "subclass of tf.keras.Model, write tf.keras.layers.GroupNormalization(8), with a "
    "number that divides the channels, for BatchNormalization(). Or freeze the layer "
    "with layer.trainable = False, as dpc.keras.film(model) does."
)
MASKED = (
    "A mean over the unmasked entries of the whole batch does this, which Keras makes "
    "of masks (mask_zero=True) and of ignore_class. In its place, " + PER_EXAMPLE + FIX
)
OTHERWISE = (
    "Make each example's loss of that example alone. In the place of a statistic of "
    "the batch take a constant, or one of the example's own entries: "
    "LayerNormalization or GroupNormalization; tf.reduce_mean(x, axis=-1); "
    "dpc.keras.PerExampleLoss(loss) for the mean over a masked sequence."
)
EQUALIZATION = (
    "keras.layers.Equalization takes one histogram of all images of a batch, so that "
    "how bright one image becomes is decided by all of them; RandAugment and AugMix "
    "contain that layer. Call it with single images, before batches are drawn: "
    "plan.batches((x, y)).map(lambda x, y: (layer(x[None])[0], y))."
)
ROUTER = (
    "A router's load-balancing loss does this: it looks at how the whole batch is "
    "dealt to the experts. Leave that add_loss out, or balance each example's own "
    "tokens: means over axis 1 of [batch, tokens, experts]. KerasHub's Mixtral always "
    "adds this loss: take another model."
)
LOOKUP = (
    "StringLookup, IntegerLookup and Hashing count so, where their output is one_hot, "
    'multi_hot or count. Say output_mode="int", and put an Embedding behind it, or '
    'tf.keras.layers.CategoryEncoding(n, output_mode="multi_hot"), which keeps '
    "examples apart."
)
OWN_NUMBER = (
    "Divide each example's sum by its own number: axis=-1 in both tf.reduce_sum, "
    "axis=(1, 2, 3) of images; or, where Keras divides by a mask, compile with "
    "loss=dpc.keras.PerExampleLoss(tf.keras.losses.MeanSquaredError())."
)
RAGGED = (
    "Rows of different lengths are in one list of all the examples, or padded to the "
    "longest row of the batch. Pad every batch to one length: "
    "TextVectorization(output_sequence_length=100) or "
    "rows.to_tensor(shape=[None, 100]), and leave the padding out by "
    "Embedding(..., mask_zero=True). Longer rows are cut."
)
# A pattern in the name of an op: a layer of experts, or of a router.
_IN_ROUTER = "(?i)(^|[/_])(moe|router|routing|experts?)([/_]|$)|load_balanc"


@dataclasses.dataclass(frozen=True)
class _Advice:
    """A sentence for some ops, or for ops of some layers.

    Attributes:
      text: the sentence, and a line to write.
      types: the types of the ops; empty for any type.
      names: a pattern in the names of the ops, which name layers and functions.
    """

    text: str
    types: frozenset[str] = frozenset()
    names: str = ""

    def fits(self, op: tf.Operation) -> bool:
        of_type = not self.types or op.type in self.types
        return of_type and (not self.names or bool(re.search(self.names, op.name)))


def _of(types: str, text: str, names: str = "") -> _Advice:
    return _Advice(text, frozenset(types.split()), names)


_IN_RAGGED = "(^|/)Ragged(Reduce|Expand|Gather|TensorToTensor)"
# The first entry that fits is given. Layers come before ops: the advice is closer.
_TABLE = (
    _of("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3", BATCH_NORM),
    _of("", BATCH_NORM, "/moments/"),
    _of("Bincount DenseBincount", EQUALIZATION, "equaliz|rand_aug|aug_mix"),
    _of("Bincount DenseBincount", LOOKUP, "lookup|hashing"),
    _of(
        "Bincount DenseBincount HistogramFixedWidth",
        "It counts the values of all the examples together. Count each example's own: "
        "tf.reduce_sum(tf.one_hot(x, depth), axis=1), for x of shape [batch, entries].",
    ),
    _of("Sum Mean Mul RealDiv MatMul", ROUTER, _IN_ROUTER),
    _of("", RAGGED, _IN_RAGGED),
    _of(
        "TopK TopKV2",
        "It puts the losses, or further numbers, of all the examples in order: all of "
        "them decide which of them are chosen. In the place of the largest few, give "
        "every example a loss that is a function of that example alone: "
        "tf.nn.relu(loss - threshold), say, with a threshold that is a constant.",
    ),
    _Advice(
        "It samples classes that were labels of this batch, or of earlier ones. Sample "
        "them with tf.random.log_uniform_candidate_sampler, uniform_candidate_sampler "
        "or fixed_unigram_candidate_sampler: their classes do not depend on the data.",
        frozenset(ops.LEARNING_SAMPLERS),
    ),
    _of(
        """Softmax LogSoftmax SoftmaxCrossEntropyWithLogits
        SparseSoftmaxCrossEntropyWithLogits""",
        "It compares each example with the rest of the batch, as in-batch "
        "contrastive losses do (SimCLR, CLIP, two towers). Compare it with candidates "
        "that come with the example, [batch, candidates, features], or with a constant "
        "table of public ones, or, for a softmax of the example's own: axis=-1.",
    ),
    _of(
        "MatMul BatchMatMulV2 BatchMatMulV3 Einsum",
        "It sums products over the examples, as do tf.tensordot(a, b, 2) and the "
        "correlations of a batch (Barlow Twins, VICReg). For one product per example "
        "write tf.reduce_sum(a * b, axis=-1, keepdims=True).",
    ),
    _of(
        "ReverseV2 Roll RandomShuffle",
        "It puts examples in each other's places, as MixUp and CutMix do. Leave that "
        "out, or mix each example with public data, which are constants, or with its "
        "own views: PrivacyPlan(..., views=2).",
    ),
    _of(
        "Where",
        "It lists at which places of all the examples a condition holds, as "
        "tf.boolean_mask(x, condition) does. Keep every row, and give the rows to be "
        "left out no weight: loss * tf.cast(condition, loss.dtype).",
    ),
    _of(
        """SegmentMax SegmentMaxV2 SegmentMean SegmentMin SegmentMinV2 SegmentProd
        SegmentProdV2 SegmentSum SegmentSumV2 SparseSegmentMean SparseSegmentSqrtN
        SparseSegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd
        UnsortedSegmentSum GatherV2 GatherNd ScatterNd TensorScatterAdd
        TensorScatterUpdate SparseTensorDenseMatMul""",
        "Its indices reach all the examples. Give the examples an axis of their own, "
        "[batch, entries, features], pad to one length, and work within each example: "
        "tf.reduce_sum(x, axis=1), tf.gather(x, places, batch_dims=1), or, for the "
        "messages of a graph, tf.matmul(tf.one_hot(receivers, nodes), messages, "
        "transpose_a=True).",
    ),
    _of(
        "Cumsum Cumprod CumulativeLogsumexp",
        "It adds up along the batch. Add up along the entries of each example: "
        "tf.cumsum(x, axis=1).",
    ),
    _of(
        """Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm L2Loss NthElement
        Sort""",
        "It makes one number of the whole batch: a mean, a variance, the largest entry."
        " Take that of each example's own entries, as in tf.reduce_mean(x, axis=-1, "
        "keepdims=True) or, for a Dice loss of images, tf.reduce_sum(y * y_pred, "
        "axis=(1, 2, 3)); or a constant. For the mean over masked sequences compile "
        "with loss=dpc.keras.PerExampleLoss(loss).",
    ),
)
# The advice for layers of a model, by patterns in the names of their classes.
_LAYERS = (
    ("BatchNormalization", BATCH_NORM),
    ("Equalization|RandAugment|AugMix", EQUALIZATION),
    ("Moe|MoE|Router|Experts", ROUTER),
)


def of(op: tf.Operation, tensor: tf.Tensor) -> str:
    """The sentence with a line to write in the place of an op that combined examples.

    Args:
      op: the op.
      tensor: the loss that depends on the op.
    """
    if _counts_entries(op, tensor):
        return MASKED
    return next((row.text for row in _TABLE if row.fits(op)), OTHERWISE)


def of_structure(op: tf.Operation, coupled: tf.Operation | None) -> str:
    """The sentence with a line to write in the place of a loss of unknown structure.

    Args:
      op: the op at which the loss cannot be taken apart.
      coupled: the op that combined examples earlier, if there is any.
    """
    for found in (op, coupled):
        if found is None:
            continue
        for row in _TABLE:
            if row.fits(found) and (row.names or found.type.endswith(_PRODUCTS)):
                return row.text
    return FIX


def of_divisor(behind: Iterable[tf.Operation]) -> str:
    """The sentence with a line to write in the place of a divisor of the batch.

    Args:
      behind: the ops that the divisor depends on.
    """
    ragged = any(re.search(_IN_RAGGED, op.name) for op in behind)
    return RAGGED if ragged else OWN_NUMBER


_PRODUCTS = ("MatMul", "MatMulV2", "MatMulV3", "Einsum")


def of_layers(names: Iterable[str]) -> str:
    """The sentence with a line to write in the place of layers that combine examples.

    Args:
      names: the names of the layers' classes.
    """
    names = list(names)
    for pattern, text in _LAYERS:
        if any(re.search(pattern, name) for name in names):
            return text
    return OTHERWISE


def has_own(op: tf.Operation) -> bool:
    """Whether an op is refused at every place, and not only behind a loss."""
    return op.type in _SELECTIONS


_SELECTIONS = frozenset(ops.LEARNING_SAMPLERS) | {
    *("Bincount", "DenseBincount", "TopK", "TopKV2")
}


def _counts_entries(op: tf.Operation, tensor: tf.Tensor) -> bool:
    """Whether this op counts the unmasked entries, where Keras reduces a loss."""
    scope, weighted, _ = tensor.op.name.partition(_keras_marks.WEIGHTED_LOSS)
    within = bool(scope and weighted) and op.name.startswith(scope)
    in_loss = within or _keras_marks.COMPILED_LOSS in op.name
    return in_loss and (op.type == "ScatterNd" or op.type == "Sum" and _is_mask(op))


def _is_mask(op: tf.Operation) -> bool:
    """Whether an op adds up booleans, and not numbers of a loss of one's own."""
    source = op.inputs[0].op
    while source.type in ("Identity", "Reshape"):
        source = source.inputs[0].op
    return source.type == "Cast" and source.inputs[0].dtype == tf.bool
