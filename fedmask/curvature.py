"""Curvature Gram matrices: G_b[k, l] = u_k^(b)ᵀ H_bb u_l^(b), and the penalties that follow from them.

They are :class:`fedmask.GramMatrices` in the inner product of the loss's Hessian, or of its generalized
Gauss-Newton matrix (GGN) JᵀH_L J with J the Jacobian of the model's outputs and H_L the loss's Hessian in the
outputs. Where the paper's eq. 8 writes the Euclidean norm, the exact statement has this product: the statistics of
these matrices are the H-weighted ones. The Hessian of a network is indefinite, so its penalties can be negative and
its recovery factor is not bounded by the number of clients; the GGN of a convex loss is positive semidefinite.

Three methods, which agree:

- ``exact`` forms the whole matrix; for models of at most :data:`EXACT_LIMIT` parameters.
- ``blocks`` multiplies by one block of one vector at a time: B·K products, no randomness.
- ``signs`` multiplies by v_k = Σ_b s_b u_k^(b), with s_b = ±1 independent and shared by the K vectors. Since
  E s_b s_c = 0 for b ≠ c, s_b u_l^(b)ᵀ (Hv_k)^(b) is an unbiased estimate of G_b[k, l]: K products a draw, whatever B.

A product with the Hessian differentiates the gradient backwards once more: forward derivatives of a gradient take
three times longer on a CPU, and fail for some losses. One costs a few gradients over the same samples.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from jaxtyping import Float, Float64, Shaped
from scipy import special
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from fedmask.blocks import Blocks, canonical_name, named_parameters
from fedmask.errors import FedmaskError
from fedmask.gram import GramMatrices, check_counts, check_statistics_blocks, check_updates
from fedmask.masks import keep_probabilities
from fedmask.randomness import Purpose, words
from fedmask.statistics import Interval

__all__ = [
    "EXACT_LIMIT",
    "CurvatureGram",
    "Objective",
    "curvature_gram",
    "independent_penalty",
    "interval_over_draws",
    "penalty",
    "shared_penalty",
]

EXACT_LIMIT = 4096  # parameters; their Hessian in float64 takes 128 MiB

Curvature: TypeAlias = Literal["hessian", "ggn"]
Method: TypeAlias = Literal["exact", "blocks", "signs"]
Named: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Objective:
    """l(θ): the mean loss of a model over samples.

    Attributes:
        model: at θ, unless :func:`curvature_gram` is given another point; it is left as it was.
        inputs: one sample a row.
        targets: one a sample, as ``loss`` wants them.
        loss: (outputs, targets) → the mean over the samples given, a scalar.
        batch_size: samples evaluated at once. It bounds the memory; the result does not depend on it.
        training: whether the model is in training mode. Then batch statistics do depend on ``batch_size``, and
            dropout draws anew in every product.

    Raises:
        FedmaskError: if there is no sample, there is not one target a sample, or the batch size is below one.
    """

    model: nn.Module
    inputs: Shaped[Tensor, "samples ..."]
    targets: Shaped[Tensor, "targets ..."]
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    batch_size: int = 256
    training: bool = False

    def __post_init__(self) -> None:
        if len(self.inputs) == 0 or len(self.inputs) != len(self.targets):
            raise FedmaskError(
                f"{len(self.inputs)} samples and {len(self.targets)} targets were given; "
                "give at least one sample and one target each"
            )
        if self.batch_size < 1:
            raise FedmaskError(f"batch_size is {self.batch_size}; evaluate at least one sample at once")


@dataclass(frozen=True)
class CurvatureGram(GramMatrices):
    """Gram matrices in ⟨·, H_bb ·⟩; not definite, in general.

    Attributes:
        draws: with random signs, the estimate of each draw; ``values`` is their mean.
    """

    definite: bool = False
    draws: Float64[np.ndarray, "draws blocks clients clients"] | None = field(default=None, repr=False)

    @property
    def standard_errors(self) -> Float64[np.ndarray, "blocks clients clients"]:
        """Of ``values``, over draws: zero without random signs, NaN for a single draw."""
        if self.draws is None:
            return np.zeros_like(self.values)
        n = len(self.draws)
        if n == 1:
            return np.full_like(self.values, np.nan)
        return np.asarray(self.draws.std(axis=0, ddof=1) / np.sqrt(n))

    def subcohort(self, clients: Sequence[int]) -> "CurvatureGram":
        """As :meth:`GramMatrices.subcohort`, with the draws."""
        part = super().subcohort(clients)
        rows = [self.clients.index(client) for client in clients]
        draws = None if self.draws is None else self.draws[..., rows, :][..., rows]
        return CurvatureGram(part.values, part.counts, part.clients, draws=draws)


def curvature_gram(
    objective: Objective,
    updates: Float[Tensor, "clients parameters"],
    blocks: Blocks,
    *,
    curvature: Curvature = "hessian",
    method: Method = "blocks",
    at: Float[Tensor, " parameters"] | None = None,
    only: Sequence[int] | None = None,
    draws: int = 8,
    seed: int = 0,
    counts: Sequence[int | float] | None = None,
    clients: Sequence[int] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> CurvatureGram:
    """u_k^(b)ᵀ H_bb u_l^(b) for every block and every two of K vectors (the forms of the paper's eq. 4).

    Work, for B blocks and K vectors, in products over all samples: ``blocks`` B·K, ``signs`` K a draw. A product
    with the Hessian costs two to four gradients; ``blocks`` skips the gradients of the other tensors. A product of
    ``blocks`` with the GGN is a forward derivative alone, since G_b[k, l] = (J u_k^(b))ᵀ H_L (J u_l^(b)); one of
    ``signs`` needs Jᵀ too. Memory: one batch's graph and, in float64, one vector of d numbers (GGN with
    ``blocks``: K times one batch's outputs).

    Args:
        objective: the loss l and its samples; for the paper's propositions the global one.
        updates: (K, d), any floating type, in the order of ``blocks``.
        blocks: the cut of the d columns, no finer than rows.
        curvature: "hessian" or "ggn".
        method: "exact", "blocks" or "signs".
        at: the point θ at which to take H; the model's parameters if None. Proposition 1 holds with H at θ and at
            θ − Δ.
        only: ids of blocks, whose matrices alone are computed and returned, in this order; all if None.
        draws: how many vectors of signs, for ``signs``.
        seed: of the signs; draw i of a seed is the same whatever the number of draws.
        counts: n_k; all equal if None.
        clients: ids; 0 … K−1 if None.
        on_progress: told (done, all) after each product with one batch.

    Raises:
        FedmaskError: if a name or number is not one of those above, the model is too large for ``exact``, the loss is
            not one number, or a product is not finite.
        BlockError: if updates or model do not fit the blocks, or the blocks are single elements.
    """
    ids = tuple(range(len(updates))) if clients is None else tuple(clients)
    checked = check_counts([1] * len(ids) if counts is None else counts, ids)
    check_updates(updates, blocks, ids)
    check_statistics_blocks(blocks)
    chosen = _chosen(blocks, only)
    _check_choices(curvature, method, draws, blocks)
    local = _LocalObjective(objective, blocks, at)
    told = _Progress(on_progress)
    samples: Float64[np.ndarray, "draws blocks clients clients"] | None = None
    with _evaluation(local.model, objective.training), torch.no_grad():
        if method == "exact":
            values = _exact(local, updates, blocks, curvature, told)[chosen]
        elif method == "signs":
            signs = np.zeros((draws, blocks.count))
            signs[:, chosen] = _signs(seed, draws, blocks.count)[:, chosen]
            samples = _signed_products(local, updates, blocks, signs, curvature, told)[:, chosen]
            values = samples.mean(axis=0)
        elif curvature == "ggn":
            values = _ggn_blocks(local, updates, blocks, chosen, told)
        else:
            one_block = np.eye(blocks.count)[chosen]
            values = _signed_products(local, updates, blocks, one_block, curvature, told).sum(axis=0)[chosen]
    _check_finite(values, chosen, blocks, ids, curvature)
    return CurvatureGram(values, checked, ids, draws=samples)


def penalty(gram: GramMatrices, p: float | Sequence[float]) -> Float64[np.ndarray, " clients"]:
    """R(Δ_k) = (1−p)/(2p) Σ_b Δ_k^(b)ᵀ H_bb Δ_k^(b) of every client (paper, eq. 4).

    Args:
        gram: in the inner product ⟨·, H_bb ·⟩.
        p: probability of keeping a block; one, or one for each of the Gram's blocks.

    Raises:
        FedmaskError: if a probability is not in (0, 1], or their number does not fit.
    """
    return np.asarray(np.einsum("b,bkk->k", _coefficients(gram, p), gram.values))


def independent_penalty(gram: GramMatrices, p: float | Sequence[float]) -> float:
    """R_ind = Σ_k a_k² R(Δ_k) with a_k = n_k/Σn: masks of their own (paper, eq. 6, with weights).

    Args:
        gram: in the inner product ⟨·, H_bb ·⟩.
        p: probability of keeping a block; one, or one for each of the Gram's blocks.

    Raises:
        FedmaskError: if a probability is not in (0, 1], or their number does not fit.
    """
    a = gram.counts / gram.counts.sum()
    return float(a**2 @ penalty(gram, p))


def shared_penalty(gram: GramMatrices, p: float | Sequence[float]) -> float:
    """R_shr = R(Σ_k a_k Δ_k) with a_k = n_k/Σn: one mask for all (paper, eq. 7, with weights).

    Args:
        gram: in the inner product ⟨·, H_bb ·⟩.
        p: probability of keeping a block; one, or one for each of the Gram's blocks.

    Raises:
        FedmaskError: if a probability is not in (0, 1], or their number does not fit.
    """
    a = gram.counts / gram.counts.sum()
    return float(np.einsum("b,k,bkl,l->", _coefficients(gram, p), a, gram.values, a))


def interval_over_draws(
    gram: CurvatureGram, statistic: Callable[[GramMatrices], float], *, level: float = 0.95
) -> Interval:
    """A jackknife interval over the draws of random signs: how far ``statistic`` is from its value without signs.

    It says nothing of other clients or samples. For a statistic that is linear in the Gram matrices, such as a
    penalty, it is Student's interval for the mean of the draws.

    Args:
        gram: of method "signs"; without draws nothing is uncertain, and both ends are the statistic itself.
        statistic: for example ``lambda g: shared_penalty(g, p)`` or ``lambda g: float(recovery_factor(g))``.
        level: of confidence.

    Raises:
        FedmaskError: if ``level`` is not between 0 and 1, or the statistic has no value.
    """
    if not 0 < level < 1:
        raise FedmaskError(f"level is {level}; a confidence level lies between 0 and 1")
    full = statistic(gram)
    if gram.draws is None:
        return Interval(full, full, level)
    n = len(gram.draws)
    if n < 2:
        return Interval(None, None, level, "undefined for one draw of signs (n < 2)")
    left_out = (n * gram.values - gram.draws) / (n - 1)
    without = np.array([statistic(CurvatureGram(values, gram.counts, gram.clients)) for values in left_out])
    error = np.sqrt((n - 1) / n * np.sum((without - without.mean()) ** 2))
    reach = float(special.stdtrit(n - 1, (1 + level) / 2) * error)
    return Interval(full - reach, full + reach, level)


class _LocalObjective:
    """An objective at a point θ, batch by batch, as a function of some of the tensors with the others held there."""

    def __init__(self, objective: Objective, blocks: Blocks, at: Tensor | None) -> None:
        model = objective.model
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self.objective = objective
        own = dict(named_parameters(self.model))
        flat = blocks.flatten(own)
        views = blocks.views(flat if at is None else at)
        # Each in its own storage: forward derivatives fill a zero tensor of the whole storage that a view sees.
        self.theta = {name: view.detach().to(own[name]).clone() for name, view in views.items()}
        self.real_names = {
            canonical_name(name): name for name, _ in self.model.named_parameters(remove_duplicate=False)
        }
        self.device = flat.device

    @property
    def batches(self) -> int:
        """How many there are."""
        return -(-len(self.objective.inputs) // self.objective.batch_size)

    def each(self) -> Iterator[tuple[float, "_Batch"]]:
        """Every batch with its share of the samples."""
        inputs, targets, size = self.objective.inputs, self.objective.targets, self.objective.batch_size
        for start in range(0, len(inputs), size):
            part = slice(start, start + size)
            batch = _Batch(self, inputs[part].to(self.device), targets[part].to(self.device))
            yield len(inputs[part]) / len(inputs), batch


@dataclass(frozen=True)
class _Batch:
    """The objective on one batch: outputs, loss, and products of its curvature with a vector."""

    local: _LocalObjective
    inputs: Tensor
    targets: Tensor

    def outputs(self, some: Named) -> Tensor:
        """The model's outputs with ``some`` tensors in place of θ's."""
        local = self.local
        named = {local.real_names[name]: tensor for name, tensor in (local.theta | some).items()}
        # Copies, since a layer in training mode writes into its buffers.
        buffers = {name: buffer.clone() for name, buffer in local.model.named_buffers()}
        outputs: Tensor = functional_call(local.model, named | buffers, (self.inputs,))
        return outputs

    def loss_of(self, outputs: Tensor) -> Tensor:
        """The mean loss, a scalar."""
        loss = self.local.objective.loss(outputs, self.targets)
        if loss.ndim:
            raise FedmaskError(f"the loss has shape {tuple(loss.shape)}; give one that is the mean over the samples")
        return loss

    def loss_at(self, some: Named) -> Tensor:
        """The loss with ``some`` tensors in place of θ's."""
        return self.loss_of(self.outputs(some))

    def product(self, vector: Named, curvature: Curvature) -> Named:
        """The curvature's product with ``vector``, which is zero in the tensors that it does not name; in those."""
        here = {name: self.local.theta[name] for name in vector}
        if curvature == "hessian":
            result: Named = vjp(grad(self.loss_at), here)[1](vector)[0]
            return result
        outputs, change = self.push_forward(vector)
        pull_back = vjp(self.outputs, here)[1]
        result = pull_back(self.output_hessian(outputs, change))[0]
        return result

    def push_forward(self, vector: Named) -> tuple[Tensor, Tensor]:
        """The outputs at θ, and J·vector."""
        here = {name: self.local.theta[name] for name in vector}
        both = jvp(self.outputs, (here,), (vector,))
        return both[0], both[1]

    def output_hessian(self, outputs: Tensor, change: Tensor) -> Tensor:
        """H_L·change."""
        product: Tensor = vjp(grad(self.loss_of), outputs)[1](change)[0]
        return product


class _Progress:
    def __init__(self, told: Callable[[int, int], None] | None) -> None:
        self.told, self.done, self.all = told, 0, 0

    def step(self) -> None:
        self.done += 1
        if self.told is not None:
            self.told(self.done, self.all)


def _signed_products(
    local: _LocalObjective,
    updates: Tensor,
    blocks: Blocks,
    signs: Float64[np.ndarray, "draws blocks"],
    curvature: Curvature,
    told: _Progress,
) -> Float64[np.ndarray, "draws blocks clients clients"]:
    """For each row s of ``signs``, s_b u_l^(b)ᵀ (H Σ_c s_c u_k^(c))^(b), made symmetric in k and l."""
    k = len(updates)
    told.all = len(signs) * k * local.batches
    found = np.zeros((len(signs), blocks.count, k, k))
    for draw, row in enumerate(signs):
        for column in range(k):
            vector = _signed(updates[column], blocks, row, local)
            product: Named = {}
            for share, batch in local.each():
                for name, part in batch.product(vector, curvature).items():
                    scaled = part.double().mul_(share)
                    product[name] = product[name].add_(scaled) if name in product else scaled
                told.step()
            found[draw, :, :, column] = row[:, None] * _inner_products(updates, product, blocks)
    return (found + found.swapaxes(-1, -2)) / 2


def _signed(update: Tensor, blocks: Blocks, signs: Float64[np.ndarray, " blocks"], local: _LocalObjective) -> Named:
    """Σ_b s_b u^(b) as named tensors, without the tensors in which every s_b is zero."""
    vector: Named = {}
    for name, shape, piece in zip(blocks.names, blocks.shapes, blocks.pieces, strict=True):
        row = signs[piece.first_block : piece.first_block + piece.rows]
        if piece.width and row.any():
            factors = torch.from_numpy(row).to(update)[:, None]
            runs = update[piece.start : piece.stop].view(piece.rows, piece.width)
            vector[name] = (runs * factors).view(shape).to(local.theta[name])
    return vector


def _inner_products(updates: Tensor, product: Named, blocks: Blocks) -> Float64[np.ndarray, "blocks clients"]:
    """⟨u_l^(b), product^(b)⟩ in float64."""
    found = np.zeros((blocks.count, len(updates)))
    for name, piece in zip(blocks.names, blocks.pieces, strict=True):
        if name not in product:
            continue
        flat = product[name].reshape(-1)
        for client, update in enumerate(updates):
            runs = update[piece.start : piece.stop].to(flat) * flat
            sums = runs.view(piece.rows, piece.width).sum(dim=1)
            found[piece.first_block : piece.first_block + piece.rows, client] += sums.cpu().numpy()
    return found


def _ggn_blocks(
    local: _LocalObjective, updates: Tensor, blocks: Blocks, chosen: list[int], told: _Progress
) -> Float64[np.ndarray, "blocks clients clients"]:
    """(J u_k^(b))ᵀ H_L (J u_l^(b)): forward derivatives alone, and products of the size of the outputs."""
    k = len(updates)
    told.all = len(chosen) * k * local.batches
    found = np.zeros((len(chosen), k, k))
    for share, batch in local.each():
        for place, block in enumerate(chosen):
            one_block = np.eye(1, blocks.count, block)[0]
            changes, products = [], []
            for update in updates:
                outputs, change = batch.push_forward(_signed(update, blocks, one_block, local))
                changes.append(change.double().flatten())
                products.append(batch.output_hessian(outputs, change).double().flatten())
                told.step()
            found[place] += share * (torch.stack(changes) @ torch.stack(products).T).cpu().numpy()
    return (found + found.swapaxes(-1, -2)) / 2


def _exact(
    local: _LocalObjective, updates: Tensor, blocks: Blocks, curvature: Curvature, told: _Progress
) -> Float64[np.ndarray, "blocks clients clients"]:
    """The whole matrix, then its diagonal blocks."""
    theta = blocks.flatten(local.theta)
    matrix = torch.zeros(blocks.parameters, blocks.parameters, dtype=torch.float64, device=theta.device)
    told.all = local.batches
    for share, batch in local.each():
        matrix += share * _whole(batch, theta, blocks, curvature).double()
        told.step()
    rows, stops = updates.to(matrix), np.cumsum(blocks.sizes).tolist()
    forms = []
    for stop, size in zip(stops, blocks.sizes.tolist(), strict=True):
        part = rows[:, stop - size : stop]
        forms.append((part @ matrix[stop - size : stop, stop - size : stop] @ part.T).cpu().numpy())
    found = np.stack(forms)
    return np.asarray((found + found.swapaxes(-1, -2)) / 2)


def _whole(batch: _Batch, theta: Tensor, blocks: Blocks, curvature: Curvature) -> Tensor:
    """The Hessian or the GGN of one batch, (d, d)."""

    def outputs_at(flat: Tensor) -> Tensor:
        return batch.outputs(blocks.views(flat))

    if curvature == "hessian":
        return _hessian(lambda flat: batch.loss_of(outputs_at(flat)), theta)
    jacobian = _each_direction(lambda one: jvp(outputs_at, (theta,), (one,))[1], theta).T
    return jacobian.T @ _hessian(batch.loss_of, outputs_at(theta)) @ jacobian


def _hessian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return _each_direction(lambda one: vjp(grad(function), x)[1](one)[0], x)


def _each_direction(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A row for each direction of ``x``, a few at a time."""
    directions = torch.eye(x.numel(), dtype=x.dtype, device=x.device).view(-1, *x.shape)
    rows: Tensor = vmap(product, chunk_size=64)(directions)
    return rows.flatten(1)


@contextmanager
def _evaluation(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in one mode, and attention in kernels that have second derivatives; then as they were."""
    modes = [(module, module.training) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    model.train(training)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in modes:
            module.training = mode


def _signs(seed: int, draws: int, blocks: int) -> Float64[np.ndarray, "draws blocks"]:
    """±1 by the top bit of each block's word."""
    rows = [words(seed, Purpose.CURVATURE_SIGNS, blocks, draw=draw) for draw in range(draws)]
    return np.where(np.stack(rows) >> np.uint64(63), -1.0, 1.0)


def _coefficients(gram: GramMatrices, p: float | Sequence[float]) -> Float64[np.ndarray, " blocks"]:
    """(1−p)/(2p), one a block."""
    probabilities = keep_probabilities(p, len(gram.values))
    if not np.all(probabilities > 0):
        raise FedmaskError("p is 0; the penalty divides by it, so a probability of keeping lies in (0, 1]")
    return np.broadcast_to((1 - probabilities) / (2 * probabilities), len(gram.values))


def _chosen(blocks: Blocks, only: Sequence[int] | None) -> list[int]:
    chosen = list(range(blocks.count)) if only is None else list(only)
    if not chosen or len(set(chosen)) != len(chosen):
        raise FedmaskError(f"only is {chosen}; name at least one block, and each once")
    if unknown := [block for block in chosen if not 0 <= block < blocks.count]:
        raise FedmaskError(f"block {unknown[0]} is unknown; there are {blocks.count} blocks, counted from 0")
    return chosen


def _check_choices(curvature: str, method: str, draws: int, blocks: Blocks) -> None:
    if curvature not in get_args(Curvature):
        raise FedmaskError(f"curvature {curvature!r} is unknown; use one of {', '.join(get_args(Curvature))}")
    if method not in get_args(Method):
        raise FedmaskError(f"method {method!r} is unknown; use one of {', '.join(get_args(Method))}")
    if method == "signs" and draws < 1:
        raise FedmaskError(f"draws is {draws}; the mean of random signs needs at least one, an error at least two")
    if method == "exact" and blocks.parameters > EXACT_LIMIT:
        raise FedmaskError(
            f"the model has {blocks.parameters} parameters and its whole {curvature} their square; "
            f'above {EXACT_LIMIT} use method="blocks" or "signs"'
        )


def _check_finite(
    values: Float64[np.ndarray, "blocks clients clients"],
    chosen: list[int],
    blocks: Blocks,
    clients: tuple[int, ...],
    curvature: str,
) -> None:
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        block, client, _ = wrong[0]
        raise FedmaskError(
            f"the {curvature} gives NaN or infinity for client {clients[client]} in block "
            f"{blocks.block_name(chosen[block])!r}; check that the loss at this point and the updates are finite"
        )
