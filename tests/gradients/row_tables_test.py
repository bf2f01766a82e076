"""Tables by which rows are compared: none is overlooked, whatever its size."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpclip.gradients import chance, row_tables

pytestmark = [
    pytest.mark.every_check,
    pytest.mark.filterwarnings("ignore::tfdpclip.gradients.JacobianFallbackWarning"),
]


@pytest.mark.slow
@pytest.mark.parametrize("width", [8, None])
def test_weights_of_the_comparison_have_no_blind_rows(width):
    """(a, -a) has a product 0 with half of all random signs; so have other patterns.

    All four products below 1 / 200 of the length: 2e-9 of draws of one row, so that
    1,200 rows raise a false alarm in 3e6 runs.
    """
    patterns = np.zeros([6, 8], np.float32)
    patterns[0, :2] = 1, -1
    patterns[1, :4] = 1, -1, 1, -1
    patterns[2] = 1
    patterns[3, 5] = 1
    patterns[4, :3] = 2, -1, -1
    patterns[5] = np.arange(8)
    patterns /= np.linalg.norm(patterns, axis=1, keepdims=True)
    table_of = table_maker(width)
    for _ in range(200):
        table = table_of(patterns)
        np.testing.assert_allclose(table[:, -1], 1, rtol=1e-6)
        assert np.abs(table[:, :-1]).max(1).min() > 1 / 200


def table_maker(width):
    @tf.function(input_signature=[tf.TensorSpec([None, width])])
    def table_of(rows):
        weights = row_tables.Weights(chance.run_seed())
        parts = row_tables.tables([(rows, row_tables.Layout())], weights)
        return row_tables.join(parts).joined

    return table_of


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-10, 1e10, 1e25])
def test_a_table_knows_how_large_rows_are_whose_squares_are_not_numbers(scale):
    """Below 1 / 200 of the length: 2e-9 of draws of one row, as above."""
    rows = scale * np.random.default_rng(0).standard_normal([50, 30])
    table = table_maker(30)(tf.constant(rows, tf.float32)).numpy()
    sizes = table[:, -1] / np.linalg.norm(rows, axis=1)
    assert sizes.min() > 1 / 200
    assert sizes.max() < 2 * np.sqrt(30)


def test_tables_of_no_rows_and_of_rows_of_nothing():
    assert table_maker(None)(tf.zeros([0, 3])).shape == [0, row_tables.WIDTH]
    for width in (0, None):
        found = table_maker(width)(tf.zeros([4, 0]))
        np.testing.assert_array_equal(found, np.zeros([4, row_tables.WIDTH]))
