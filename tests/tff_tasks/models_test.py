"""Networks have the paper's sizes; losses and metrics mask the documented tokens."""

import numpy as np
import pytest
import tensorflow as tf

from tff_tasks import models, objectives, registry


@pytest.mark.parametrize(
    "name, options, parameters, tensors",
    [
        ("cifar100_image", {}, 11_227_812, 62),
        ("cifar100_image", {"norm": "2_groups"}, 11_218_212, 22),
        ("emnist_character", {}, 1_206_590, 8),
        ("emnist_character", {"only_digits": True}, 1_199_882, 8),
        ("emnist_character", {"model_id": "cnn"}, 1_690_046, 8),
        ("emnist_character", {"model_id": "cnn", "only_digits": True}, 1_663_370, 8),
        ("emnist_character", {"model_id": "2nn"}, 209_662, 6),
        ("emnist_character", {"model_id": "2nn", "only_digits": True}, 199_210, 6),
        ("emnist_autoencoder", {}, 2_837_314, 16),
        ("shakespeare_character", {}, 820_522, 9),
        ("digits", {}, 2_410, 4),
    ],
)
@pytest.mark.slow
def test_parameters(name, options, parameters, tensors):
    model = registry.TASKS[name](options).build_model()
    assert model.count_params() == parameters
    assert len(model.trainable_variables) == tensors
    assert not model.non_trainable_variables


@pytest.mark.slow
def test_parameters_with_full_vocabularies():
    task = registry.TASKS["stackoverflow_word"]()
    task.words = [f"w{i}" for i in range(10_000)]
    model = task.build_model()
    assert model.count_params() == 4_050_748 and len(model.trainable_variables) == 8
    task = registry.TASKS["stackoverflow_tag"]()
    task.words, task.tags = [""] * 10_000, [""] * 500
    assert task.build_model().count_params() == 5_000_500


@pytest.mark.slow
def test_resnet_never_reduces_after_the_stem():
    model = models.resnet18()
    shapes = [layer.output_shape[1] for layer in model.layers[3:-3]]
    convolutions = [
        layer for layer in model.layers if isinstance(layer, tf.keras.layers.Conv2D)
    ]
    assert len(convolutions) == 20
    assert not any(layer.use_bias for layer in convolutions)
    assert set(shapes) == {12, 6}
    assert {layer.output_shape[1] for layer in convolutions[1:]} == {6}
    # One penalty for each convolution, the last kernel and the last bias.
    assert len(model.losses) == 22


@pytest.mark.slow
def test_resnet_normalises_before_activation():
    model = models.resnet18()
    for norm in [x for x in model.layers if "group_normalization" in x.name]:
        after = norm.outbound_nodes[0].layer
        # Only a projected shortcut is added without an activation.
        assert isinstance(after, (tf.keras.layers.ReLU, tf.keras.layers.Add))


def test_padding_counts_in_the_loss_unless_masked():
    logits = tf.constant(np.random.default_rng(0).normal(size=(2, 4, 5)), tf.float32)
    targets = tf.constant([[1, 2, 0, 0], [3, 0, 0, 0]])
    each = tf.keras.losses.sparse_categorical_crossentropy(targets, logits, True)
    plain = objectives.SequenceCrossEntropy(False)(targets, logits)
    masked = objectives.SequenceCrossEntropy()(targets, logits)
    assert float(plain) == pytest.approx(float(tf.reduce_mean(each)), rel=1e-6)
    kept = tf.boolean_mask(each, targets != 0)
    assert float(masked) == pytest.approx(float(tf.reduce_mean(kept)), rel=1e-6)
    none = objectives.SequenceCrossEntropy(True)(tf.zeros_like(targets), logits)
    assert float(none) == 0


@pytest.mark.parametrize(
    "build", [lambda: models.character_lstm(90, 6), lambda: models.word_lstm(30, 6)]
)
@pytest.mark.slow
def test_no_mask_leaves_the_network(build):
    model = build()
    ids = tf.constant([[5, 6, 7, 0, 0, 0]])
    targets = tf.constant([[6, 7, 0, 0, 0, 0]])
    loss = objectives.SequenceCrossEntropy()
    direct = model(ids)
    assert getattr(direct, "_keras_mask", None) is None
    across = loss(targets, tf.constant(direct.numpy()))
    assert float(loss(targets, direct)) == pytest.approx(float(across), rel=1e-6)
    # Padding does not move the recurrent state: outputs stay as they were.
    assert np.ptp(direct.numpy()[0, 2:], axis=0).max() == 0
    assert np.ptp(direct.numpy()[0, :3], axis=0).max() > 0


def test_accuracies_leave_out_what_they_say():
    # Vocabulary: 0 pads, 1 and 2 are words, 3 is unknown, 5 ends.
    targets = tf.constant([[1, 2, 3, 5, 0, 0]])
    predicted = tf.constant([[1, 1, 3, 5, 0, 0]])
    logits = tf.one_hot(predicted, 6)
    expected = {(0,): 3 / 4, (0, 3): 2 / 3, (0, 3, 5): 1 / 2}
    for excluded, value in expected.items():
        metric = objectives.AccuracyWithout(excluded)
        metric.update_state(targets, logits)
        assert float(metric.result()) == pytest.approx(value)
        again = objectives.AccuracyWithout.from_config(metric.get_config())
        assert again.excluded == list(excluded)
    count = objectives.PositionCount()
    count.update_state(targets, logits)
    assert float(count.result()) == 4


def test_recall_is_pooled_over_examples():
    scores = tf.constant([[0.9, 0.8, 0.1, 0.2], [0.1, 0.2, 0.3, 0.4]])
    tags = tf.constant([[1.0, 0, 1, 0], [0, 0, 0, 1]])
    metric = objectives.RecallAt(2)
    metric.update_state(tags, scores)
    assert float(metric.result()) == pytest.approx(2 / 3)
    assert objectives.RecallAt.from_config(metric.get_config()).top_k == 2


def test_autoencoder_loss_is_summed_over_the_batch_unless_later():
    x, y = tf.zeros([4, 784]), tf.ones([4, 784]) / 2
    losses = [
        registry.TASKS["emnist_autoencoder"]({"loss_reduction": how}).loss()(x, y)
        for how in ("sum", "mean")
    ]
    assert [float(loss) for loss in losses] == pytest.approx([1.0, 0.25])


def test_tag_loss_is_a_mean_over_tags_and_a_sum_over_examples():
    task = registry.TASKS["stackoverflow_tag"]()
    y = tf.constant([[1.0, 0.0], [0.0, 0.0]])
    loss = task.loss()(y, tf.fill([2, 2], 0.5))
    assert float(loss) == pytest.approx(2 * np.log(2), rel=1e-5)
