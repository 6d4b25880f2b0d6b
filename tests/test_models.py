"""The networks, and their convolutions for small images against PyTorch's own."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedmask import Blocks
from fedmask.federated import RunConfig, dirichlet_partition, resnet18
from fedmask.federated.models import ProductConv2d, SmallCNN, crop_kernels
from fedmask.federated.training import Trainer
from tests.test_training import DIGITS

# The digits, each pixel four by four: of CIFAR's size, and three channels.
LARGE = dataclasses.replace(
    DIGITS,
    train_images=DIGITS.train_images.repeat(3, axis=1).repeat(4, axis=2).repeat(4, axis=3),
    test_images=DIGITS.test_images.repeat(3, axis=1).repeat(4, axis=2).repeat(4, axis=3),
)


def gradients(model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(images).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@given(
    size=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_cropped_convolution_computes_the_same(size, kernel, stride, padding, bias, seed):
    if any(s + 2 * p < k for s, p, k in zip(size, padding, kernel, strict=True)) or any(
        p >= k for p, k in zip(padding, kernel, strict=True)
    ):
        return  # no output, or one that sees padding alone
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Conv2d(2, 3, kernel, stride=stride, padding=padding, bias=bias)).double()
    small = copy.deepcopy(plain)
    crops = crop_kernels(small, (2, *size))
    images = torch.randn(4, 2, *size, dtype=torch.float64)
    assert type(small[0]) is ProductConv2d
    assert small(images).shape == plain(images).shape
    torch.testing.assert_close(small(images), plain(images))
    expected, found = gradients(plain, images), gradients(small, images)
    whole = torch.zeros_like(expected["0.weight"])
    whole[:, :, *crops.get("0.weight", (slice(None), slice(None)))] = found["0.weight"]
    torch.testing.assert_close(whole, expected["0.weight"])
    assert (expected["0.weight"][whole == 0] == 0).all()
    if bias:
        torch.testing.assert_close(found["0.bias"], expected["0.bias"])
    far = images.clone().requires_grad_()
    near = images.clone().requires_grad_()
    plain(far).square().sum().backward()
    small(near).square().sum().backward()
    torch.testing.assert_close(near.grad, far.grad)


def test_the_last_stage_of_resnet_with_the_torchvision_stem_loses_its_dead_taps_and_with_the_cifar_stem_none():
    model = resnet18(stem="torchvision")
    whole = sum(parameter.numel() for parameter in model.parameters())
    crops = crop_kernels(model, (3, 32, 32))
    assert set(crops) == {f"layer4.{block}.conv{i}.weight" for block in (0, 1) for i in (1, 2)}
    assert sum(parameter.numel() for parameter in model.parameters()) == whole - 512 * (256 * 5 + 3 * 512 * 8)
    assert crop_kernels(resnet18(stem="cifar"), (3, 32, 32)) == {}
    assert crop_kernels(SmallCNN(channels=1), (1, 8, 8)) == {}


def test_training_with_cropped_kernels_is_plain_sgd_and_leaves_dead_taps_untouched():
    config = RunConfig(clients=20, cohort=4, stem="torchvision", batch_size=32, local_steps=2, seed=3)
    partition = dirichlet_partition(LARGE.train_labels, config.clients, config.alpha, config.seed)
    updates = []
    for factory in (None, lambda: resnet18(stem="torchvision")):  # one's own is not cropped
        trainer = Trainer(config, LARGE, partition, factory)
        weights = trainer.weights.clone()
        update = torch.full_like(weights, torch.nan)
        trainer.train(1, 0, weights, {}, update)
        updates.append((update, trainer.blocks, weights))
    (cropped, blocks, weights), (plain, _, same) = updates
    assert torch.equal(weights, same)
    assert torch.linalg.vector_norm(cropped - plain) <= 1e-4 * torch.linalg.vector_norm(plain)
    taps = blocks.views(cropped)["layer4.1.conv2.weight"]
    assert taps[:, :, 1, 1].count_nonzero() > 0
    taps[:, :, 1, 1] = 0
    assert taps.count_nonzero() == 0


def test_weight_decay_moves_every_weight_so_nothing_is_cropped():
    config = RunConfig(clients=20, cohort=4, stem="torchvision", batch_size=16, local_steps=1, weight_decay=0.1)
    partition = dirichlet_partition(LARGE.train_labels, config.clients, config.alpha, config.seed)
    trainer = Trainer(config, LARGE, partition, None)
    update = torch.zeros_like(trainer.weights)
    trainer.train(1, 0, trainer.weights, {}, update)
    taps = Blocks.views(trainer.blocks, update)["layer4.1.conv2.weight"]
    assert taps[:, :, 0, 0].count_nonzero() > 0


@pytest.mark.parametrize("stem", ["cifar", "torchvision"])
def test_evaluation_is_that_of_the_whole_network(stem):
    config = RunConfig(clients=20, cohort=4, stem=stem, evaluation_batch=8)
    partition = dirichlet_partition(LARGE.train_labels, config.clients, config.alpha, config.seed)
    cropped = Trainer(config, LARGE, partition, None)
    plain = Trainer(config, LARGE, partition, lambda: resnet18(stem=stem))
    loss, correct = plain.evaluate(cropped.weights, {}, 0)
    assert cropped.evaluate(cropped.weights, {}, 0) == (pytest.approx(loss, rel=1e-5), correct)
