"""Every line of code in a message is copied from the message and run.

`tests/advice_situations_test.py` makes users' mistakes, and takes the lines from the
errors. Here are the lines of all messages, as the source has them: a line is run with
names that a user of the message has (`tests/advised_names.py`). A new message with a
line that does not run there fails, until `COMPLETED` has what the message fills in, or
`NO_LINES` says why there is nothing to run.
"""

from __future__ import annotations

import re

import pytest
import tensorflow as tf

from tests.advice_lines_test import _calls, _messages
from tests.advised_names import Names, run
from tests.stack import FEDERATED, KERAS_3

# What a message fills in, or leaves to its reader: `value` and `...` in the source.
COMPLETED = {
    "AvailableCohorts(AvailableClients(...), available)": (
        "AvailableCohorts(AvailableClients(2, 2), available)"
    ),
    "BufferedToeplitz(...)": "BufferedToeplitz(2, 4, separated)",
    "BufferedToeplitz(3, steps, scheme, Workload(momentum=value))": (
        "BufferedToeplitz(3, steps, scheme, Workload(momentum=0.9))"
    ),
    "Ledger.load(value)": "Ledger.load(path)",
    "PrivacyBudget(..., allow_change=True)": (
        "PrivacyBudget(8.0, 1e-3, batches, allow_change=True)"
    ),
    "PrivacyBudget(..., ledger=path)": "PrivacyBudget(8.0, 1e-3, batches, ledger=path)",
    "PrivacyBudget(..., value)": (
        "PrivacyBudget(8.0, 1e-3, batches, allow_outside_updates=True)"
    ),
    "PrivacyBudget(epsilon, delta, batches, secret=...)": (
        "PrivacyBudget(epsilon, delta, batches, secret=secret)"
    ),
    "PrivacyPlan(..., batch_size=...)": "PrivacyPlan(8, 1e-3, 32, batch_size=8)",
    "PrivacyPlan(..., examples=value)": "PrivacyPlan(8, 1e-3, examples=32)",
    "PrivacyPlan(..., ledger=path)": (
        "PrivacyPlan(8, 1e-3, 32, allow_change=True, ledger=path)"
    ),
    "PrivacyPlan(..., momentum=value)": (
        "PrivacyPlan(8, 1e-3, 32, batch_size=8, epochs=1, noise='buffered', "
        "momentum=0.9)"
    ),
    "PrivacyPlan(..., noise=...)": "PrivacyPlan(8, 1e-3, 32, noise='tree')",
    "PrivacyPlan(..., per_person=8)": "PrivacyPlan(8, 1e-3, 32, per_person=8)",
    "PrivacyPlan(..., physical_batch_size=...)": (
        "PrivacyPlan(8, 1e-3, 32, physical_batch_size=8)"
    ),
    "PrivacyPlan(..., physical_batch_size=value)": (
        "PrivacyPlan(8, 1e-3, 32, physical_batch_size=8)"
    ),
    "PrivacyPlan(..., value=...)": "PrivacyPlan(8, 1e-3, 32, epochs=3)",
    "PrivacyPlan(..., views=2)": "PrivacyPlan(8, 1e-3, 32, views=2)",
    "PrivateStatistics(..., examples=value)": (
        "PrivateStatistics(8.0, 1e-3, releases=2, examples=32)"
    ),
    "PrivateStatistics(..., releases=value)": (
        "PrivateStatistics(8.0, 1e-3, examples=32, releases=3)"
    ),
    "RoundBudget(..., aggregator=aggregator)": (
        "RoundBudget(8.0, 1e-3, cohorts, aggregator=aggregator)"
    ),
    "SecureSettings(bits=...)": "SecureSettings(bits=24)",
    "SecureSettings(bits=value)": "SecureSettings(bits=28)",
    "Stream(..., folder=...)": "Stream(dataset, examples=32, folder=folder)",
    "Stream(read, ...)": "Stream(read, examples=32, folder=folder)",
    'TrainingPlan(..., unit="person")': 'TrainingPlan(scheme, z, steps, unit="person")',
    "batches((x, y))": "scheme.batches((x, y))",
    "batches((x, y), seed=1)": "scheme.batches((x, y), seed=1)",
    "batches(data)": "scheme.batches(data)",
    "batches(dpc.sampling.Stream(data, examples=..., folder=...))": (
        "epoch.batches(dpc.sampling.Stream(data, examples=32, folder=folder))"
    ),
    "batches.map(lambda value: ...)": "batches.map(lambda x, y: (x * 2, y))",
    "clipped_mean(...)": "clipped_mean(1.1, 8)",
    "clipped_mean(..., noise=dpc.CorrelatedNoise(...))": (
        "clipped_mean(2.0, 2, noise=dpc.CorrelatedNoise(matrix, 4, separated))"
    ),
    "clipped_mean(..., value=...)": "clipped_mean(1.1, 8, weight_cap=10)",
    "clipped_mean(..., weight_cap=100)": "clipped_mean(1.1, 8, weight_cap=100)",
    "clipped_mean(value)": "clipped_mean(noise_multiplier=1.1, clients_per_round=8)",
    'clipped_mean(z, ..., noise="distributed")': (
        "clipped_mean(z, 8, clip=1.0, secure=True, minimum_clients=6, "
        'noise="distributed")'
    ),
    "dataset.map(..., num_parallel_calls=tf.data.AUTOTUNE)": (
        "dataset.map(lambda x, y: (x, y), num_parallel_calls=tf.data.AUTOTUNE)"
    ),
    "dict(value)": "dict(frame)",
    "dpc.FixedClip(...)": "dpc.FixedClip(1.0)",
    "dpc.federated.clipped_mean(...)": "dpc.federated.clipped_mean(1.1, 8)",
    "dpc.federated.clipped_mean(..., seed=...)": (
        "dpc.federated.clipped_mean(1.1, 8, seed=5)"
    ),
    "dpc.federated.clipped_mean(..., weight_cap=100)": (
        "dpc.federated.clipped_mean(1.1, 8, weight_cap=100)"
    ),
    "dpc.federated.clipped_mean(1.1, 100, clip=1.0, noise=dpc.CorrelatedNoise(...))": (
        "dpc.federated.clipped_mean(1.1, 100, clip=1.0, "
        "noise=dpc.CorrelatedNoise(matrix, 4, separated))"
    ),
    "dpc.gradients.op_flow(value)": "dpc.gradients.op_flow('Igammac')",
    "dpc.keras.DPAdagrad(1e-2, value)": (
        "dpc.keras.DPAdagrad(1e-2, clip=1.0, noise_multiplier=1.1, "
        "expected_batch_size=256)"
    ),
    "dpc.keras.DPAdam(1e-3, value)": (
        "dpc.keras.DPAdam(1e-3, clip=1.0, noise_multiplier=1.1, "
        "expected_batch_size=256)"
    ),
    "dpc.keras.DPRMSprop(1e-3, value)": (
        "dpc.keras.DPRMSprop(1e-3, clip=1.0, noise_multiplier=1.1, "
        "expected_batch_size=256)"
    ),
    "dpc.keras.DPSGD(...)": (
        "dpc.keras.DPSGD(0.1, noise_multiplier=1.1, expected_batch_size=8)"
    ),
    "dpc.keras.DPSGD(..., public_variables=['anchor'])": (
        "dpc.keras.DPSGD(0.1, noise_multiplier=1.1, expected_batch_size=8, "
        "public_variables=['anchor'])"
    ),
    "dpc.keras.DPSGD(..., public_variables=[value])": (
        "dpc.keras.DPSGD(0.1, noise_multiplier=1.1, expected_batch_size=8, "
        "public_variables=['metric'])"
    ),
    "dpc.keras.DPSGD(0.1, value)": (
        "dpc.keras.DPSGD(0.1, clip=1.0, noise_multiplier=1.1, expected_batch_size=256)"
    ),
    (
        "dpc.keras.PrivacyBudget(plan.epsilon, plan.delta, batches, "
        "ledger=plan.ledger, value)"
    ): (
        "dpc.keras.PrivacyBudget(plan.epsilon, plan.delta, batches, "
        "ledger=plan.ledger, allow_outside_updates=True)"
    ),
    "dpc.keras.PrivateStatistics(...)": (
        "dpc.keras.PrivateStatistics(8.0, 1e-3, examples=32, releases=2)"
    ),
    "dpc.sampling.Stream(dataset, examples=..., folder=...)": (
        "dpc.sampling.Stream(dataset, examples=32, folder=folder)"
    ),
    "fit(batches, ...)": (
        "model.fit(batches, epochs=1, verbose=0, callbacks=plan.callbacks)"
    ),
    "layer.add_weight(..., trainable=False)": (
        "layer.add_weight(name='total', shape=(2,), trainable=False)"
    ),
    "ledger.begin(..., change=True)": (
        "ledger.begin(noise_multiplier=1.1, sampling=scheme, change=True)"
    ),
    (
        "ledger.begin(..., noise_multiplier=optimizer.noise_multiplier, "
        "unit=optimizer.unit)"
    ): (
        "ledger.begin(sampling=scheme, "
        "noise_multiplier=optimizer.noise_multiplier, unit=optimizer.unit)"
    ),
    "ledger.begin(..., sampling=batches)": (
        "ledger.begin(noise_multiplier=1.1, sampling=batches)"
    ),
    "lookup(value[value].tolist())": "lookup(people['city'].tolist())",
    "map(..., num_parallel_calls=tf.data.AUTOTUNE)": (
        "dataset.map(lambda x, y: (x, y), num_parallel_calls=tf.data.AUTOTUNE)"
    ),
    "map(..., public=[array])": (
        "batches.map(lambda x, y: (x + array, y), public=[array])"
    ),
    "map(..., public=[content])": (
        "batches.map(lambda x, y: (x + content, y), public=[content])"
    ),
    "map(..., public=[variable])": (
        "batches.map(lambda x, y: (x + variable, y), public=[variable])"
    ),
    "map(lambda x, y: (x, lookup(y)))": "texts.map(lambda x, y: (x, lookup(y)))",
    "model.build(...)": "model.build((None, 2))",
    "model.compile(..., weighted_metrics=[...])": (
        "model.compile(optimizer, loss, weighted_metrics=['accuracy'])"
    ),
    "model.compile(plan.optimizer(...), loss)": (
        "model.compile(plan.optimizer(dpc.keras.DPSGD, 0.1), loss)"
    ),
    "model.fit(..., callbacks=[dpc.keras.PublicBatchStatistics(public_x)])": (
        "model.fit(x, y, callbacks=[dpc.keras.PublicBatchStatistics(public_x)])"
    ),
    "model.fit(batches, ...)": (
        "model.fit(batches, epochs=1, verbose=0, callbacks=plan.callbacks)"
    ),
    "model.fit(plan.batches((x, y)), ...)": (
        "model.fit(plan.batches((x, y)), verbose=0, callbacks=plan.callbacks)"
    ),
    "np.nan_to_num(value, nan=0.0)": "np.nan_to_num(gaps, nan=0.0)",
    "np.nan_to_num(value, nan=40.0)": "np.nan_to_num(gaps, nan=40.0)",
    "np.nan_to_num(value.to_numpy(float), nan=40.0)": (
        "np.nan_to_num(frame['a'].to_numpy(float), nan=40.0)"
    ),
    "np.stack(value)": "np.stack(rows_of_x)",
    "np.unique(list(map(str, value)), return_inverse=True)": (
        "np.unique(list(map(str, mixed)), return_inverse=True)"
    ),
    "np.unique(value, return_inverse=True)": "np.unique(y, return_inverse=True)",
    "pandas.to_numeric(value)": "pandas.to_numeric(frame['a'].astype(str))",
    "plan.aggregator(...)": "rounds_plan.aggregator(clip=1.0)",
    "plan.batches((x, (value), (value)))": (
        "plan.batches((x, (y, y), (weights, weights)))"
    ),
    "plan.batches(..., people=ids)": "plan.batches((x, y), people=ids)",
    "plan.optimizer(...)": "plan.optimizer(dpc.keras.DPAdam, 1e-3)",
    "plan.optimizer(..., public_variables=[variable])": (
        "plan.optimizer(dpc.keras.DPAdam, 1e-3, public_variables=[variable])"
    ),
    "plan.replace(momentum=value)": "buffered_plan.replace(momentum=0.9)",
    "plan.statement()": "used_plan.statement()",
    "sampling.value.batches(data)": "sampling.Poisson(0.1).batches(data)",
    "scheme.batches(...)": "scheme.batches((x, y))",
    "scheme.batches(data, accumulation_steps=value, independent_groups=True)": (
        "scheme.batches(data, accumulation_steps=2, independent_groups=True)"
    ),
    "scheme.batches(data, views=value)": "scheme.batches(data, views=2)",
    "sorted(value)": "sorted({1, 2})",
    "statistics.moments(x, low=..., high=...)": (
        "statistics.moments(x, low=-1.0, high=1.0)"
    ),
    "statistics.vocabulary(framevalue)": "statistics.vocabulary(frame['city'])",
    "statistics.vocabulary(value)": "statistics.vocabulary(people['city'])",
    "tf.Variable(value, trainable=False, name='anchor')": (
        "tf.Variable(x, trainable=False, name='anchor')"
    ),
    "tf.ensure_shape(x, [...])": "tf.ensure_shape(x, [32, 2])",
    "tf.keras.layers.StringLookup(vocabulary=...)": (
        "tf.keras.layers.StringLookup(vocabulary=words)"
    ),
    "tf.keras.utils.pad_sequences(value, padding='post')": (
        "tf.keras.utils.pad_sequences([[1], [2, 3]], padding='post')"
    ),
    "tf.sparse.to_dense(value)": "tf.sparse.to_dense(sparse)",
    "tf.where(step % 1000 < 100, ...)": "tf.where(step % 1000 < 100, 2.0, 1.0)",
    "value((public_x, public_y))": (
        "dpc.keras.PublicGradientNorms((public_x, public_y))"
    ),
    "value(0.1, noise_multiplier=1.1, expected_batch_size=256)": (
        "dpc.keras.DPSGD(0.1, noise_multiplier=1.1, expected_batch_size=256)"
    ),
    "value(learning_rate=0.1, noise_multiplier=1.1, expected_batch_size=256)": (
        "dpc.keras.DPAdam(learning_rate=0.1, noise_multiplier=1.1, "
        "expected_batch_size=256)"
    ),
    "value(vocabulary=statistics.vocabulary(values).tokens)": (
        "tf.keras.layers.StringLookup(vocabulary=statistics.vocabulary(values).tokens)"
    ),
    "np.argmax(value, axis=-1)": "np.argmax(np.eye(3)[y], axis=-1)",
    "value.astype('float32')": "y.astype('float32')",
    "value.filled(0)": "values_with_masks.filled(0)",
    "values.filled(40.0)": "values_with_masks.filled(40.0)",
    "value.fillna(40.0)": "frame['a'].fillna(40.0)",
    "value.to_numpy()": "frame['a'].to_numpy()",
    "value.to_tensor(shape=[None, 50])": "rows.to_tensor(shape=[None, 50])",
    "value.toarray()": "scipy_sparse.toarray()",
    "x.to_tensor(shape=...)": "x.to_tensor(shape=[None, 4])",
    "PrivateStatistics(..., examples=len(x))": (
        "PrivateStatistics(8.0, 1e-3, examples=len(x))"
    ),
    "PrivateStatistics(..., releases=2)": (
        "PrivateStatistics(8.0, 1e-3, examples=32, releases=2)"
    ),
    "PrivateStatistics(..., people=ids)": (
        "PrivateStatistics(8.0, 1e-3, 8, 2, people=ids)"
    ),
    "PrivacyPlan(..., population=value)": (
        "dpc.federated.PrivacyPlan(8, 1e-3, clients_per_round=8, rounds=4, "
        "population=32)"
    ),
    "Embedding(..., mask_zero=True)": "Embedding(10, 3, mask_zero=True)",
}

