"""Lists of TensorFlow's op types, by the behaviour of the ops.

The lists hold names only. The modules that read a list hold the consequences of being
on the list. To teach the engine a new op, begin here (docs/architecture.md).
"""

from __future__ import annotations

# Ops that call functions.

#: Calls of a function that is not a branch or a loop.
FUNCTION_CALLS = frozenset("PartitionedCall StatefulPartitionedCall".split())

LOOPS = frozenset("While StatelessWhile".split())
BRANCHES = frozenset("If StatelessIf Case StatelessCase".split())
CONTROL_FLOW = LOOPS | BRANCHES

#: The number of the first input that is an argument of the called functions.
FIRST_ARGUMENT = {
    **dict.fromkeys(FUNCTION_CALLS | LOOPS, 0),
    **dict.fromkeys(BRANCHES, 1),
}

#: The numbers of the inputs that are integers but no lengths: shifts, axes and orders.
CHOOSERS = {
    "Roll": (1, 2),
    "Transpose": (1,),
    "Cumsum": (1,),
    "Cumprod": (1,),
    "ReverseV2": (1,),
    "ReverseSequence": (1,),
    "GatherV2": (1,),
    "Fill": (1,),
    "BroadcastTo": (0,),
    "Tile": (0,),
    "Pad": (1,),
    "PadV2": (1,),
    "MirrorPad": (1,),
    "TopKV2": (1,),
    "MatrixBandPart": (1, 2),
    "ResizeArea": (1,),
    "ResizeBicubic": (1,),
    "ResizeBilinear": (1,),
    "ResizeNearestNeighbor": (1,),
}

#: The numbers of the inputs that are positions along each axis.
CUTS = {"StridedSlice": (1, 2), "Slice": (1, 2)}

# Origins of values.

#: Ops that return elements of data sets.
ITERATORS = frozenset("IteratorGetNext IteratorGetNextSync OptionalGetValue".split())

#: Ops that draw random classes from the op's seed, independently of the labels.
CANDIDATE_SAMPLERS = frozenset(
    """FixedUnigramCandidateSampler LogUniformCandidateSampler UniformCandidateSampler
    AllCandidateSampler""".split()
)

#: Ops that draw random classes from the labels of earlier batches.
LEARNING_SAMPLERS = frozenset(
    "LearnedUnigramCandidateSampler ThreadUnsafeUnigramCandidateSampler".split()
)

#: Ops that draw random numbers from the op's own seed.
DRAWS = CANDIDATE_SAMPLERS | frozenset(
    """RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal
    ParameterizedTruncatedNormal RandomGamma RandomPoisson RandomPoissonV2
    RandomShuffle Multinomial MultinomialV2 RandomBinomial""".split()
)

#: Ops that draw random numbers from a generator, the state of which is a variable.
GENERATORS = frozenset(
    """RngReadAndSkip RngSkip StatefulUniform StatefulUniformInt
    StatefulUniformFullInt StatefulStandardNormalV2 StatefulTruncatedNormal
    StatefulRandomBinomial""".split()
)

#: The remaining ops that draw random numbers.
OTHER_DRAWS = frozenset(
    "RandomCrop StatefulStandardNormal NonDeterministicInts".split()
)

RANDOM = DRAWS | GENERATORS | OTHER_DRAWS

#: Prefixes of the types of ops that draw random numbers from an input seed alone.
SEEDED_DRAWS = (
    "StatelessRandomUniform",
    "StatelessRandomNormal",
    "StatelessTruncatedNormal",
    "StatelessMultinomial",
    "StatelessRandomBinomial",
    "StatelessRandomPoisson",
    "StatelessRandomGamma",
    "StatelessParameterizedTruncatedNormal",
    "StatelessShuffle",
)

#: Ops that TensorFlow runs in the order of the trace, among them ops of gradients.
CHAINED = frozenset("Assert CheckNumerics CheckNumericsV2 If PrintV2".split())

#: Ops that run Python code.
PYTHON = frozenset("EagerPyFunc PyFunc PyFuncStateless".split())

#: Ops that read a variable and change nothing.
READS = frozenset(
    """ReadVariableOp ResourceGather ResourceGatherNd VariableShape
    VarIsInitializedOp""".split()
)

#: Ops that read a lookup table and change nothing.
TABLE_READS = frozenset("LookupTableFind LookupTableFindV2 LookupTableSizeV2".split())

#: Ops without inputs: their outputs are constants or public randomness.
PUBLIC_LEAVES = frozenset(
    """Const VarHandleOp NoOp DummySeedGenerator AnonymousRandomSeedGenerator
    AnonymousSeedGenerator""".split()
)

#: Prefixes of the types of ops by which replicas and machines exchange tensors.
COLLECTIVES = ("Collective", "Nccl")

