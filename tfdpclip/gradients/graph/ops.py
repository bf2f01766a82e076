"""Types of TensorFlow's ops, by what they do: each list stands here once.

Names only, and no behaviour: what follows from an op being on a list is where the list
is used. Whoever teaches the engine a new op comes here first (docs/architecture.md).
"""

from __future__ import annotations

# What calls functions.

#: Calls of a function that is not a branch or a loop.
FUNCTION_CALLS = frozenset("PartitionedCall StatefulPartitionedCall".split())

LOOPS = frozenset("While StatelessWhile".split())
BRANCHES = frozenset("If StatelessIf Case StatelessCase".split())
CONTROL_FLOW = LOOPS | BRANCHES

#: Every input of a call from this one on is an argument of its functions.
FIRST_ARGUMENT = {
    **dict.fromkeys(FUNCTION_CALLS | LOOPS, 0),
    **dict.fromkeys(BRANCHES, 1),
}

#: Which of their inputs are whole numbers that are no lengths: by how far, along which
#: axis, in which order.
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

#: Which of their inputs are places along each axis.
CUTS = {"StridedSlice": (1, 2), "Slice": (1, 2)}

# Where values come from.

#: Elements of data sets.
ITERATORS = frozenset("IteratorGetNext IteratorGetNextSync OptionalGetValue".split())

#: Random classes from the op's own seed, whatever the labels are that it is given.
CANDIDATE_SAMPLERS = frozenset(
    """FixedUnigramCandidateSampler LogUniformCandidateSampler UniformCandidateSampler
    AllCandidateSampler""".split()
)

#: Random classes that were among the labels before.
LEARNING_SAMPLERS = frozenset(
    "LearnedUnigramCandidateSampler ThreadUnsafeUnigramCandidateSampler".split()
)

#: Random numbers from the op's own seed.
DRAWS = CANDIDATE_SAMPLERS | frozenset(
    """RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal
    ParameterizedTruncatedNormal RandomGamma RandomPoisson RandomPoissonV2
    RandomShuffle Multinomial MultinomialV2 RandomBinomial""".split()
)

#: Random numbers from a generator that is a variable.
GENERATORS = frozenset(
    """RngReadAndSkip RngSkip StatefulUniform StatefulUniformInt
    StatefulUniformFullInt StatefulStandardNormalV2 StatefulTruncatedNormal
    StatefulRandomBinomial""".split()
)

#: Other random numbers.
OTHER_DRAWS = frozenset(
    "RandomCrop StatefulStandardNormal NonDeterministicInts".split()
)

RANDOM = DRAWS | GENERATORS | OTHER_DRAWS

#: How the names of random numbers begin that depend on a seed alone.
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

#: Python code.
PYTHON = frozenset("EagerPyFunc PyFunc PyFuncStateless".split())

#: What reads a variable and changes nothing.
READS = frozenset(
    """ReadVariableOp ResourceGather ResourceGatherNd VariableShape
    VarIsInitializedOp""".split()
)

#: The same of a lookup table.
TABLE_READS = frozenset("LookupTableFind LookupTableFindV2 LookupTableSizeV2".split())

#: Without inputs: the same for good, or public randomness.
PUBLIC_LEAVES = frozenset(
    """Const VarHandleOp NoOp DummySeedGenerator AnonymousRandomSeedGenerator
    AnonymousSeedGenerator""".split()
)

# How the names of ops begin by which replicas and machines exchange tensors.
COLLECTIVES = ("Collective", "Nccl")

#: Not marked as stateful, and yet more than a function of their inputs' values.
FROM_OUTSIDE = frozenset(
    """PyFuncStateless ReadFile MatchingFiles TensorArrayReadV3 GetSessionTensor
    GetSessionHandle ImmutableConst""".split()
)

