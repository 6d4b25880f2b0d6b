"""The configuration of a run: everything that its results are a function of, and nothing else."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from fedmask.aggregate import OnNonfinite
from fedmask.blocks import Granularity
from fedmask.errors import FedmaskError
from fedmask.masks import Correlated, Independent, Sharing, Synchronized, keep_probabilities

__all__ = ["BatchSize", "Control", "Mask", "Precision", "RunConfig"]

Mask: TypeAlias = Literal["none", "independent", "synchronized", "correlated"]
Control: TypeAlias = Literal["none", "identical-clients"]
Precision: TypeAlias = Literal["float32", "bfloat16"]
BatchSize: TypeAlias = int | Literal["full"]


@dataclass(frozen=True)
class RunConfig:
    """A FedAvg run (paper, "Its experiment"). Defaults are the paper's where it states them.

    Attributes:
        clients: N; cohort: K_c, drawn uniformly without replacement each round.
        alpha: Dirichlet concentration of the partition, up to inf.
        min_samples: the least that a client holds.
        batch_size: b, or "full" for one gradient step over the whole shard per epoch.
        local_epochs: τ; local_steps: gradient steps instead of epochs, if not None.
        momentum, weight_decay: of local SGD. Not stated in the paper: inferred to be 0.
        precision: "bfloat16" multiplies in bfloat16 under autocast; weights, gradients and updates stay float32.
        chunk_size: samples at a time when a full-batch gradient is accumulated; bounds memory.
        model: "resnet18", "cnn", or a name for a model of your own that is passed to ``simulate``.
        stem, groups: see :func:`fedmask.federated.models.resnet18`; inferred.
        mask: what the server's mean uses: every update whole (the paper's measurement), or masked.
        p: probability with which a block is kept; rho: correlation of masks between clients.
        granularity: what a mask bit covers.
        seed: of everything random.
        device: "cpu" or "cuda"; results are bytes of one kind of device.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        evaluation_batch: test samples at a time.
        checkpoint_every: rounds between checkpoints; the last round always has one.
        on_nonfinite: what a client's NaN does.
        control: "identical-clients" gives all clients one shard and one seed, so that 1/Δ_S = K_c.
    """

    clients: int = 100
    cohort: int = 10
    rounds: int = 200
    alpha: float = 100.0
    min_samples: int = 1
    batch_size: BatchSize = 32
    local_epochs: int = 1
    local_steps: int | None = None
    learning_rate: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    precision: Precision = "float32"
    chunk_size: int = 250
    model: str = "resnet18"
    stem: str = "cifar"
    groups: int = 32
    mask: Mask = "none"
    p: float = 0.5
    rho: float = 0.5
    granularity: Granularity = "tensor"
    seed: int = 0
    device: str = "cpu"
    evaluate_every: int = 1
    evaluation_batch: int = 500
    checkpoint_every: int = 5
    on_nonfinite: OnNonfinite = "error"
    control: Control = "none"

    def __post_init__(self) -> None:
        for name in ("clients", "cohort", "rounds", "local_epochs", "chunk_size", "evaluate_every"):
            self._at_least(name, 1)
        for name in ("evaluation_batch", "checkpoint_every"):
            self._at_least(name, 1)
        self._at_least("min_samples", 0)
        if self.local_steps is not None:
            self._at_least("local_steps", 1)
        if self.batch_size != "full":
            self._at_least("batch_size", 1)
        if self.cohort > self.clients:
            raise FedmaskError(
                f"cohort is {self.cohort}, more than the {self.clients} clients; draw at most all of them"
            )
        if not self.alpha > 0:
            raise FedmaskError(f"alpha is {self.alpha}; the Dirichlet concentration lies above 0 (inf for an even cut)")
        if not 0 < self.learning_rate < math.inf:
            raise FedmaskError(f"learning_rate is {self.learning_rate}; it must be finite and above 0")
        for name in ("momentum", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise FedmaskError(f"{name} is {getattr(self, name)}; it must be finite and not negative")
        for name, choices in (
            ("mask", Mask),
            ("granularity", Granularity),
            ("control", Control),
            ("precision", Precision),
            ("on_nonfinite", OnNonfinite),
        ):
            if getattr(self, name) not in get_args(choices):
                raise FedmaskError(f"{name} is {getattr(self, name)!r}; use one of {', '.join(get_args(choices))}")
        if self.mask != "none" and not keep_probabilities(self.p, 1)[0] > 0:
            raise FedmaskError(f"p is {self.p}, and kept blocks are scaled by 1/p; p must lie in (0, 1]")
        Correlated(self.rho)

    @property
    def sharing(self) -> Sharing:
        """Whose mask bits are equal."""
        if self.mask == "correlated":
            return Correlated(self.rho)
        return Synchronized() if self.mask == "synchronized" else Independent()

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; an infinite α is the string "inf"."""
        fields = dataclasses.asdict(self)
        return {**fields, "alpha": "inf" if math.isinf(self.alpha) else self.alpha}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "RunConfig":
        """The configuration that :meth:`to_json` wrote.

        Raises:
            FedmaskError: if a field is unknown.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise FedmaskError(
                f"configuration field {unknown[0]!r} is unknown; the fields are {', '.join(sorted(known))}"
            )
        return cls(**{**fields, "alpha": float(fields.get("alpha", cls.alpha))})

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise FedmaskError(f"{name} is {value!r}; it must be a whole number, {least} or more")
