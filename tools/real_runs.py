"""The commands behind docs/results/real/, in a short and a long form."""

from __future__ import annotations

import dataclasses
import re
import shlex


@dataclasses.dataclass(frozen=True)
class Run:
    """An experiment.

    Attributes:
      name: of the run, and of its directory.
      form: "short" or "long".
      minutes: that it takes, about, on two cores.
      lines: modules and arguments; {data} is the directory of the data, {out} that of
        this run, {all} that of all runs.
    """

    name: str
    form: str
    minutes: float
    lines: tuple[str, ...]

    @property
    def needs(self) -> set[str]:
        """The files and folders of the data that the run reads."""
        return set(re.findall(r"{data}/([\w.]+)", " ".join(self.lines)))

    @property
    def after(self) -> set[str]:
        """The runs whose results this run reads."""
        return set(re.findall(r"{all}/(\w+)", " ".join(self.lines)))

    def commands(self, data: str, out: str) -> list[str]:
        """The lines, filled in, for a shell."""
        places = {"data": data, "out": f"{out}/{self.name}", "all": out}
        # An argument of several words has flags in it, which a program splits again.
        quoted = {name: shlex.quote(place) for name, place in places.items()}
        return [
            shlex.join(
                word.format(**(quoted if " " in word else places))
                for word in shlex.split(line)
            )
            for line in self.lines
        ]


_K = "keras_examples."
_BATCH = (
    f"{_K}batch_clipping_sweep --dataset={{set}} --data_dir={{{{data}}}}/{{set}} "
    "--output_dir={{out}}"
)
_WAYS = "sgd,batch:adaptive,batch:layerwise,batch:full,batch:scaled"
_FEATURES = (
    f"{_K}frozen_features --data_dir={{{{data}}}}/{{set}} --image_size=64 "
    "--checkpoint={{data}}/efficientnet_lite0_imagenet.npz --output_dir={{out}}"
)
_CLIP = f"{_K}default_clip --output_dir={{out}}"
_SMALL_CNNS = "--data_dir={data} --examples=12000 --batch_size=256"
_DIGITS = (
    "--tasks=imbalanced_digits,digits,hard_digits --batch_size=128 --epochs=10 "
    "--tuning_repeats=2 --repeats=8"
)
_BOUNDS = f"{_CLIP} --clip_norms=0.3,1,3,10"
_BOUNDED = "--rules='0.65 over 0.1,0.65 in 0.1-1,0.65 in 0.1-3,0.5 in 0.1-1,automatic'"
_MANY = "--batch_size=128 --epochs=10 --tuning_repeats=4 --repeats=24"

_DEAL = (
    "tff_tasks.convert --task=emnist_character --input={data}/mnist --dealt_to=600 "
    "--dirichlet=0.3 --only_digits --output_dir={out}/clients"
)
_DEALT = (
    "--data_dir={out}/clients --only_digits --model_id=2nn --engine=local "
    "--accountant=rdp --eval_split=validation --clients_per_round=20"
)
_SPEAKERS = (
    "tff_tasks.convert --task=shakespeare_character --format=plays "
    "--input={data}/shakespeare --output_dir={out}/clients"
)
_PLAYS = (
    "tff_tasks.shakespeare_character --data_dir={out}/clients --engine=local "
    "--clients_per_round=10 --max_elements=8 --clip=0.5 --output_dir={out}"
)


def _batch(dataset: str, *flags: str) -> str:
    return " ".join([_BATCH.format(set=dataset), *flags])


def _features(dataset: str, *flags: str) -> str:
    return " ".join([_FEATURES.format(set=dataset), *flags])


