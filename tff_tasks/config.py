"""The settings of a run: every flag, checked, with defaults filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tfdpclip as dpc
from driver_kit import settings
from tfdpclip import accounting, sampling
from tfdpclip.accounting.plan_arguments import NOISE, named_matrix
from tff_tasks.registry import task_class
from tff_tasks.task import SettingsError, Task

#: Where the clip norm of --clipping=adaptive starts, in the paper.
INITIAL_CLIP = 0.1
_SYNTHETIC_ROUNDS = 3
_SYNTHETIC_CLIENTS = 4
#: The names that --noise has for the matrices of correlated noise.
CORRELATED = tuple(name for name in NOISE if name != "independent")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings of a run. Fields without a value get the paper's, for the task.

    Raises:
      ValueError: if a setting is out of range or does not go with the rest; the message
        names the flag.
    """

    task: str
    output_dir: str | None = settings.words(
        None, "Where results go. Default: runs/ and the task."
    )
    data_dir: str | None = settings.words(
        None, "Where the data files are.", good="data"
    )
    synthetic: bool = settings.switch(
        False,
        "Make up a few small clients: needs no files.",
        instead_of=("data_dir",),
    )
    variant: str = settings.choice(
        "paper",
        ("paper", "later"),
        "Whether details of data and network are as in the code of the paper's time, "
        "or as in the code that came after it.",
    )
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    rounds: int | None = settings.count(None, "Federated rounds.", good=1500)
    clients_per_round: int | None = settings.count(
        None, "Clients in a round: the number that the sum is divided by.", good=100
    )
    sampling: str = settings.choice(
        "fixed",
        ("fixed", "poisson", "fixed_order"),
        "How a round's clients are drawn: that many, each at random with the same "
        "probability, or in turns, without amplification by sampling.",
    )
    client_batch_size: int | None = settings.count(
        None, "Examples in a client's step.", good=20
    )
    client_epochs: int = settings.count(
        1, "How often a client goes through its examples."
    )
    max_elements: int | None = settings.count(
        None, "Examples that one client uses at most.", good=1000
    )
    client_learning_rate: float | None = settings.number(
        None, "Learning rate of clients.", good=0.1, above=0
    )
    server_learning_rate: float | None = settings.number(
        None, "Learning rate of the server.", good=1.0, above=0
    )
    server_momentum: float = settings.number(
        0.9, "Momentum of the server.", least=0, below=1
    )
    momentum_damping: bool = settings.switch(
        False,
        "Whether an update enters the server's momentum times 1 - momentum, as the "
        "paper's Algorithm 1 prints it. Table 1's rates are for false; with true they "
        "must be 1 / (1 - momentum) times as large.",
    )

    clipping: str = settings.choice(
        "adaptive",
        ("none", "fixed", "adaptive"),
        "How updates are clipped: to a privately followed quantile of their norms, to "
        "a fixed norm, or not at all.",
    )
    clip: float | None = settings.number(
        None,
        "The clip norm of --clipping=fixed, or the one that adaptive starts from.",
        good=0.1,
        above=0,
        only_with=("clipping", "fixed", "adaptive"),
    )
    target_quantile: float = settings.number(
        0.5,
        "Share of updates that adaptive leaves unclipped.",
        least=0,
        most=1,
        only_with=("clipping", "adaptive"),
    )
    clip_learning_rate: float = settings.number(
        0.2,
        "How fast adaptive moves the clip norm.",
        above=0,
        only_with=("clipping", "adaptive"),
    )
    count_stddev: float | None = settings.number(
        None,
        "Noise on the number of unclipped updates. Default: clients_per_round / 20, "
        "or more in cohorts that are too small for it.",
        good=5.0,
        above=0,
        only_with=("clipping", "adaptive"),
    )
    layerwise: bool = settings.switch(
        False, "Whether every layer of the network is clipped by itself."
    )
    noise_multiplier: float | None = settings.number(
        None,
        "z, as accounted; 0: not private. Default: the paper's largest with "
        "acceptable loss at 100 clients.",
        good=0.1,
        least=0,
    )
    noise: str = settings.choice(
        "central",
        ("central", "distributed", *CORRELATED),
        "Who adds noise: the server, independently in every round (central); every "
        "client a share of it (distributed, needs --secure); or the server, correlated "
        "over rounds by a matrix (the others, which need --sampling=fixed_order).",
    )
    secure: bool = settings.switch(
        False, "Whether updates are summed by secure aggregation."
    )
    minimum_clients: int | None = settings.count(
        None, "With --noise=distributed: clients that suffice for the noise.", good=80
    )
    delta: float | None = settings.number(
        None,
        "Probability with which epsilon may fail. Default: population^-1.1.",
        good=1e-6,
        above=0,
        below=1,
    )
    accountant: str = settings.choice("pld", ("pld", "rdp"), "The privacy accountant.")
    epsilon_budget: float | None = settings.number(
        None, "Stop before epsilon exceeds this.", good=5.0, above=0
    )
    imagined_population: int = settings.count(
        10**6, "The population of the report's reading after Table 1."
    )

    seed: int | None = settings.count(
        None,
        "Repeats cohorts, shuffles, initial weights and noise, for experiments: the "
        "run is then NOT private.",
        good=1,
        least=0,
    )
    eval_split: str | None = settings.choice(
        None,
        ("test", "validation", "heldout"),
        "Where to evaluate: all test clients; a fixed half of them, the other half "
        "being kept for the end; or the held-out clients of Stack Overflow.",
        good="test",
    )
    max_eval_examples: int | None = settings.count(
        None, "Examples of one evaluation, at most.", good=10_000
    )
    max_final_examples: int = settings.count(
        100_000, "Examples of the evaluation at the end, at most."
    )
    rounds_per_eval: int | None = settings.count(
        None, "Evaluate, and account, after every so many rounds.", good=10
    )
    rounds_per_checkpoint: int = settings.count(10, "Save after every so many rounds.")
    engine: str = settings.choice(
        "tff",
        ("tff", "local"),
        "What runs the rounds: TensorFlow Federated, or a loop in this process, which "
        "is faster for small networks.",
    )
    workers: str | None = settings.words(
        None,
        "Addresses of workers that run the rounds, separated by commas, each started "
        "by python -m tfdpclip.federated.worker --port=... Default: one on this "
        "machine, started and ended by this program.",
        good="10.0.0.1:10000,10.0.0.2:10000",
    )
    worker_ready_seconds: float = settings.number(
        60.0,
        "How long workers that do not answer are waited for.",
        above=0,
        only_with=("workers",),
    )
    worker_round_seconds: float = settings.number(
        3600.0,
        "How long a round on workers may take; a frozen worker is noticed by nothing "
        "else. A few times what a round takes.",
        above=0,
        only_with=("workers",),
    )
    train_metrics: bool = settings.switch(
        False,
        "Whether to record the clients' own loss and metrics. They have no noise: this "
        "is not private.",
    )
    log_cohorts: bool = settings.switch(
        False, "Whether to write down who took part. Needs --seed: it is secret."
    )
    tensorboard: bool = settings.switch(
        True, "Whether to write event files for TensorBoard."
    )
    quiet: bool = settings.switch(False, "Whether to show no progress.")

    def __post_init__(self):
        task = task_class(self.task)
        settings.check(self)
        options = {**task.option_defaults(self.variant), **self.options}
        object.__setattr__(self, "options", task(options).settings)
        for name, value in self._defaults(task).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if not self.output_dir:
            object.__setattr__(self, "output_dir", f"runs/{self.task}")
        self._check_together(task)

    def _defaults(self, task: type[Task]) -> dict[str, Any]:
        paper = task.paper
        batch_size = self.client_batch_size or paper.client_batch_size
        client_rate = paper.client_learning_rate
        if self.options.get("loss_reduction") == "mean":
            # Table 1's rate is for the sum over a batch.
            client_rate *= batch_size
        small = self.synthetic and self.task != "digits"
        unclipped = self.clipping == "none"
        rounds = _SYNTHETIC_ROUNDS if small else paper.rounds
        return {
            "rounds": rounds,
            "clients_per_round": (
                _SYNTHETIC_CLIENTS if small else paper.clients_per_round
            ),
            "client_batch_size": batch_size,
            "client_learning_rate": client_rate,
            "server_learning_rate": paper.server_learning_rate,
            "max_elements": paper.max_elements,
            "clip": paper.fixed_clip if self.clipping == "fixed" else INITIAL_CLIP,
            "noise_multiplier": 0.0 if unclipped else paper.noise_multiplier,
            "eval_split": paper.eval_split,
            "max_eval_examples": paper.max_eval_examples,
            "rounds_per_eval": max(1, min(10, (self.rounds or rounds) // 10)),
        }

    def _check_together(self, task: type[Task]) -> None:
        z = self.noise_multiplier
        if self.clipping == "none" and z > 0:
            raise ValueError(
                f"noise_multiplier={z:g} needs clipping: nothing would bound one "
                "client. Use --clipping=adaptive, or --noise_multiplier=0."
            )
        if self.clipping == "none" and (self.secure or self.layerwise):
            raise ValueError(
                "clipping=none does not go with --secure or --layerwise; use "
                "--clipping=adaptive."
            )
        if self.engine == "local" and self.secure:
            raise ValueError("engine=local has no secure sums; use --engine=tff.")
        if self.engine == "local" and self.workers is not None:
            raise ValueError("engine=local has no workers; use --engine=tff.")
        if self.noise == "distributed" and not self.secure:
            raise ValueError("noise=distributed needs --secure.")
        if self.noise == "distributed" and self.minimum_clients is None:
            raise ValueError(
                "minimum_clients must be given with --noise=distributed, for example "
                f"--minimum_clients={max(1, int(0.8 * self.clients_per_round))}."
            )
        if self.noise != "distributed" and self.minimum_clients is not None:
            raise ValueError("minimum_clients is for --noise=distributed only.")
        if self.noise in CORRELATED and self.sampling != "fixed_order":
            raise ValueError(
                f"noise={self.noise} needs to know how far apart a client's rounds "
                "are: use --sampling=fixed_order."
            )
        if self.log_cohorts and self.seed is None:
            raise ValueError(
                "log_cohorts would give away who took part, which privacy rests on; it "
                "needs --seed, for example --seed=1."
            )
        if self.eval_split == "heldout" and "heldout" not in task.splits:
            raise ValueError(
                f"eval_split=heldout: {self.task} has no such clients; use "
                "--eval_split=validation."
            )
        if z > 0 and not self.layerwise:
            self._check_noise()

    def _check_noise(self):
        rule = self.clip_rule()
        z = self.noise_multiplier
        try:
            counts = accounting.count_stddevs(rule, self.clients_per_round, z)
            accounting.split_noise_multiplier(z, counts)
        except ValueError as error:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier:g} is too large for "
                f"clients_per_round={self.clients_per_round}: {error}"
            ) from error

    def clip_rule(self) -> dpc.ClipRule | None:
        """The clip rule; None for no clipping."""
        if self.clipping == "none":
            return None
        if self.clipping == "fixed":
            rule: dpc.ClipRule = dpc.FixedClip(self.clip)
        else:
            rule = dpc.QuantileClip(
                target_quantile=self.target_quantile,
                initial_norm=self.clip,
                learning_rate=self.clip_learning_rate,
                count_stddev=self.count_stddev,
            )
        return dpc.LayerwiseClip(rule) if self.layerwise else rule

    def scheme(self, population: int) -> sampling.SamplingScheme:
        """How clients are drawn from so many.

        Raises:
          SettingsError: if there are too few.
        """
        m = self.clients_per_round
        if m > population:
            raise SettingsError(
                f"clients_per_round={m}, but there are only {population} clients; for "
                f"example --clients_per_round={max(1, population // 10)}."
            )
        if self.sampling == "poisson":
            return sampling.Poisson(m / population)
        if self.sampling == "fixed_order":
            return sampling.MinSeparation(population, m, relation="zero_out")
        return sampling.FixedSize(m, population)

    def correlated(self, population: int) -> dpc.CorrelatedNoise | None:
        """The noise of a run among so many clients; None for independent noise."""
        if self.noise not in CORRELATED:
            return None
        scheme = self.scheme(population)
        matrix = named_matrix(self.noise, self.rounds, scheme, self.server_momentum)
        return dpc.CorrelatedNoise(matrix, self.rounds, scheme)

    def free_on_resume(self) -> frozenset[str]:
        """The settings that may change on resuming: they change no results."""
        if self.noise in CORRELATED:
            return FREE_ON_RESUME - {"rounds"}  # The matrix is made for that many.
        return FREE_ON_RESUME

    def worker_addresses(self) -> list[str]:
        """The addresses of the workers; empty for a worker on this machine."""
        if self.workers is None:
            return []
        return [address.strip() for address in self.workers.split(",")]

    def to_dict(self) -> dict[str, Any]:
        """All settings, ready for JSON."""
        return dataclasses.asdict(self)


# See `RunConfig.free_on_resume`.
FREE_ON_RESUME = frozenset(
    {
        "rounds",
        "output_dir",
        "data_dir",
        "quiet",
        "tensorboard",
        "epsilon_budget",
        "workers",
        "worker_ready_seconds",
        "worker_round_seconds",
    }
)
