"""A worker of several that train a model together: a program for `workers_test.py`.

python -m tests.replicas.worker SETTINGS, with TF_CONFIG in the environment.
"""

import hashlib
import json
import os
import signal
import sys
import time

import numpy as np
import tensorflow as tf

import tfdpclip as dpc

LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def some_records(count=61):
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 6)).astype(np.float32), rng.integers(0, 3, count)


def compiled(settings):
    tf.keras.utils.set_random_seed(1)
    layers = [
        tf.keras.Input((6,)),
        tf.keras.layers.Dense(settings.get("width", 8), kernel_regularizer="l2"),
        tf.keras.layers.Dense(3),
    ]
    model = tf.keras.Sequential(layers)
    norm = settings.get("norm", 0.3)
    optimizer = dpc.keras.DPSGD(
        settings.get("rate", 0.5),
        momentum=0.9,
        clip=norm if settings.get("fixed") else dpc.QuantileClip(initial_norm=norm),
        noise_multiplier=settings.get("z", 0.0),
        expected_batch_size=61 * settings.get("sampling", 1.0),
        accumulation_steps=settings.get("accumulation", 1),
        seed=settings.get("seed"),
    )
    model.compile(optimizer, LOSS)
    return model


def batches_of(settings, place=0):
    rate = settings.get("sampling", 1.0)
    scheme = dpc.sampling.FullBatch() if rate == 1 else dpc.sampling.Poisson(rate)
    x, y = some_records()
    if settings.get("other_order") and place:
        x, y = x[::-1], y[::-1]
    return scheme.batches(
        (x, y),
        accumulation_steps=settings.get("accumulation", 1),
        seed=settings.get("draws"),
    )


class Fault(tf.keras.callbacks.Callback):
    """Does something to its own process in a step of a run."""

    def __init__(self, what, step):
        super().__init__()
        self._what, self._step, self._seen = what, step, 0

    def on_train_batch_begin(self, batch, logs=None):
        self._seen += 1
        if self._seen != self._step:
            return
        if self._what == "raise":
            raise ArithmeticError("a fault of its own")
        os.kill(os.getpid(), getattr(signal, self._what))


class Rates(tf.keras.callbacks.Callback):
    """Sets a different learning rate in each process in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch:
            self.model.optimizer.learning_rate = 1 / (1 + os.getpid())


def main(settings):
    place = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    if place:
        settings = settings | settings.get("elsewhere", {})
    strategy = dpc.keras.multi_worker_strategy(
        timeout_seconds=settings.get("timeout_seconds", 60)
    )
    with strategy.scope():
        model = compiled(settings)
    batches = batches_of(settings, place)
    distributed = batches.distribute(strategy)
    callbacks, told = [], {}
    if settings.get("backup"):
        callbacks.append(
            tf.keras.callbacks.BackupAndRestore(
                settings["backup"], save_freq=settings.get("save_freq", "epoch")
            )
        )
    if settings.get("rates"):
        callbacks.append(Rates())
    if settings.get("moved"):
        model.set_weights([w + 1 for w in model.get_weights()])
    if settings.get("z"):
        budget = dpc.keras.PrivacyBudget(
            settings["epsilon"], 1e-5, batches, ledger=settings.get("ledger")
        )
        callbacks.append(budget)
    if settings.get("fault") and settings["fault"][0] == place:
        callbacks.append(Fault(*settings["fault"][1:]))
    try:
        history = model.fit(
            distributed,
            steps_per_epoch=settings.get("steps", 6),
            epochs=settings.get("epochs", 1),
            verbose=0,
            callbacks=callbacks,
        )
        told["epsilon"] = history.history.get("epsilon")
    except (ValueError, RuntimeError, ArithmeticError) as error:
        told["error"] = [type(error).__name__, str(error)]
    told["at"] = time.time()
    print(json.dumps(told), flush=True)
    if "error" in told and settings.get("linger"):
        time.sleep(settings["linger"])
    if "error" in told:
        # Exit handlers would wait for the remaining workers.
        os._exit(3)
    weights = model.get_weights()
    told["digest"] = hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()
    told["clip"] = float(model.optimizer.clip_norm)
    told["iterations"] = int(model.optimizer.iterations.numpy())
    if settings.get("weights"):
        np.savez(f"{settings['weights']}_{place}.npz", *weights)
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