_LONG = {
    "gradient_symmetry": (
        40,
        f"{_K}gradient_symmetry --data_dir={{data}}/mnist --output_dir={{out}}",
    ),
    "batch_clipping_mnist": (
        15,
        _batch("mnist", "--examples=20000", "--epochs=8")
        + f" --methods={_WAYS},batch:adaptive_zhang",
    ),
    "batch_clipping_mnist_clip_norms": (
        4,
        _batch("mnist", "--examples=20000", "--epochs=8", "--methods=batch:full")
        + " --clip_norms=0.05,0.2,1 --noise=equal_privacy --repeats=1",
    ),
    "batch_clipping_mnist_sigmas": (
        5,
        _batch("mnist", "--examples=20000", "--epochs=8", "--sigmas=0.5,2.5")
        + " --methods=sgd,batch:adaptive,batch:full --repeats=1",
    ),
    "batch_clipping_fashion_mnist": (
        5,
        _batch("fashion_mnist", "--examples=10000", "--epochs=6", "--repeats=1")
        + f" --methods={_WAYS},batch:adaptive_zhang",
    ),
    "batch_clipping_layer_norms": (
        3,
        f"{_K}batch_clipping --network=bn_lenet5 --dataset=mnist "
        "--data_dir={data}/mnist --examples=10000 --clip_norm=0.2 --sigma=0.5 "
        "--epochs=6 --baseline_epochs=6 --record_layer_norms --output_dir={out}",
    ),
    "features_fashion_mnist": (3, _features("fashion_mnist")),
    "features_mnist": (3, _features("mnist")),
    "features_10000": (1, _features("fashion_mnist", "--subset=0.1667")),
    "transfer_heads": (
        30,
        f"{_K}tune_grid --grid=mnist_efficientnet_lite0 --seeds=2 "
        "--features={all}/features_10000/features.npz --epsilons=0.5,1,3,8 "
        "--clip_norms=0.1,1,10,42 --batch_sizes=256,1024,4096,full "
        "--learning_rates=0.001,0.005,0.02 --output_dir={out}",
    ),
    "transfer_heads_batch_size_20": (
        1,
        f"{_K}batch_size --results={{all}}/transfer_heads --output_dir={{out}}",
    ),
    "transfer_heads_batch_size_79": (
        1,
        f"{_K}batch_size --results={{all}}/transfer_heads --min_steps=79 "
        "--output_dir={out}",
    ),
    "transfer_head_norms": (
        5,
        f"{_K}norms_and_weights --features={{all}}/features_10000/features.npz "
        "--epsilons=0.5,8 --clip_norms=0.1,1,42 --learning_rates=0.001,0.005,0.02 "
        "--batch_size=1024 --repeats=3 --write_gradients=1024 --output_dir={out}",
    ),
    **{
        f"transfer_head_optimal_clip_eps_{epsilon}": (
            1,
            f"{_K}optimal_clip --batch=1024 --noise_multipliers=0.896,1.574,3.63,6.6 "
            f"--gradients={{all}}/transfer_head_norms/gradients_eps_{epsilon}.npz "
            "--output_dir={out}",
        )
        for epsilon in ("0.5", "8")
    },
    "default_clip_features": (
        40,
        f"{_CLIP} --tasks=features --epsilons=0.5,1,3,8 --features={{all}}"
        "/features_fashion_mnist/features.npz,{all}/features_mnist/features.npz",
    ),
    "default_clip_digits_eps_8": (
        6,
        f"{_CLIP} {_DIGITS} --epsilons=8 --learning_rates=0.05,0.15,0.5,1.5",
    ),
    "default_clip_digits_eps_1": (
        6,
        f"{_CLIP} {_DIGITS} --epsilons=1 --learning_rates=0.015,0.05,0.15,0.5",
    ),
    "default_clip_mnist": (8, f"{_CLIP} {_SMALL_CNNS} --tasks=mnist --epsilons=1"),
    "default_clip_imbalanced_fashion": (
        8,
        f"{_CLIP} {_SMALL_CNNS} --tasks=imbalanced_fashion --epsilons=8 "
        "--rules='quantile,quantile 0.5,quantile 0.65,quantile 0.8'",
    ),
    "default_clip_bounds_plays": (
        15,
        f"{_BOUNDS} {_BOUNDED} --tasks=plays --data_dir={{data}} --epsilons=1,3 "
        "--batch_size=512 --epochs=10 --learning_rates=0.05,0.15,0.5,1.5 "
        "--tuning_repeats=2 --repeats=10",
    ),
    "default_clip_bounds_noisy_digits": (
        4,
        f"{_BOUNDS} {_BOUNDED} --tasks=hard_digits {_MANY} --epsilons=1 "
        "--learning_rates=0.015,0.05,0.15",
    ),
    "default_clip_bounds_imbalanced_digits": (
        4,
        f"{_BOUNDS} {_BOUNDED} --tasks=imbalanced_digits {_MANY} --epsilons=8 "
        "--learning_rates=0.15,0.5,1.5",
    ),
    "default_clip_bounds_digits": (
        7,
        f"{_BOUNDS} --rules='0.65 over 0.1,0.65 in 0.1-3' "
        f"--tasks=imbalanced_digits,digits {_MANY} --epsilons=1 "
        "--learning_rates=0.015,0.05,0.15",
    ),
    "correlated_noise": (
        25,
        f"{_K}correlated_noise --data_dir={{data}}/mnist --output_dir={{out}} "
        "--epsilons=4 --learning_rates=0.25,0.6,1.5,4,10 --repeats=4",
    ),
    "transfer_film_digits": (
        12,
        f"{_K}tune_grid --trainable=film --epsilons=0.5,8 --epochs=2,8 --seeds=2 "
        "--clip_norms=0.1,1,10 --batch_sizes=64,256 --learning_rates=0.01,0.05 "
        "--physical_batch_size=400 --output_dir={out}",
    ),
    "transfer_film_lite0": (
        6,
        f"{_K}tune_grid --trainable=film --model=efficientnet_lite0 --image_size=48 "
        "--checkpoint={data}/efficientnet_lite0_imagenet.npz --dataset=mnist "
        "--data_dir={data}/fashion_mnist --subset=0.02 --methods=flat --seeds=1 "
        "--grid=mnist_efficientnet_lite0 --epsilons=3 --epochs=2 --batch_sizes=300 "
        "--clip_norms=0.1,1,10 --learning_rates=0.004 --output_dir={out}",
    ),
    "federated_mnist": (
        35,
        _DEAL,
        f"tff_tasks.rates --task=emnist_character --run_flags='{_DEALT} --rounds=60' "
        "--client_factors=1,3.162,10 --server_factors=0.1,0.3162,1 "
        "--output_dir={out}/rates",
        f"tff_tasks.sweep --task=emnist_character --run_flags='{_DEALT} --rounds=60' "
        "--server_rate_factors=1 --final_seeds=8 --output_dir={out}/sweep",
        "tff_tasks.plots --sweeps={out}/sweep "
        "--titles='MNIST dealt to 600 clients, 2NN'",
        f"tff_tasks.recipe --task=emnist_character --run_flags='{_DEALT} --rounds=60' "
        "--client_rate_factors=1,3.162 --server_rate_factors=0.316,1 "
        "--output_dir={out}/recipe",
    ),
    "plays": (
        10,
        _SPEAKERS,
        f"{_PLAYS} --rounds=80 --max_eval_examples=500 --max_final_examples=2000",
    ),
}
_SHORT = {
    "gradient_symmetry": (
        1,
        f"{_K}gradient_symmetry --data_dir={{data}}/mnist --epochs=3 --samples=300 "
        "--scatter_epochs=0,1,2,3 --planes_epoch=2 --cosine_epochs=1,2,3 "
        "--score_epochs=0,1,2,3 --output_dir={out}",
    ),
    "batch_clipping_mnist": (
        1,
        _batch("mnist", "--examples=6000", "--epochs=3", "--repeats=1")
        + " --methods=sgd,batch:adaptive,batch:full",
    ),
    "features_3000": (1, _features("fashion_mnist", "--subset=0.05")),
    "transfer_heads": (
        1,
        f"{_K}tune_grid --grid=mnist_efficientnet_lite0 --seeds=1 --epochs=4 "
        "--features={all}/features_3000/features.npz --epsilons=1,8 "
        "--clip_norms=0.1,10 --batch_sizes=256 --learning_rates=0.002,0.01 "
        "--output_dir={out}",
    ),
    "transfer_head_norms": (
        1,
        f"{_K}norms_and_weights --features={{all}}/features_3000/features.npz "
        "--epsilons=1,8 --clip_norms=0.1,10 --learning_rates=0.005 --epochs=4 "
        "--batch_size=256 --repeats=1 --output_dir={out}",
    ),
    "default_clip": (
        2,
        f"{_CLIP} --tasks=mnist,features --data_dir={{data}} --epsilons=3 "
        "--features={all}/features_3000/features.npz --examples=3000 --epochs=3 "
        "--batch_size=128 --clip_norms=0.1,1,10 --learning_rates=0.1,0.3 "
        "--rules='quantile,quantile 0.65' --repeats=2",
    ),
    "correlated_noise": (
        1,
        f"{_K}correlated_noise --data_dir={{data}}/mnist --output_dir={{out}} "
        "--noises=independent,toeplitz --clips=fixed,quantile --epsilons=4 "
        "--learning_rates=1 --repeats=2 --epochs=2",
    ),
    "federated_mnist": (
        1,
        _DEAL,
        f"tff_tasks.emnist_character {_DEALT} --rounds=15 --output_dir={{out}}",
    ),
    "plays": (
        2,
        _SPEAKERS,
        f"{_PLAYS} --rounds=8 --max_eval_examples=200 --max_final_examples=400",
    ),
}
RUNS = tuple(
    Run(name, form, minutes, tuple(lines))
    for form, runs in (("short", _SHORT), ("long", _LONG))
    for name, (minutes, *lines) in runs.items()
)