# Parts of sentences, not lines to write: by the reason.
NO_LINES = {
    "a pattern of names of ops": ["Ragged(Reduce|Expand|Gather|TensorToTensor)"],
    "a scheme, matrix, rule or layer that a sentence is about": [
        "MySchedule(...)",
        "RoundBudget.round()",
        "round()",
        "fit(...)",
        "compile()",
        "list(func)",
        "get_config()",
        "next(iterator)",
    ],
    "methods of a class of the user's, and their arguments": [
        "clip_norm(state)",
        "indicators(norms, state, present)",
        "initial_state()",
        "next_state(...)",
        "next_state(state, fractions)",
        "noise_scales(state)",
        "noising(n)",
        "sensitivity(state)",
        "strategy(n)",
        "stream()",
        "weights(norms, state)",
        "restart(keep=True)",
        "use.summed(values)",
        "optimizer.scale_loss(loss)",
    ],
    "methods of data sets that a sentence names": [
        "batch()",
        "map()",
        "map_batches()",
        "repeat()",
        "take()",
        "unbatch()",
        "fileno()",
    ],
    "the name of an op, as a pattern": [
        "DP(Sequential|Model)",
        "LookupTable(Insert|Import)",
        "Queue(En|De)",
        "tf.add_n(total_loss_mean_values)",
    ],
    "arithmetic in a sentence": [
        "sqrt(2)",
        "sqrt(steps)",
        "ledger.begin()",
        "ledger.record(n)",
    ],
    "values that are shown, with the name of their class": [
        "value(...)",
        "value(value)",
        "value(state)",
        "value(rate, per_person=value)",
    ],
    "within a comprehension of the line": [
        "pandas.isna(v)",
        "str(name)",
        "str(number)",
        "str(v)",
        "str(value)",
        "text.encode('utf-8', 'replace')",
    ],
    "rounds of clients: tests/federated runs them": [
        "process.next(state, ...)",
        "process.next(state, [data[c] for c in cohort])",
        "budget.round(state)",
        "budget.round()",
        "create(value_type, tff.TensorType(np.float32))",
        "dpc.federated.split_noise(state)",
        "split_noise(state)",
        "save(path)",
        "NoiseMemory.load(path)",
        "epsilon(delta, rounds)",
        "dpc.federated.InnerSum(factory)",
        "dpc.federated.InnerSum(factory, inflation=1.0)",
        "RoundBudget(..., continued=memory.steps)",
    ],
    "results and queries: tests/tuning and tests/tensorflow_privacy_test.py": [
        "recipe.refine(result)",
        "from_query(query, records=100)",
    ],
    "within a layer's call: tests/keras/compile_test.py": [
        "self.add_loss(tf.reduce_mean(losses))"
    ],
    "files of the reader": ['dpc.accounting.Ledger.load("run/privacy.json")'],
}