#: Marked as stateful, and the same result for the same inputs.
DETERMINISTIC = frozenset(
    """Assert CheckNumerics CheckNumericsV2 HashTableV2 LookupTableFindV2
    LookupTableSizeV2 ReadVariableOp ResourceGather ResourceGatherNd
    VariableShape""".split()
)

#: Tensors that are kept while a graph runs once.
OF_ONE_RUN = frozenset(
    """ImmutableConst TensorArrayV3 TensorArrayReadV3 TensorArrayWriteV3
    TensorArraySizeV3 TensorArrayScatterV3 TensorArrayGatherV3 TensorArrayConcatV3
    TensorArraySplitV3 TensorArrayCloseV3 TensorArrayGradV3""".split()
)

#: What writes to a variable.
WRITES = frozenset(
    """AssignVariableOp AssignAddVariableOp AssignSubVariableOp ResourceScatterAdd
    ResourceScatterSub ResourceScatterMul ResourceScatterDiv ResourceScatterMin
    ResourceScatterMax ResourceScatterUpdate ResourceScatterNdAdd
    ResourceScatterNdSub ResourceScatterNdUpdate""".split()
)

#: Marked as stateful, and nothing of an earlier batch comes out of it; variables do.
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

#: What makes a tensor of a shape that it is given.
SHAPERS = frozenset(
    """Fill BroadcastTo Tile RandomUniform RandomUniformInt RandomStandardNormal
    TruncatedNormal StatelessRandomUniform StatelessRandomUniformV2
    StatelessRandomNormal StatelessRandomNormalV2 StatelessTruncatedNormalV2
    StatefulUniform StatefulStandardNormalV2 Range LinSpace Empty EmptyTensorList
    TensorListReserve""".split()
)

#: Which of their inputs is the shape of the output, or how often an axis is repeated.
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

# What happens to values.

#: How large a tensor is.
SIZES = frozenset("Shape ShapeN Size Rank".split())

#: The same entries, in the same order.
SAME_ENTRIES = frozenset("Identity Cast Reshape Squeeze ExpandDims EnsureShape".split())

#: What no gradient passes.
NO_GRADIENT = frozenset("StopGradient PreventGradient".split())

#: The same numbers, to whoever does not differentiate.
SAME_NUMBERS = SAME_ENTRIES | {"StopGradient"}

#: The same entries of a variable, perhaps in another order.
ISOMETRIES = SAME_ENTRIES | {"ReadVariableOp", "Transpose"}

#: What divides a tensor.
PIECES = frozenset("Split SplitV Unpack".split())

#: One number divided by another.
QUOTIENTS = frozenset("RealDiv Div DivNoNan".split())

#: Each entry from the same entries of the inputs, with broadcasting.
ELEMENTWISE = frozenset(
    """Abs Acos Acosh Add AddN AddV2 Angle ApproximateEqual AsString Asin Asinh Atan
    Atan2 Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0
    BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Betainc BiasAdd Bitcast BitwiseAnd
    BitwiseOr BitwiseXor Bucketize Cast Ceil CheckNumerics CheckNumericsV2
    ClipByValue Complex ComplexAbs Conj Copy CopyHost Cos Cosh Dawsn DebugIdentityV2
    DecodeBase64 Digamma Div DivNoNan Elu EluGrad EncodeBase64 EnsureShape Equal Erf
    Erfc Erfinv Exp Expint Expm1 FakeQuantWithMinMaxArgs Floor FloorDiv FloorMod
    FresnelCos FresnelSin Greater GreaterEqual Identity Igamma IgammaGradA Igammac
    Imag Inv InvGrad Invert IsFinite IsInf IsNan LeakyRelu LeakyReluGrad LeftShift
    Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum
    Mod Mul MulNoNan Ndtri Neg NextAfter NotEqual OnesLike PlaceholderWithDefault
    Polygamma PopulationCount Pow PreventGradient RandomGammaGrad Real RealDiv
    Reciprocal ReciprocalGrad RegexFullMatch RegexReplace Relu Relu6 Relu6Grad
    ReluGrad RightShift Rint Round Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad
    Sigmoid SigmoidGrad Sign Sin Sinh Snapshot Softplus SoftplusGrad Softsign
    SoftsignGrad Spence Sqrt SqrtGrad Square SquaredDifference StaticRegexFullMatch
    StaticRegexReplace StopGradient StringLength StringLower StringStrip
    StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber
    StringUpper Sub Substr Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py
    Xlogy ZerosLike Zeta""".split()
)

