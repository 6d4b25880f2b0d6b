"""Curvature Gram matrices: three methods against the full Hessian, finite differences, rationals and curvlinops."""

import itertools
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev
from torch.nn.functional import cross_entropy, mse_loss

from fedmask import (
    Blocks,
    CurvatureGram,
    FedmaskError,
    Objective,
    curvature,
    curvature_gram,
    gram_matrices,
    independent_penalty,
    interval_over_draws,
    penalty,
    recovery_factor,
    recovery_factor_interval,
    recovery_factor_per_block,
    shared_penalty,
)
from fedmask.federated.models import resnet18
from theory.quadratics import Instance, draw_instance, mean

CLASSES, SAMPLES, CLIENTS = 3, 5, 3


class Attention(nn.Module):
    """One head with LayerNorm, over four tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(tokens)
        return self.head((tokens + self.attention(x, x, x, need_weights=False)[0]).mean(dim=1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


NETWORKS = {
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.GroupNorm(2, 4),
            nn.Softplus(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
        (1, 6, 6),
    ),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Softplus(), nn.Linear(4, CLASSES)),
        (4,),
    ),
    "attention": (Attention, (4, 4)),
    "batch norm in evaluation": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()), (4,)),
    "tied": (Tied, (4,)),
}


def case(name: str, granularity: str = "tensor", **options) -> tuple[Objective, torch.Tensor, Blocks]:
    """An objective, K vectors and blocks, in float64."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model = make().double()
    inputs, targets = torch.randn(SAMPLES, *shape).double(), torch.arange(SAMPLES) % CLASSES
    blocks = Blocks.of(model, granularity)
    return Objective(model, inputs, targets, **options), torch.randn(CLIENTS, blocks.parameters).double(), blocks


def flat_parts(objective: Objective, blocks: Blocks):
    """θ, outputs(θ) and l(θ), written without the package's curvature module."""
    model = objective.model.eval()
    theta = blocks.flatten(dict(model.named_parameters())).detach()

    def outputs(flat):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return functional_call(model, blocks.views(flat), (objective.inputs,))

    return theta, outputs, lambda flat: objective.loss(outputs(flat), objective.targets)


def full_matrix(objective: Objective, blocks: Blocks, kind: str) -> np.ndarray:
    theta, outputs, loss = flat_parts(objective, blocks)
    if kind == "hessian":
        return hessian(loss)(theta).numpy()
    out = outputs(theta).detach()
    jacobian = jacrev(outputs)(theta).reshape(out.numel(), -1)
    inner = hessian(lambda o: objective.loss(o, objective.targets))(out).reshape(out.numel(), -1)
    return (jacobian.T @ inner @ jacobian).detach().numpy()


def forms(matrix: np.ndarray, updates: torch.Tensor, blocks: Blocks) -> np.ndarray:
    """u_k^(b)ᵀ H_bb u_l^(b), by masking columns."""
    owner, u = np.repeat(np.arange(blocks.count), blocks.sizes), updates.numpy()
    return np.array([(u * (owner == b)) @ matrix @ (u * (owner == b)).T for b in range(blocks.count)])


def close(expected: np.ndarray, rel: float = 1e-9):
    return pytest.approx(expected, rel=rel, abs=rel * np.abs(expected).max())


def every_sign(monkeypatch, blocks: int) -> None:
    """Replace the random signs by all 2^(B−1) that differ by more than a factor −1."""
    rows = np.array([(1.0, *rest) for rest in itertools.product((-1.0, 1.0), repeat=blocks - 1)])
    monkeypatch.setattr(curvature, "_signs", lambda seed, draws, count: rows)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("granularity", ["row", "tensor", "layer", "model"])
@pytest.mark.parametrize("name", NETWORKS)
def test_exact_and_blocks_equal_the_full_matrix(name, granularity, kind):
    objective, updates, blocks = case(name, granularity)
    expected = forms(full_matrix(objective, blocks, kind), updates, blocks)
    for method in ("exact", "blocks"):
        gram = curvature_gram(objective, updates, blocks, curvature=kind, method=method)
        assert gram.values == close(expected), method
        assert not gram.standard_errors.any()


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("name", ["cnn", "attention", "tied"])
def test_the_mean_over_all_sign_vectors_is_exact(name, kind, monkeypatch):
    objective, updates, blocks = case(name)
    every_sign(monkeypatch, blocks.count)
    gram = curvature_gram(objective, updates[:2], blocks, curvature=kind, method="signs", draws=2 ** (blocks.count - 1))
    assert len(gram.draws) == 2 ** (blocks.count - 1)
    assert gram.values == close(forms(full_matrix(objective, blocks, kind), updates[:2], blocks))


