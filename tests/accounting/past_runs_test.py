"""What runs with tensorflow-privacy's optimizers cost."""

import pytest

from tfdpclip.accounting import past_run


def test_a_past_run_has_both_numbers():
    cost = past_run(60_000, 256, 20, 1.1, 1e-5, used_microbatching=False)
    assert cost.poisson == pytest.approx(1.32, abs=0.005)
    assert cost.shuffled == pytest.approx(66.9, abs=0.05)
    assert "66.9" in str(cost) and "replacing" in str(cost)


@pytest.mark.parametrize("microbatched", [False, True])
def test_a_past_run_is_the_statement_of_tensorflow_privacy_under_poisson_sampling(
    microbatched,
):
    lib = pytest.importorskip(
        "tensorflow_privacy.privacy.analysis.compute_dp_sgd_privacy_lib"
    )
    arguments = 60_000, 256, 20, 1.1, 1e-5, microbatched
    text = lib.compute_dp_sgd_privacy_statement(*arguments)
    theirs = float(text.split("Poisson sampling (*):")[1].split()[0])
    # Renyi accounting there is looser than privacy loss distributions here.
    cost = past_run(*arguments)
    assert 0.8 * theirs < cost.poisson < theirs
    # Replacing an example moves a microbatch by twice the clip norm, as an example.
    assert cost.shuffled == pytest.approx(66.9, abs=0.05)


def test_a_batch_beyond_the_data_is_refused():
    with pytest.raises(ValueError, match="batch_size must be at most"):
        past_run(100, 256, 20, 1.1, 1e-5)
