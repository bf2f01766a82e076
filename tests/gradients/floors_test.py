"""Norms from inner products are never too small, and right where nothing cancels."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip.gradients.forms import floors
from tfdpclip.gradients.forms.base_form import Budget
from tfdpclip.gradients.forms.convolution import Convolution
from tfdpclip.gradients.forms.geometry import Geometry
from tfdpclip.gradients.forms.lookup import Lookup
from tfdpclip.gradients.forms.outer import Outer

COUNT = 16
BUDGET = Budget(2**30, COUNT)


def truth(x, z):
    """Norms, and the roots of the summed squares of the terms, in float64."""
    x, z = np.float64(x), np.float64(z)
    grams = (x @ np.swapaxes(x, -1, -2)) * (z @ np.swapaxes(z, -1, -2))
    squares = grams.sum((-1, -2))
    parts = np.trace(grams, axis1=-1, axis2=-2)
    return np.sqrt(np.maximum(squares, 0)), np.sqrt(parts)


def clusters(rng, steps, width, gap):
    """Two groups of equal terms that nearly cancel; every entry of a row is the same.

    Rounding errors of equal terms have the same sign, so they add up in inner products.
    """
    near = rng.uniform(0.5, 1, [COUNT, 1, 1])
    far = near * (1 + gap * rng.uniform(-1, 1, [COUNT, 1, 1]))
    first = np.arange(steps)[:, np.newaxis] % 2 == 0
    return np.where(first, near, far) * np.ones([COUNT, steps, width])


def random_pairs(rng, steps, width, gap):
    near = rng.standard_normal([COUNT, (steps + 1) // 2, width])
    far = near + gap * rng.standard_normal(near.shape)
    return np.concatenate([near, far], 1)[:, :steps]


def one_then_small(rng, steps, width, gap):
    """A large entry first, followed by small entries that it absorbs."""
    x = np.full([COUNT, steps, width], 2.0**-12.6)
    x[..., 0] = 1.0
    return x * (1 + gap * rng.uniform(-1, 1, [COUNT, steps, 1]))


PATTERNS = [clusters, random_pairs, one_then_small]
gram = tf.function(floors.gram_norms)
compiled = tf.function(floors.gram_norms, jit_compile=True)


def cancelling(rng, pattern, steps, width, units, scale=1.0):
    gap = 10 ** rng.uniform(-6, -0.5, [COUNT, 1, 1])
    x = pattern(rng, steps, width, gap)
    signs = np.where(np.arange(steps) % 2 == 0, 1, -1)[:, np.newaxis]
    if pattern is random_pairs:
        signs = np.where(np.arange(steps) < (steps + 1) // 2, 1, -1)[:, np.newaxis]
    z = signs * np.ones([COUNT, steps, units]) * rng.uniform(0.5, 1, [COUNT, 1, 1])
    return np.float32(x * scale), np.float32(z / scale)


def share(steps):
    """The floor of a norm, as a share of the root of the squares of `steps` parts."""
    return min(steps**0.5 / 32, 1 / 4)


def assert_sound(norms, x, z, shortfall):
    wanted, parts = truth(x, z)
    assert np.all(norms >= wanted * (1 - shortfall)), np.min(norms / wanted)
    least = share(x.shape[-2]) * parts
    assert np.all(norms >= least * (1 - 1e-5))
    # Above the floor, a norm is not far above the true norm.
    assert np.all(norms <= np.maximum(wanted * 1.001 + 2e-3 * parts, 1.03 * least))


# The allowed shortfall of a norm. Long runs of terms whose rounding errors all have the
# same sign, and which cancel by half, are the worst.
SHORTFALL = {2: 1e-4, 3: 1e-4, 8: 2e-4, 16: 4e-4, 64: 1e-3}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("steps", SHORTFALL)
@pytest.mark.parametrize("width", [16, 300, 2048, 4096])
@pytest.mark.thinned(21)
def test_gram_norms_of_terms_that_cancel(pattern, steps, width):
    rng = np.random.default_rng([steps, width])
    for units in (8, 1024) if steps <= 8 else (64,):
        x, z = cancelling(rng, pattern, steps, width, units)
        assert_sound(gram(x, z) ** 0.5, x, z, SHORTFALL[steps])


@pytest.mark.parametrize("scale", [1e-20, 1e-12, 1e12, 1e20])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gram_norms_at_any_scale(pattern, scale):
    rng = np.random.default_rng(5)
    x, z = cancelling(rng, pattern, 3, 100, 16, scale)
    assert_sound(gram(x, z) ** 0.5, x, z, 1e-4)


def test_steps_of_opposite_scales_are_all_seen():
    """A huge input meets a tiny gradient at one step, and the reverse at the next."""
    x = np.ones([1, 2, 4], np.float32) * np.float32([[1e18], [1e-18]])
    z = np.ones([1, 2, 3], np.float32) * np.float32([[1e-18], [1e18]])
    wanted, parts = truth(x, z)
    np.testing.assert_allclose(gram(x, z) ** 0.5, wanted, rtol=1e-5)
    found = floors.outer_parts(tf.constant(x), tf.constant(z))
    np.testing.assert_allclose(found**0.5, parts, rtol=1e-5)


def test_zeros_times_something_huge_are_zero():
    x, z = tf.fill([1, 2, 4], 3e38), tf.zeros([1, 2, 3])
    assert gram(x, z)[0] == 0
    assert floors.outer_parts(x, z)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("steps", SHORTFALL)
@pytest.mark.parametrize("width", [16, 300, 2048, 4096])
def test_compiled_gram_norms_of_terms_that_cancel(pattern, steps, width):
    rng = np.random.default_rng([steps, width])
    x, z = cancelling(rng, pattern, steps, width, 64)
    assert_sound(compiled(x, z) ** 0.5, x, z, SHORTFALL[steps])


@pytest.mark.parametrize("steps", [1, 2, 7, 30, 64, 200])
def test_gram_norms_of_ordinary_terms_are_exact(steps):
    rng = np.random.default_rng(steps)
    x = np.float32(rng.standard_normal([COUNT, steps, 300]))
    z = np.float32(rng.standard_normal([COUNT, steps, 40]))
    np.testing.assert_allclose(gram(x, z) ** 0.5, truth(x, z)[0], rtol=1e-5)
    x, z = np.abs(x), np.abs(z)
    np.testing.assert_allclose(gram(x, z) ** 0.5, truth(x, z)[0], rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 3])
def test_groups_of_outer_products(groups):
    rng = np.random.default_rng(groups)
    made = [cancelling(rng, clusters, 4, 64, 48) for _ in range(groups)]
    x, z = (np.stack(parts, 1) for parts in zip(*made, strict=True))
    each = [truth(*part) for part in made]
    wanted = np.sqrt(sum(n**2 for n, _ in each))
    parts = np.sqrt(sum(r**2 for _, r in each))
    norms = gram(x, z) ** 0.5
    assert np.all(norms >= wanted * (1 - 1e-4))
    assert np.all(norms >= share(4) * parts * (1 - 1e-5))


@pytest.mark.parametrize("steps", [2, 5, 60])
@pytest.mark.parametrize("memory", [1, 2**30])
def test_outer_forms_that_are_not_kept_have_floors(steps, memory):
    rng = np.random.default_rng(steps)
    x, z = cancelling(rng, clusters, steps, 40, 30)
    form = Outer(tf.constant(x), tf.constant(z), lambda p, _: p, [40, 30], steps, ())
    measured = form.measured(Budget(memory, COUNT))
    norms = measured.squared_norms**0.5
    wanted, parts = truth(x, z)
    # Kept gradients are the summed gradients, and need no floor.
    keeps = len(measured.saved) == 1
    if not keeps:
        assert np.all(norms >= wanted * (1 - 1e-4))
        assert np.all(norms >= share(steps) * parts * (1 - 1e-5))
    assert keeps == (steps >= 60)
    np.testing.assert_allclose(form.part_squares(), parts**2, rtol=1e-5)


@pytest.mark.parametrize("steps", [4, 40])
@pytest.mark.parametrize("equal", [True, False])
def test_lookups_have_floors(steps, equal):
    rng = np.random.default_rng(steps)
    _, z = cancelling(rng, random_pairs, steps, 4, 6)
    gap = 1 + 1e-5 * rng.uniform(-1, 1, z.shape)
    z = np.float32(z * gap)
    ids = np.zeros([COUNT, steps], np.int32)
    if not equal:
        ids += np.arange(steps, dtype=np.int32)
    form = Lookup(tf.constant(ids), tf.constant(z), [50, 6], steps)
    norms = form.squared_norms(BUDGET) ** 0.5
    table = np.zeros([COUNT, 50, 6])
    for i in range(COUNT):
        np.add.at(table[i], ids[i], np.float64(z[i]))
    wanted = np.sqrt((table**2).sum((1, 2)))
    parts = np.sqrt((np.float64(z) ** 2).sum((1, 2)))
    assert np.all(norms >= wanted * (1 - 1e-4))
    assert np.all(norms >= share(steps) * parts * (1 - 1e-5))
    if not equal:
        np.testing.assert_allclose(norms, wanted, rtol=1e-5)


GEOMETRIES = {
    "plain": (Geometry((3, 2), (1, 1), (1, 1), "SAME"), [3, 2, 4, 6], 6),
    "strided": (Geometry((2, 2), (2, 1), (1, 1), "VALID"), [2, 2, 4, 6], 6),
    "groups": (Geometry((3, 3), (1, 1), (1, 1), "SAME", groups=2), [3, 3, 2, 6], 6),
    "depthwise": (
        Geometry((3, 3), (1, 1), (1, 1), "SAME", depthwise=True),
        [3, 3, 4, 2],
        8,
    ),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_parts_of_convolutions_are_those_of_every_position(name):
    """Sums over positions equal a loop over the positions."""
    geometry, shape, units = GEOMETRIES[name]
    rng = np.random.default_rng(0)
    big = tf.constant(rng.standard_normal([3, 6, 5, 4]), tf.float32)
    places = [6, 5] if name != "strided" else [3, 4]
    small = rng.standard_normal([3, *places, units]).astype(np.float32)
    form = Convolution(big, tf.constant(small), geometry, shape, tf.constant(3), 1)
    total = np.zeros(3)
    for i in range(places[0]):
        for j in range(places[1]):
            one = np.zeros_like(small)
            one[:, i, j] = small[:, i, j]
            alone = Convolution(big, tf.constant(one), geometry, shape, 3, 1)
            total += (alone.gradients().numpy() ** 2).sum((1, 2, 3, 4))
    np.testing.assert_allclose(form.part_squares(), total, rtol=1e-4)


@pytest.mark.parametrize("memory", [1, 2**30])
def test_filters_that_are_not_kept_have_floors(memory):
    geometry = Geometry((1, 1), (1, 1), (1, 1), "SAME")
    rng = np.random.default_rng(1)
    x, z = cancelling(rng, clusters, 4, 200, 64)
    big, small = (tf.constant(t.reshape([COUNT, 2, 2, -1])) for t in (x, z))
    form = Convolution(big, small, geometry, [1, 1, 200, 64], tf.constant(COUNT), 1)
    measured = form.measured(Budget(memory, COUNT))
    norms = measured.squared_norms**0.5
    wanted, parts = truth(x, z)
    assert measured.saved == form.saved()
    assert np.all(norms >= wanted * (1 - 1e-4))
    assert np.all(norms >= share(4) * parts * (1 - 1e-5))


#: (sizes of the image, settings, channels, channels of a position).
CONVOLUTIONS = {
    "plain": ((5, 6), Geometry((3, 2), (1, 1), (1, 1), "SAME"), 4, 3),
    "strided": ((7, 6), Geometry((3, 3), (2, 3), (1, 1), "SAME"), 2, 5),
    "wider strides than filters": (
        (7, 6),
        Geometry((1, 1), (2, 2), (1, 1), "SAME"),
        2,
        5,
    ),
    "valid and dilated": ((8, 7), Geometry((2, 3), (1, 1), (3, 2), "VALID"), 3, 2),
    "padded": ((5, 4), Geometry((3, 3), (1, 2), (1, 1), ((2, 0), (1, 3))), 3, 2),
    "in groups": ((5, 6), Geometry((3, 2), (2, 2), (1, 1), "SAME", groups=2), 4, 6),
    "by depth": (
        (5, 6),
        Geometry((3, 3), (1, 1), (1, 1), "SAME", depthwise=True),
        4,
        8,
    ),
    "of three dimensions": (
        (4, 5, 3),
        Geometry((2, 3, 1), (2, 1, 1), (1, 1, 1), "VALID"),
        2,
        3,
    ),
}


@pytest.mark.parametrize("examples, rows", [(3, 1), (2, 2), (0, 1)])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_squares_of_a_convolutions_terms_are_those_of_its_places(name, examples, rows):
    image, geometry, channels, features = CONVOLUTIONS[name]
    groups = channels if geometry.depthwise else geometry.groups
    rng = np.random.default_rng(0)
    pads, places = [(0, 0)], []
    for size, k, s, d, axis in zip(
        image,
        geometry.kernel,
        geometry.strides,
        geometry.dilations,
        range(len(image)),
        strict=True,
    ):
        reach = (k - 1) * d + 1
        before, after = 0, 0
        out = -(-size // s)
        if geometry.padding == "SAME":
            total = max((out - 1) * s + reach - size, 0)
            before, after = total // 2, total - total // 2
        elif geometry.padding != "VALID":
            before, after = geometry.padding[axis]
        pads.append((before, after))
        if geometry.padding != "SAME":
            out = (size + before + after - reach) // s + 1
        places.append([range(i * s, i * s + reach, d) for i in range(out)])
    big = rng.standard_normal((examples * rows, *image, channels)).astype("float32")
    positions = [len(p) for p in places]
    small = rng.standard_normal((len(big), *positions, features)).astype("float32")
    padded = np.pad(big, [*pads, (0, 0)]).astype(np.float64)
    expected = np.zeros(examples)
    for place in itertools.product(*map(range, positions)):
        patch = padded[
            np.ix_(range(len(big)), *(p[i] for p, i in zip(places, place, strict=True)))
        ]
        at = small[(slice(None), *place)].astype(np.float64)
        squares = []
        for part, width in ((patch, channels // groups), (at, features // groups)):
            shape = [-1, groups, width]
            rows_of = [np.square(row.reshape(shape)).sum((0, 2)) for row in part]
            squares.append(np.reshape(rows_of, [len(big), groups]))
        by_row = np.sum(squares[0] * squares[1], axis=1)
        expected += by_row.reshape([examples, rows]).sum(1)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, *[None] * len(image), t.shape[-1]])
            for t in (big, small)
        ]
    )
    def found(big, small):
        count = tf.shape(big)[0] // rows
        form = Convolution(big, small, geometry, [1], count, rows)
        return form.part_squares()

    np.testing.assert_allclose(found(big, small), expected, rtol=1e-5)