def test_signs_sum_to_the_form_of_the_signed_vector_and_follow_the_seed():
    objective, updates, blocks = case("mlp")
    three = curvature_gram(objective, updates, blocks, method="signs", draws=3, seed=5)
    four = curvature_gram(objective, updates, blocks, method="signs", draws=4, seed=5)
    other = curvature_gram(objective, updates, blocks, method="signs", draws=3, seed=6)
    assert np.array_equal(three.draws, four.draws[:3])
    assert not np.array_equal(three.draws, other.draws)
    signed = updates.numpy() * np.repeat(curvature._signs(5, 1, blocks.count)[0], blocks.sizes)
    assert three.draws[0].sum(axis=0) == close(signed @ full_matrix(objective, blocks, "hessian") @ signed.T)
    assert three.standard_errors == pytest.approx(three.draws.std(axis=0, ddof=1) / 3**0.5)


@pytest.mark.parametrize("name", NETWORKS)
def test_products_equal_central_differences_of_the_gradient(name):
    objective, updates, blocks = case(name)
    theta, _, loss = flat_parts(objective, blocks)
    slope = grad(loss)
    gram, step = curvature_gram(objective, updates, blocks), 1e-5
    owner = torch.from_numpy(np.repeat(np.arange(blocks.count), blocks.sizes))
    for b in range(blocks.count):
        parts = updates * (owner == b)
        slopes = torch.stack([(slope(theta + step * u) - slope(theta - step * u)) / (2 * step) for u in parts])
        assert gram.values[b] == pytest.approx((parts @ slopes.T).detach().numpy(), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("loss", [cross_entropy, mse_loss])
@pytest.mark.parametrize("method", ["exact", "blocks", "signs"])
def test_ggn_is_the_hessian_of_a_linear_model(method, loss):
    torch.manual_seed(1)
    model = nn.Linear(4, 3).double()
    targets = torch.tensor([0, 1, 2, 1, 0]) if loss is cross_entropy else torch.randn(5, 3).double()
    objective = Objective(model, torch.randn(5, 4).double(), targets, loss)
    blocks = Blocks.of(model)
    updates = torch.randn(2, blocks.parameters).double()
    both = [curvature_gram(objective, updates, blocks, curvature=c, method=method).values for c in ("hessian", "ggn")]
    assert both[0] == close(both[1])


class Quadratic(nn.Module):
    """½ θᵀHθ + gᵀθ with a parameter a block."""

    def __init__(self, instance: Instance) -> None:
        super().__init__()
        numbers = lambda values: torch.tensor(np.array(values, dtype=float))  # noqa: E731
        self.register_buffer("hessian", numbers(instance.hessian))
        self.register_buffer("gradient", numbers(instance.gradient))
        theta, owner = numbers(instance.theta), torch.tensor(instance.owner)
        self.parts = nn.ParameterList([theta[owner == b] for b in range(instance.blocks)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        theta = torch.cat(list(self.parts))
        return (theta @ self.hessian @ theta / 2 + self.gradient @ theta).expand(len(inputs))


@settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.sampled_from(["exact", "blocks"]))
def test_penalties_of_rational_quadratics_are_the_papers(random: Random, method):
    instance = draw_instance(random)
    model = Quadratic(instance)
    objective = Objective(model, torch.zeros(2, 1), torch.zeros(2), lambda outputs, _: outputs.mean(), batch_size=1)
    updates = torch.tensor(np.array(instance.updates, dtype=float))
    weights = [float(a) for a in instance.weights]
    gram = curvature_gram(objective, updates, Blocks.of(model), method=method, counts=weights)
    p, own = float(instance.p), [instance.block_form(u, u) for u in instance.updates]
    scale = (1 - instance.p) / (2 * instance.p)
    diluted = sum((a**2 * x for a, x in zip(instance.weights, own, strict=True)), start=instance.p * 0)
    together = instance.block_form(mean(instance), mean(instance))
    tight = {"rel": 1e-11, "abs": 1e-10}
    assert penalty(gram, p) == pytest.approx([float(scale * x) for x in own], **tight)
    assert independent_penalty(gram, p) == pytest.approx(float(scale * diluted), **tight)
    assert shared_penalty(gram, p) == pytest.approx(float(scale * together), **tight)
    if abs(diluted) > 1e-6:
        factor = recovery_factor(gram, weighted=True).value
        assert factor == pytest.approx(float(together / diluted), rel=1e-9, abs=1e-9)


def test_an_indefinite_curvature_is_not_cut_at_zero():
    """The clip that keeps a squared norm's rounding from going negative once made this factor 0."""
    hessian = [[1, 0], [0, -1]]
    model = Quadratic(Instance(hessian, [0, 0], [0, 0], owner=(0, 0), updates=[], weights=[], p=0.5))
    objective = Objective(model, torch.zeros(1, 1), torch.zeros(1), lambda outputs, _: outputs.mean())
    updates = torch.tensor([[2.0, 0.0], [-2.0, 3.0]]).double()
    gram = curvature_gram(objective, updates, Blocks.of(model))
    assert gram.values[0].tolist() == [[4, -4], [-4, -5]]
    assert recovery_factor(gram).value == pytest.approx(9)  # −9 / (4 − 5)
    assert recovery_factor_per_block(gram).tolist() == pytest.approx([9])
    assert recovery_factor(gram.subcohort([1])).value == pytest.approx(1)
    changing = curvature_gram(objective, torch.tensor([[2.0, 0.0], [-2.0, 3.0], [0.0, 1.0]]), Blocks.of(model))
    assert "changes its sign" in recovery_factor_interval(changing).reason
    concave = curvature_gram(objective, torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, -2.5]]), Blocks.of(model))
    assert recovery_factor_interval(concave).low < 0


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("method", ["exact", "blocks", "signs"])
def test_the_batch_size_and_other_blocks_do_not_change_the_result(method, kind):
    whole, updates, blocks = case("cnn")
    told = []
    options = {"curvature": kind, "method": method, "draws": 2}
    expected = curvature_gram(whole, updates, blocks, **options).values
    parts = case("cnn", batch_size=2)[0]
    found = curvature_gram(parts, updates, blocks, on_progress=lambda *done: told.append(done), **options)
    assert found.values == close(expected, 1e-12)
    assert told[-1][0] == told[-1][1] == len(told)
    if method != "signs":
        some = curvature_gram(whole, updates, blocks, only=[3, 1], **options)
        assert some.values == close(expected[[3, 1]], 1e-12)