#: Nothing of the values of their input.
VALUELESS = frozenset("ZerosLike OnesLike".split())

#: Each row on axis 0 from the same row.
ROW_BY_ROW = frozenset(
    """ResizeNearestNeighbor ImageProjectiveTransformV2 ImageProjectiveTransformV3
    DepthToSpace SpaceToDepth Multinomial StatelessMultinomial""".split()
)

#: Over the axes that are the second input.
REDUCTIONS = frozenset(
    """Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm""".split()
)

#: Along the last axis.
LAST_AXIS = frozenset("Softmax LogSoftmax".split())

#: Along the axis that is the second input.
SCANS = frozenset("Cumsum Cumprod CumulativeLogsumexp".split())

#: Whose kernel may have groups.
CONVOLUTIONS = frozenset("Conv2D Conv3D".split())

#: Whose inputs need not have as many axes as their outputs.
CONTRACTIONS = frozenset(
    """MatMul Einsum Conv2D Conv3D DepthwiseConv2dNative Conv2DBackpropInput
    Conv3DBackpropInputV2 ResourceGather GatherV2""".split()
)

#: Lists of tensors with nothing in them.
NEW_LISTS = frozenset("TensorListReserve EmptyTensorList".split())

# What data decide about.

#: As many entries as the data of the whole batch say: a mask's, for one.
DATA_SHAPED = frozenset(
    """Where Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2 DynamicPartition
    ListDiff""".split()
)

#: Rows of different lengths, made as long as the longest of the batch.
PADDED = frozenset(["RaggedTensorToTensor"])

#: Sums and copies whose places are data: where one example goes, another may, too.
BY_PLACE = frozenset(
    """SegmentSum SegmentMean SegmentMax SegmentMin SegmentProd SegmentSumV2
    SegmentProdV2 SegmentMaxV2 SegmentMinV2 UnsortedSegmentSum UnsortedSegmentMax
    UnsortedSegmentMin UnsortedSegmentProd SparseSegmentSum SparseSegmentMean
    SparseSegmentSqrtN SparseSegmentSumWithNumSegments
    SparseSegmentMeanWithNumSegments SparseSegmentSqrtNWithNumSegments Bincount
    DenseBincount SparseBincount RaggedBincount ScatterNd ScatterNdNonAliasingAdd
    TensorScatterUpdate TensorScatterAdd TensorScatterSub TensorScatterMax
    TensorScatterMin SparseReduceSum SparseReduceMax SparseToDense DynamicStitch
    ParallelDynamicStitch""".split()
)

#: To places along the first axes.
SCATTERS = frozenset(
    """ScatterNd TensorScatterUpdate TensorScatterAdd TensorScatterSub
    TensorScatterMax TensorScatterMin""".split()
)

#: Rows of a table.
LOOKUPS = frozenset("ResourceGather GatherV2".split())

#: Of the rows with the same number.
SEGMENT_SUMS = frozenset(
    """SegmentSum SegmentMean SegmentMax SegmentMin SegmentProd""".split()
)

#: The same, of rows that are looked up first.
SEGMENT_LOOKUPS = frozenset(
    """SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN""".split()
)

# What gradients do.