def _lines() -> dict[str, list[str]]:
    """The calls of all messages that are in no other call, with their places."""
    found: dict[str, list[str]] = {}
    for place, text in _messages():
        if "Raises:" in text or "Args:" in text:
            continue
        outermost = ""
        for call in _calls(text):
            if call not in outermost:
                outermost = call
                found.setdefault(call, []).append(place)
    return found


LINES = _lines()
_REASONS = {line: reason for reason, lines in NO_LINES.items() for line in lines}
_OF_CLIENTS = re.compile(r"clipped_mean|dpc\.federated|tff\.|Secure|aggregator")
_SLOW = re.compile(
    r"\bfit\(|step\(|minimize|search_privacy|statement\(|momentum=|norms\(|run\("
    r"|assert_exact|check_isolation|BufferedToeplitz|lambda value|class_weight"
)


def _pattern(line: str) -> str:
    return ".*" + re.escape(line).replace("value", ".+").replace(r"\.\.\.", ".*")


def test_what_is_completed_or_left_out_is_in_a_message():
    assert set(COMPLETED) | set(_REASONS) <= set(LINES)
    assert set(MEANT) <= set(LINES)
    assert not set(COMPLETED) & set(_REASONS)
    for line, completed in COMPLETED.items():
        assert re.fullmatch(_pattern(line), completed), (line, completed)