#: Ops without TensorFlow's stateful mark that depend on more than their inputs' values.
FROM_OUTSIDE = frozenset(
    """PyFuncStateless ReadFile MatchingFiles TensorArrayReadV3 GetSessionTensor
    GetSessionHandle ImmutableConst""".split()
)

#: Ops with TensorFlow's stateful mark and the same result for the same inputs.
DETERMINISTIC = frozenset(
    """Assert CheckNumerics CheckNumericsV2 HashTableV2 LookupTableFindV2
    LookupTableSizeV2 ReadVariableOp ResourceGather ResourceGatherNd
    VariableShape""".split()
)

#: Ops on tensors that live for a single run of a graph.
OF_ONE_RUN = frozenset(
    """ImmutableConst TensorArrayV3 TensorArrayReadV3 TensorArrayWriteV3
    TensorArraySizeV3 TensorArrayScatterV3 TensorArrayGatherV3 TensorArrayConcatV3
    TensorArraySplitV3 TensorArrayCloseV3 TensorArrayGradV3""".split()
)

#: Ops that write to a variable.
WRITES = frozenset(
    """AssignVariableOp AssignAddVariableOp AssignSubVariableOp ResourceScatterAdd
    ResourceScatterSub ResourceScatterMul ResourceScatterDiv ResourceScatterMin
    ResourceScatterMax ResourceScatterUpdate ResourceScatterNdAdd
    ResourceScatterNdSub ResourceScatterNdUpdate""".split()
)

#: Ops with TensorFlow's stateful mark that keep no data of earlier batches. Variables
#: may keep such data, and `state.find_state_reads` looks for them.
KEEPS_NOTHING = (
    DETERMINISTIC
    | READS
    | WRITES
    | RANDOM
    | ITERATORS
    | PUBLIC_LEAVES
    | OF_ONE_RUN
    | frozenset(
        """LookupTableFind LookupTableSize HashTable Placeholder Print PrintV2 Timestamp
        CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackprop CudnnRNNBackpropV2
        CudnnRNNBackpropV3 XlaLaunch WriteSummary WriteScalarSummary
        WriteHistogramSummary WriteImageSummary""".split()
    )
)

#: Ops that make a new tensor in the shape, or of the length, that an input gives.
SHAPERS = frozenset(
    """Fill BroadcastTo Tile RandomUniform RandomUniformInt RandomStandardNormal
    TruncatedNormal StatelessRandomUniform StatelessRandomUniformV2
    StatelessRandomNormal StatelessRandomNormalV2 StatelessTruncatedNormalV2
    StatefulUniform StatefulStandardNormalV2 Range LinSpace Empty EmptyTensorList
    TensorListReserve""".split()
)

#: The number of the input that is the shape of the output, or the repeats of each axis.
SHAPE_INPUTS = {
    **dict.fromkeys(("Reshape", "BroadcastTo", "Tile", "SparseToDense"), 1),
    **dict.fromkeys("ScatterNd StatefulUniform StatefulStandardNormalV2".split(), 2),
    **dict.fromkeys(
        """Fill Empty Conv2DBackpropInput Conv3DBackpropInputV2 RandomUniform
        RandomUniformInt RandomStandardNormal TruncatedNormal RandomGamma
        RandomPoissonV2 StatelessRandomUniform StatelessRandomUniformV2
        StatelessRandomNormal StatelessRandomNormalV2 StatelessTruncatedNormal
        StatelessTruncatedNormalV2""".split(),
        0,
    ),
}

# Ops by their effect on values.

#: Ops that return the size of a tensor.
SIZES = frozenset("Shape ShapeN Size Rank".split())

#: Ops that keep all entries, in the same order.
SAME_ENTRIES = frozenset("Identity Cast Reshape Squeeze ExpandDims EnsureShape".split())

#: Ops that pass no gradient.
NO_GRADIENT = frozenset("StopGradient PreventGradient".split())

#: Ops that keep all entries in the forward pass.
SAME_NUMBERS = SAME_ENTRIES | {"StopGradient"}

#: Ops that keep all entries of a variable, perhaps in a different order.
ISOMETRIES = SAME_ENTRIES | {"ReadVariableOp", "Transpose"}

#: Ops that divide a tensor into pieces.
PIECES = frozenset("Split SplitV Unpack".split())

#: Ops that divide the first input by the second.
QUOTIENTS = frozenset("RealDiv Div DivNoNan".split())

#: Ops that compute each entry from the same entry of every input, with broadcasting.
ELEMENTWISE = frozenset(
    """Abs AddN AddV2 AsString BiasAdd BitwiseOr Bucketize Cast Ceil Complex ComplexAbs
    Cos DivNoNan Elu EluGrad EnsureShape Equal Erf Erfc Exp Expm1 Floor FloorDiv
    FloorMod Greater GreaterEqual Identity Imag IsFinite IsNan LeakyRelu
    LeakyReluGrad LeftShift Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr
    Maximum Minimum Mul MulNoNan Neg NotEqual OnesLike Pow Real RealDiv Reciprocal
    ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad RightShift Round Rsqrt RsqrtGrad
    Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Softplus SoftplusGrad
    Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference StaticRegexReplace
    StopGradient StringLower StringToHashBucketFast StringToHashBucketStrong Sub Tan
    Tanh TanhGrad ZerosLike""".split()
)