#: Types whose registered gradient keeps the examples apart where the op itself does:
#: the backward lemma of `isolation_proof.py`, tried by tests/gradients/lemmas_test.py.
GRADIENTS_APART = frozenset(
    """Abs Acos Acosh Add AddN AddV2 Angle ApproxTopK ArgMax ArgMin Asin Asinh Atan
    Atan2 Atanh AvgPool AvgPool3D BandedTriangularSolve BatchMatMul BatchMatMulV2
    BatchMatMulV3 BatchToSpaceND BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0
    BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Betainc BiasAdd
    BroadcastTo CTCLoss CTCLossV2 Cast Ceil CheckNumerics CheckNumericsV2 Cholesky
    ClipByValue Complex ComplexAbs ConcatV2 Conj ConjugateTranspose Conv2D
    Conv2DBackpropInput Conv3D Conv3DBackpropInputV2 Cos Cosh Cross Cumprod Cumsum
    CumulativeLogsumexp Dawsn DebugIdentityV2 DepthToSpace DepthwiseConv2dNative
    Digamma Dilation2D Div DivNoNan Eig Einsum Elu EluGrad EnsureShape Erf Erfc
    Erfinv EuclideanNorm Exp ExpandDims Expint Expm1 ExtractImagePatches FFT FFT2D
    FFT3D FakeQuantWithMinMaxArgs Fill Floor FloorDiv FloorMod FresnelCos FresnelSin
    FusedBatchNormV3 Gather GatherNd GatherV2 IFFT IFFT2D IFFT3D IRFFT IRFFT2D
    Identity IdentityN Igamma Igammac Imag ImageProjectiveTransformV2
    ImageProjectiveTransformV3 Inv InvGrad IsotonicRegression LRN LeakyRelu
    LeakyReluGrad Lgamma Log Log1p LogMatrixDeterminant LogSoftmax MatMul
    MatrixBandPart MatrixDeterminant MatrixDiag MatrixDiagPart MatrixDiagPartV2
    MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixInverse MatrixSetDiag
    MatrixSetDiagV2 MatrixSetDiagV3 MatrixSolve MatrixSolveLs MatrixSquareRoot
    MatrixTriangularSolve Max MaxPool MaxPool3D MaxPoolV2 MaxPoolWithArgmax Maximum
    Mean Min Minimum MirrorPad Mul MulNoNan Ndtri Neg NextAfter NthElement Pack Pad
    PadV2 PlaceholderWithDefault Polygamma Pow PreventGradient Prod Qr
    QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 RFFT
    RFFT2D RGBToHSV RandomGamma Real RealDiv Reciprocal ReciprocalGrad Relu Relu6
    Relu6Grad ReluGrad Reshape ResizeBicubic ResizeBilinear ResizeNearestNeighbor
    ResourceGather ReverseV2 Rint Roll Round Rsqrt RsqrtGrad ScatterNd SegmentMax
    SegmentMean SegmentMin SegmentProd SegmentSum Select SelectV2 SelfAdjointEigV2
    Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Slice Softmax
    SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad Softsign SpaceToBatchND
    SpaceToDepth SparseFillEmptyRows SparseMatMul SparseReorder SparseSegmentMean
    SparseSegmentMeanWithNumSegments SparseSegmentSqrtN
    SparseSegmentSqrtNWithNumSegments SparseSegmentSum
    SparseSegmentSumWithNumSegments SparseSoftmax SparseSoftmaxCrossEntropyWithLogits
    SparseTensorDenseMatMul SparseToDense Spence Split SplitV Sqrt SqrtGrad Square
    SquaredDifference Squeeze StridedSlice Sub Sum Svd Tan Tanh TanhGrad
    TensorListFromTensor TensorListGetItem TensorListPopBack TensorListPushBack
    TensorListSetItem TensorListStack TensorScatterAdd TensorScatterMax
    TensorScatterMin TensorScatterSub TensorScatterUpdate Tile TopK TopKV2 Transpose
    TridiagonalSolve TruncateDiv Unpack UnsortedSegmentMax UnsortedSegmentMin
    UnsortedSegmentProd UnsortedSegmentSum Xdivy Xlog1py Xlogy Zeta""".split()
)