ONLY_KERAS_3 = [
    "Dice(axis=(1, 2, 3))",
    "Tversky(axis=(1, 2, 3))",
    "keras.distribution.set_distribution(None)",
    "plan.optimizer(keras.optimizers.MultiOptimizer, optimizer_map)",
]

# Names that the message's situation gives another meaning than `Names` does.
MEANT = {
    "dpc.keras.convert_batchnorm(model.backbone)": {"model": "with_backbone"},
    "np.stack(data)": {"data": "rows_of_x"},
    "plan.batches((x, y), people=ids)": {"plan": "plan_of_people"},
    "plan.batches((x[1000:], y[1000:]))": {"x": "many", "y": "many"},
    "plan.batches(..., people=ids)": {"plan": "plan_of_people"},
    "scheme.batches((x, y), people=ids)": {"scheme": "of_people"},
    "statistics.moments(x, low=..., high=...)": {"x": "column_of_numbers"},
    "statistics.vocabulary(framevalue)": {"frame": "people"},
    "tf.keras.Input(shape, dtype='string')": {"shape": "no_axes"},
    "tf.where(step % 1000 < 100, ...)": {"step": "purpose"},
    "x.to_tensor(shape=...)": {"x": "rows"},
    "MinSeparation(separation=100, participations=5)": {
        "MinSeparation": "participation"
    },
    "dataset.map(lambda x, y: (tf.ensure_shape(x, [28, 28]), y))": {
        "dataset": "image_data"
    },
    "dataset.map(lambda x, y: (x.to_tensor(shape=[None, 40]), y))": {
        "dataset": "ragged_data"
    },
    "model.fit(plan.batches(data), class_weight={0: 1.0, 1: 10.0}, epochs=plan.epochs, "
    "callbacks=plan.callbacks)": {"data": "two_classes"},
    "tf.keras.layers.IntegerLookup(vocabulary=ids)": {"ids": "distinct_ids"},
    "tf.keras.layers.StringLookup(vocabulary=classes, num_oov_indices=0)": {
        "classes": "words"
    },
    "batches(dpc.sampling.Stream(data, examples=..., folder=...))": {"data": "dataset"},
    "TrainingPlan(sampling, z, steps)": {"sampling": "scheme"},
    "AvailableCohorts(scheme, available)": {"scheme": "clients"},
    "CorrelatedNoise(matrix, steps, sampling)": {"sampling": "separated"},
    "batches.distribute(strategy)": {"strategy": "mirrored"},
    "dpc.CorrelatedNoise(matrix, rounds, scheme)": {"scheme": "separated"},
    "dpc.keras.convert_batchnorm(model)": {"model": "normalized"},
    "dpc.keras.film(model)": {"model": "layer_normalized"},
    "model.build(input_shape)": {"model": "unbuilt"},
    "optimizer.set_public_norms(norms)": {"optimizer": "taking_public_norms"},
    "optimizer.minimize(loss, variables, tape=tape)": {"loss": "per_example_loss"},
    "layer.add_weight(..., trainable=False)": {"layer": "new_layer"},
    "model.fit(..., callbacks=[dpc.keras.PublicBatchStatistics(public_x)])": {
        "model": "normalized_by_batches"
    },
    "rule.bind(names)": {"names": "kernels"},
    "self.compute_loss(x, y, y_pred, w)": {
        "self": "model",
        "y": "tensor",
        "w": "losses",
    },
    "BufferedToeplitz(3, steps, scheme, Workload(momentum=value))": {
        "scheme": "separated"
    },
    "step(element)": {"step": "take_element"},
    "strategy.run(step, args=(batch,))": {"step": "replica", "batch": "array"},
    "strategy.run(replica_step, args=element)": {"replica_step": "step"},
    "tf.cast(condition, loss.dtype)": {"loss": "losses"},
    "tf.keras.Sequential(layers)": {"layers": "two_layers"},
    "tf.nn.relu(loss - threshold)": {"loss": "losses"},
    "tf.reduce_mean(tf.square(y - y_pred), axis=-1)": {"y": "truth"},
    "tf.reduce_sum(y * y_pred, axis=(1, 2, 3))": {"y": "ones", "y_pred": "ones"},
    "tf.tensordot(a, b, 2)": {"a": "pair", "b": "pair"},
    "tf.reduce_sum(a * b, axis=-1, keepdims=True)": {"b": "a"},
}
_STEP = "self.optimizer.minimize(loss, self.trainable_variables"
IN_A_GRAPH = [_STEP + end for end in (")", ", tape=tape)")]
for _line in IN_A_GRAPH:
    MEANT[_line] = {"self": "model", "loss": "per_example_loss"}


def _cases():
    for line in sorted(set(LINES) - set(_REASONS)):
        slow = [pytest.mark.slow] if _SLOW.search(line) else []
        yield pytest.param(line, id=line[:60], marks=slow)


@pytest.fixture(autouse=True)
def settings_of_the_process():
    """Puts back what a line sets for the whole process."""
    policy = tf.keras.mixed_precision.global_policy()
    yield
    tf.keras.mixed_precision.set_global_policy(policy)
    tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize("line", _cases())
def test_a_line_of_a_message_runs(line):
    if line in ONLY_KERAS_3 and not KERAS_3:
        pytest.skip("Keras 2 has no such name.")
    if not FEDERATED and _OF_CLIENTS.search(line + COMPLETED.get(line, "")):
        pytest.skip("TensorFlow Federated is not installed.")
    names = Names()
    code, meant = COMPLETED.get(line, line), MEANT.get(line, {})
    if line in IN_A_GRAPH:
        assert names.model and names.optimizer
        names.optimizer.build(names.model.trainable_variables)
        tf.function(lambda: run(code, names, meant) and None)()
    else:
        run(code, names, meant)


def test_most_lines_are_run():
    assert len(_REASONS) < len(LINES) / 3