#: Ops that ignore the values of their input.
VALUELESS = frozenset("ZerosLike OnesLike".split())

#: Ops that compute each row on axis 0 from the same row of the input.
ROW_BY_ROW = frozenset(
    """DepthToSpace ImageProjectiveTransformV3 ResizeNearestNeighbor""".split()
)

#: Reductions over the axes in the second input.
REDUCTIONS = frozenset("All Any ArgMax ArgMin Max Mean Min Sum".split())

#: Ops that combine entries along the last axis.
LAST_AXIS = frozenset("Softmax LogSoftmax".split())

#: Scans along the axis in the second input.
SCANS = frozenset("Cumprod Cumsum CumulativeLogsumexp".split())

#: Convolutions with a kernel that may have feature groups.
CONVOLUTIONS = frozenset("Conv2D Conv3D".split())

#: Contractions and lookups: inputs and outputs may differ in their number of axes.
CONTRACTIONS = frozenset(
    """MatMul Einsum Conv2D Conv3D DepthwiseConv2dNative Conv2DBackpropInput
    Conv3DBackpropInputV2 ResourceGather GatherV2""".split()
)

#: Ops that make an empty list of tensors.
NEW_LISTS = frozenset("TensorListReserve EmptyTensorList".split())

# Ops with shapes or positions that depend on the data.

#: Ops with an output length that depends on the data of the whole batch, as by a mask.
DATA_SHAPED = frozenset(
    """Where Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2 DynamicPartition
    ListDiff""".split()
)

#: CTC losses of sparse labels, a list of the labels of all examples.
CTC = frozenset("CTCLoss CTCLossV2".split())

#: Sums and copies to positions that are data: several examples may share a position.
BY_PLACE = frozenset(
    """Bincount DenseBincount RaggedBincount SegmentSum SparseSegmentMean
    SparseSegmentSqrtN SparseSegmentSum SparseToDense UnsortedSegmentSum""".split()
)

#: Ops that write to positions along the first axes.
SCATTERS = frozenset("ScatterNd TensorScatterAdd".split())

#: Ops that look up rows of a table.
LOOKUPS = frozenset("ResourceGather GatherV2".split())

#: Ops that look up rows and combine the rows with the same segment number.
SEGMENT_LOOKUPS = frozenset(
    """SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN""".split()
)

# Gradients.

#: If an op of these types keeps the examples apart, so does its registered gradient:
#: the backward lemma of `isolation_proof.py`, tried by tests/gradients/lemmas_test.py.
GRADIENTS_APART = frozenset(
    """Abs AddN AddV2 ArgMax ArgMin AvgPool AvgPool3D BatchMatMulV2 BatchMatMulV3
    BatchToSpaceND BiasAdd BroadcastTo CTCLoss CTCLossV2 Cast Ceil Complex
    ComplexAbs ConcatV2 Conv2D Conv2DBackpropInput Conv3D Conv3DBackpropInputV2 Cos
    Cumprod Cumsum CumulativeLogsumexp DepthToSpace DepthwiseConv2dNative DivNoNan
    Einsum Elu EluGrad EnsureShape Erf Erfc Exp ExpandDims Expm1 ExtractImagePatches
    FFT2D Fill Floor FloorDiv FloorMod FusedBatchNormV3 GatherNd GatherV2 Identity
    IdentityN Imag ImageProjectiveTransformV3 LeakyRelu LeakyReluGrad Log Log1p
    LogSoftmax MatMul Max MaxPool MaxPool3D Maximum Mean Min Minimum MirrorPad Mul
    MulNoNan Neg Pack Pad PadV2 Pow RFFT Real RealDiv Reciprocal ReciprocalGrad Relu
    Relu6 Relu6Grad ReluGrad Reshape ResizeBilinear ResizeNearestNeighbor
    ResourceGather ReverseV2 Roll Round Rsqrt RsqrtGrad ScatterNd SegmentSum Select
    SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Slice Softmax
    SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad Softsign SpaceToBatchND
    SparseFillEmptyRows SparseMatMul SparseReorder SparseSegmentMean
    SparseSegmentSqrtN SparseSegmentSum SparseSoftmaxCrossEntropyWithLogits
    SparseTensorDenseMatMul SparseToDense Split SplitV Sqrt SqrtGrad Square
    SquaredDifference Squeeze StridedSlice Sub Sum Tan Tanh TanhGrad
    TensorListFromTensor TensorListGetItem TensorListPopBack TensorListPushBack
    TensorListSetItem TensorListStack TensorScatterAdd Tile TopKV2 Transpose Unpack
    UnsortedSegmentSum""".split()
)