def test_the_model_is_left_as_it_was_and_another_point_can_be_given():
    objective, updates, blocks = case("batch norm in evaluation")
    model = objective.model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    there = blocks.flatten(dict(model.named_parameters())).detach() - updates[0]
    found = curvature_gram(objective, updates, blocks, at=there)
    assert model.training
    assert model[1].training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        for name, view in blocks.views(there).items():
            dict(model.named_parameters())[name].copy_(view)
    assert found.values == close(curvature_gram(objective, updates, blocks).values, 1e-12)


def test_batch_norm_in_training_mode_equals_central_differences_and_keeps_its_buffers():
    objective, updates, blocks = case("batch norm in evaluation", training=True)
    model = objective.model.eval()
    before = model[1].running_mean.clone()
    gram = curvature_gram(objective, updates, blocks)
    assert torch.equal(model[1].running_mean, before)
    assert not model.training
    theta, _, loss = flat_parts(objective, blocks)
    model.train()
    owner, step = torch.from_numpy(np.repeat(np.arange(blocks.count), blocks.sizes)), 1e-5

    def gradient(flat):
        flat = flat.clone().requires_grad_()
        return torch.autograd.grad(loss(flat), flat)[0]

    for b in range(blocks.count):
        parts = updates * (owner == b)
        slopes = torch.stack([(gradient(theta + step * u) - gradient(theta - step * u)) / (2 * step) for u in parts])
        assert gram.values[b] == pytest.approx((parts @ slopes.T).numpy(), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("method", ["exact", "blocks", "signs"])
def test_float32_is_near_float64(method):
    objective, updates, blocks = case("mlp")
    options = {"method": method, "draws": 2}
    expected = curvature_gram(objective, updates, blocks, **options).values
    single = Objective(objective.model.float(), objective.inputs.float(), objective.targets)
    assert curvature_gram(single, updates.float(), blocks, **options).values == close(expected, 1e-5)


def test_the_interval_over_draws_is_students_for_a_penalty():
    objective, updates, blocks = case("mlp")
    gram = curvature_gram(objective, updates, blocks, method="signs", draws=4)
    each = [shared_penalty(CurvatureGram(d, gram.counts, gram.clients), 0.5) for d in gram.draws]
    reach = 3.182446305284263 * np.std(each, ddof=1) / 2
    interval = interval_over_draws(gram, lambda g: shared_penalty(g, 0.5))
    assert (interval.low, interval.high) == pytest.approx((np.mean(each) - reach, np.mean(each) + reach))
    sub = gram.subcohort([2, 0])
    assert sub.draws.mean(axis=0) == close(sub.values)
    exact = curvature_gram(objective, updates, blocks)
    at = shared_penalty(exact, [0.5] * blocks.count)
    assert interval_over_draws(exact, lambda g: shared_penalty(g, 0.5)).low == pytest.approx(at)
    one = curvature_gram(objective, updates, blocks, method="signs", draws=1)
    assert interval_over_draws(one, lambda g: shared_penalty(g, 0.5)).low is None
    assert np.isnan(one.standard_errors).all()


# curvlinops' Hessian takes forward derivatives of GroupNorm's gradient, which PyTorch does not have in eager mode.
@pytest.mark.parametrize(("name", "kind"), [("mlp", "Hessian"), ("mlp", "GGN"), ("cnn", "GGN")])
def test_curvlinops_agrees(name, kind):
    curvlinops = pytest.importorskip("curvlinops")
    objective, updates, blocks = case(name, batch_size=2)
    model = objective.model.eval()
    parameters = list(model.parameters())
    data = [(objective.inputs[:2], objective.targets[:2]), (objective.inputs[2:], objective.targets[2:])]
    operator = getattr(curvlinops, f"{kind}LinearOperator")(model, nn.CrossEntropyLoss(), parameters, data)
    matrix = operator @ torch.eye(blocks.parameters).double()
    gram = curvature_gram(objective, updates, blocks, curvature=kind.lower())
    assert gram.values == close(forms(matrix.detach().numpy(), updates, blocks))


def test_what_is_wrong_is_said():
    objective, updates, blocks = case("mlp")
    for options, message in (
        ({"method": "signs", "draws": 0}, "draws is 0"),
        ({"only": [99]}, "block 99 is unknown"),
        ({"only": []}, "name at least one block"),
        ({"only": [1, 1]}, "each once"),
        ({"counts": [0, 0, 0]}, "weights of all 3 clients are zero"),
    ):
        with pytest.raises(FedmaskError, match=message):
            curvature_gram(objective, updates, blocks, **options)
    for choice, message in (
        (("fisher", "exact"), "curvature 'fisher' is unknown; use one of hessian, ggn"),
        (("ggn", "lanczos"), "method 'lanczos' is unknown; use one of exact, blocks, signs"),
    ):
        with pytest.raises(FedmaskError, match=message):
            curvature._check_choices(*choice, 1, blocks)
    with pytest.raises(FedmaskError, match=r"updates have shape \(3, 2\)"):
        curvature_gram(objective, updates[:, :2], blocks)
    with pytest.raises(FedmaskError, match="never finer than rows"):
        curvature_gram(objective, updates, blocks.at("element"))
    with pytest.raises(FedmaskError, match="NaN or infinity for client 7 in block '0.weight'"):
        curvature_gram(objective, updates * float("inf"), blocks, clients=[7, 8, 9])
    each = Objective(objective.model, objective.inputs, objective.targets, nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(FedmaskError, match="give one that is the mean"):
        curvature_gram(each, updates, blocks)
    with pytest.raises(FedmaskError, match="5 samples and 4 targets"):
        Objective(objective.model, objective.inputs, objective.targets[:4])
    with pytest.raises(FedmaskError, match="batch_size is 0"):
        Objective(objective.model, objective.inputs, objective.targets, batch_size=0)
    gram = gram_matrices(updates, blocks)
    for p, message in ((0.0, "p is 0"), (1.5, r"p is 1\.5"), ([0.5, 0.5], "give one probability")):
        with pytest.raises(FedmaskError, match=message):
            penalty(gram, p)
    large = nn.Linear(100, 100)
    with pytest.raises(FedmaskError, match=r"10100 parameters .* above 4096 use"):
        curvature_gram(
            Objective(large, torch.zeros(1, 100), torch.zeros(1, dtype=torch.long)),
            torch.zeros(1, 10100),
            Blocks.of(large),
            method="exact",
        )


def test_resnet18_agrees_between_blocks_and_signs_where_one_block_is_chosen():
    """With one block there is no other to cancel, so a single draw is exact."""
    torch.manual_seed(0)
    model = resnet18(stem="torchvision")
    blocks = Blocks.of(model)
    objective = Objective(model, torch.randn(2, 3, 32, 32), torch.tensor([1, 2]))
    updates = torch.zeros(1, blocks.parameters)
    last = blocks.pieces[-2]
    updates[0, last.start : last.stop] = torch.randn(last.stop - last.start)
    for kind in ("hessian", "ggn"):
        one = [
            curvature_gram(objective, updates, blocks, curvature=kind, method=m, only=[60], draws=1).values
            for m in ("blocks", "signs")
        ]
        assert one[0] == close(one[1], 1e-4)
        assert one[0].item() > 0
