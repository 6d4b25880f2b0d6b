"""Which samples each client holds: the per-class Dirichlet(α) partition.

For every class, proportions over clients are drawn from Dirichlet(α, …, α) and the class's samples, in
random order, are cut accordingly. A large α gives every client the same mixture, a small one few classes.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from fedmask.errors import FedmaskError
from fedmask.randomness import Purpose, generator, permutation

__all__ = ["Partition", "dirichlet_partition"]

_TRIES = 10


@dataclass(frozen=True)
class Partition:
    """Disjoint shards that together hold every sample once.

    Attributes:
        order: sample indices, client after client.
        offsets: client k holds ``order[offsets[k]:offsets[k+1]]``.
        tries: how many partitions were drawn.
        moved: samples that a repair gave to clients below the minimum; 0 if the last try needed none.
    """

    order: Int64[np.ndarray, " samples"]
    offsets: Int64[np.ndarray, " clients_plus_one"]
    tries: int = 1
    moved: int = 0

    @property
    def clients(self) -> int:
        """N, the number of clients."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> Int64[np.ndarray, " clients"]:
        """n_k, samples of each client."""
        return np.diff(self.offsets)

    def shard(self, client: int) -> Int64[np.ndarray, " shard"]:
        """The indices of one client's samples."""
        return self.order[self.offsets[client] : self.offsets[client + 1]]


def dirichlet_partition(
    labels: Int64[np.ndarray, " samples"], clients: int, alpha: float, seed: int, *, min_samples: int = 1
) -> Partition:
    """Partition samples by per-class Dirichlet(α).

    If a client gets fewer than ``min_samples``, the partition is drawn again, at most ten times in all; then
    the largest shards give one sample at a time to those below the minimum, and ``moved`` says how many.

    Args:
        labels: class of each sample.
        clients: N.
        alpha: concentration in (0, ∞]; at ∞ every class is cut evenly.
        seed: the partition is a function of it, and of nothing else that is random.
        min_samples: the least that a client holds; 0 allows empty clients.

    Raises:
        FedmaskError: if α is not above 0, there are no clients, or too few samples for the minimum.
    """
    if not alpha > 0:
        raise FedmaskError(f"alpha is {alpha}; the Dirichlet concentration lies above 0 (inf for an even cut)")
    if clients < 1:
        raise FedmaskError(f"{clients} clients were asked for; there must be at least one")
    if clients * min_samples > len(labels):
        raise FedmaskError(
            f"{len(labels)} samples cannot give each of {clients} clients {min_samples}; "
            "use fewer clients, or a smaller min_samples (0 allows empty clients)"
        )
    for attempt in range(_TRIES):
        owner = _owners(labels, clients, alpha, seed, attempt)
        counts = np.bincount(owner, minlength=clients)
        if counts.min() >= min_samples:
            break
    moved = _repair(owner, counts, min_samples)
    order = np.argsort(owner, kind="stable")
    offsets = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=clients))))
    return Partition(order, offsets, attempt + 1, moved)


def _owners(
    labels: Int64[np.ndarray, " samples"], clients: int, alpha: float, seed: int, attempt: int
) -> Int64[np.ndarray, " samples"]:
    """The client of each sample."""
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[permutation(seed, Purpose.PARTITION, len(members), round_=attempt, client=int(label))]
        ends = np.cumsum(_proportions(clients, alpha, seed, attempt, int(label)))
        cuts = np.floor(ends / ends[-1] * len(members) + 0.5).astype(np.int64)
        owner[members] = np.repeat(np.arange(clients), np.diff(cuts, prepend=0))
    return owner


def _proportions(clients: int, alpha: float, seed: int, attempt: int, label: int) -> Float64[np.ndarray, " clients"]:
    """A draw from Dirichlet(α, …, α), through logarithms: at α = 10⁻⁴ plain gamma draws underflow to 0/0."""
    if np.isinf(alpha):
        return np.full(clients, 1 / clients)
    random = generator(seed, Purpose.PARTITION, round_=attempt, client=label, draw=1)
    # Gamma(α) = Gamma(α + 1)·U^(1/α), and −ln U is exponential.
    log_gamma = np.log(random.standard_gamma(alpha + 1, clients)) - random.standard_exponential(clients) / alpha
    shares = np.exp(log_gamma - log_gamma.max())
    return np.asarray(shares / shares.sum())


def _repair(owner: Int64[np.ndarray, " samples"], counts: Int64[np.ndarray, " clients"], least: int) -> int:
    """Move samples in place from the largest shards to those below ``least``; return how many."""
    needy = np.flatnonzero(counts < least)
    missing = int(np.sum(least - counts[needy]))
    if missing == 0:
        return 0
    takers = np.repeat(needy, least - counts[needy])
    # Cut the largest shards down to one level, as high as it yields enough: largest clients give first.
    low, high = least, int(counts.max())
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if np.maximum(counts - level, 0).sum() >= missing else (low, level - 1)
    surplus = np.maximum(counts - low, 0)
    by_owner = np.argsort(owner, kind="stable")
    ends = np.cumsum(counts)
    given = np.concatenate([by_owner[ends[k] - surplus[k] : ends[k]] for k in np.flatnonzero(surplus)])
    owner[given[:missing]] = takers
    return missing
