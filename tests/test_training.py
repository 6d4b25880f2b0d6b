"""Local training and evaluation against plain PyTorch written out."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedmask import FedmaskError
from fedmask.federated import ImageData, RunConfig, SmallCNN, dirichlet_partition, load_data, resnet18
from fedmask.federated.training import Trainer, batches

DIGITS = load_data("digits")
CONFIG = RunConfig(clients=10, cohort=4, rounds=2, model="cnn", groups=8, seed=5)


def trainer(config: RunConfig, factory=None, data: ImageData = DIGITS) -> Trainer:
    partition = dirichlet_partition(data.train_labels, config.clients, config.alpha, config.seed)
    return Trainer(config, data, partition, factory)


def pixels(data: ImageData, images: np.ndarray) -> torch.Tensor:
    mean, std = (torch.tensor(v * 255).view(1, -1, 1, 1) for v in (data.channel_mean, data.channel_std))
    return ((torch.from_numpy(images) - mean) / std).float()


def update_of(config: RunConfig, client: int = 3, round_: int = 1, factory=None):
    one = trainer(config, factory)
    weights = one.weights.clone()
    update = torch.empty_like(weights)
    report = one.train(round_, client, weights, one.buffers(), update)
    return one, weights, update, report


def test_one_full_batch_step_is_the_learning_rate_times_the_shards_gradient():
    config = dataclasses.replace(CONFIG, batch_size="full", learning_rate=0.1)
    one, weights, update, report = update_of(config)
    torch.manual_seed(0)
    model = SmallCNN(classes=10, channels=1, groups=8).double()
    one.blocks.bind(model, weights.double())
    shard = dirichlet_partition(DIGITS.train_labels, 10, 100.0, 5).shard(3)
    images, labels = pixels(DIGITS, DIGITS.train_images[shard]).double(), torch.from_numpy(DIGITS.train_labels[shard])
    loss = cross_entropy(model(images), labels)
    loss.backward()
    gradient = one.blocks.flatten({name: p.grad for name, p in model.named_parameters()})
    assert (report.steps, report.samples) == (1, len(shard))
    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    assert update.double().numpy() == pytest.approx(0.1 * gradient.numpy(), rel=1e-3, abs=1e-6)


def test_a_full_batch_gradient_does_not_depend_on_its_chunks():
    whole = update_of(dataclasses.replace(CONFIG, batch_size="full", chunk_size=10**6))[2]
    chunked = update_of(dataclasses.replace(CONFIG, batch_size="full", chunk_size=17))[2]
    assert torch.linalg.vector_norm(whole - chunked) <= 1e-5 * torch.linalg.vector_norm(whole)


def test_bfloat16_rounds_products_and_keeps_weights_updates_and_losses_in_float32():
    exact = update_of(CONFIG)
    rounded = update_of(dataclasses.replace(CONFIG, precision="bfloat16"))
    assert rounded[2].dtype == torch.float32
    difference = torch.linalg.vector_norm(exact[2] - rounded[2]) / torch.linalg.vector_norm(exact[2])
    assert 1e-4 < difference < 0.1
    assert rounded[3].loss == pytest.approx(exact[3].loss, rel=0.01)
    again = update_of(dataclasses.replace(CONFIG, precision="bfloat16"))
    assert torch.equal(again[2], rounded[2])


def test_minibatch_training_is_sgd_written_out_with_momentum_and_weight_decay():
    config = dataclasses.replace(CONFIG, batch_size=32, local_epochs=2, momentum=0.9, weight_decay=0.01)
    one, weights, update, report = update_of(config)
    model = SmallCNN(classes=10, channels=1, groups=8)
    one.blocks.bind(model, weights.clone())
    shard = dirichlet_partition(DIGITS.train_labels, 10, 100.0, 5).shard(3)
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    steps = 0
    for batch in batches(len(shard), config, 1, 3):
        chosen = shard[batch]
        model.zero_grad()
        cross_entropy(
            model(pixels(DIGITS, DIGITS.train_images[chosen])), torch.from_numpy(DIGITS.train_labels[chosen])
        ).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                velocity[name] = 0.9 * velocity[name] + p.grad + 0.01 * p
                p -= 0.01 * velocity[name]
        steps += 1
    expected = weights - one.blocks.flatten(dict(model.named_parameters()))
    assert report.steps == steps == 2 * -(-len(shard) // 32)
    assert torch.linalg.vector_norm(update - expected) <= 1e-4 * torch.linalg.vector_norm(expected)


def test_an_update_is_not_zero_and_leaves_the_global_weights_alone():
    one, weights, update, _ = update_of(CONFIG)
    before = weights.clone()
    one.train(2, 4, weights, one.buffers(), update)
    assert torch.equal(weights, before)
    assert torch.count_nonzero(update) > 0


def test_training_is_a_pure_function_of_round_and_client():
    one = trainer(CONFIG)
    weights, buffers = one.weights.clone(), one.buffers()
    first, again, other = (torch.empty_like(weights) for _ in range(3))
    one.train(1, 3, weights, buffers, first)
    one.train(2, 5, weights, buffers, other)
    one.train(1, 3, weights, buffers, again)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("size", [1, 7, 32, 100, 1000])
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_epoch_goes_through_the_shard_once_in_an_order_of_its_own(size, epochs):
    config = dataclasses.replace(CONFIG, batch_size=size, local_epochs=epochs)
    made = list(batches(100, config, 4, 2))
    per_epoch = -(-100 // size)
    assert len(made) == epochs * per_epoch
    orders = [np.concatenate(made[e * per_epoch : (e + 1) * per_epoch]).tolist() for e in range(epochs)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == epochs


def test_local_steps_go_on_through_epochs_until_they_are_done():
    for steps in (1, 4, 5, 11):
        config = dataclasses.replace(CONFIG, batch_size=32, local_steps=steps)
        assert [len(batch) for batch in batches(100, config, 1, 1)] == ([32, 32, 32, 4] * 3)[:steps]
    full = dataclasses.replace(CONFIG, batch_size="full", local_steps=3)
    assert [len(batch) for batch in batches(100, full, 1, 1)] == [100] * 3


@pytest.mark.parametrize("size", [1, 64, 100, 1000])
def test_evaluation_is_the_mean_over_the_whole_set_whatever_the_batch(size):
    data = dataclasses.replace(DIGITS, test_images=DIGITS.test_images[:100], test_labels=DIGITS.test_labels[:100])
    one = trainer(dataclasses.replace(CONFIG, evaluation_batch=size), data=data)
    weights = one.weights.clone()
    parts = [one.evaluate(weights, one.buffers(), part) for part in range(-(-100 // size))]
    model = SmallCNN(classes=10, channels=1, groups=8)
    one.blocks.bind(model, weights)
    scores = model(pixels(data, data.test_images))
    labels = torch.from_numpy(data.test_labels)
    assert sum(loss for loss, _ in parts) / 100 == pytest.approx(cross_entropy(scores, labels).item(), rel=1e-5)
    assert sum(correct for _, correct in parts) == int((scores.argmax(1) == labels).sum())


class WithBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, images):
        return self.net(images)


def test_a_clients_buffers_come_back_and_its_counter_counts_its_batches():
    _, _, _, report = update_of(dataclasses.replace(CONFIG, model="mine"), factory=WithBatchNorm)
    assert report.buffers["net.2.num_batches_tracked"].item() == report.steps
    assert report.buffers["net.2.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("stem", ["cifar", "torchvision"])
@pytest.mark.parametrize("channels", [1, 3])
def test_resnet18_is_the_papers_and_can_be_pickled(stem, channels):
    model = pickle.loads(pickle.dumps(resnet18(stem=stem, groups=32, channels=channels)))
    assert len(list(model.parameters())) == 62
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert sum(isinstance(module, nn.GroupNorm) for module in model.modules()) == 20
    assert model(torch.zeros(2, channels, 32, 32)).shape == (2, 10)
    if channels == 3:
        assert sum(p.numel() for p in model.parameters()) == {"cifar": 11_173_962, "torchvision": 11_181_642}[stem]


def test_per_sample_gradients_of_the_network_equal_a_plain_loop():
    torch.manual_seed(0)
    model = resnet18(stem="torchvision", groups=32)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    images, labels = torch.randn(3, 3, 32, 32), torch.tensor([1, 2, 3])

    def loss(weights, image, label):
        return cross_entropy(torch.func.functional_call(model, weights, (image[None],)), label[None])

    # batch on axis 1, as a transform sees it that did not move it
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 1, 0))(
        parameters, images.transpose(0, 1), labels
    )
    for k in range(3):
        model.zero_grad()
        cross_entropy(model(images[k : k + 1]), labels[k : k + 1]).backward()
        for name, p in model.named_parameters():
            scale = p.grad.abs().max() + 1e-12
            assert torch.all((per_sample[name][k] - p.grad).abs() <= 1e-5 * scale), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cohort": 11}, "cohort is 11, more than the 10 clients"),
        ({"cohort": 0}, "cohort is 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"momentum": -1.0}, "momentum is -1.0"),
        ({"mask": "independent", "p": 0.0}, r"p is 0.0, .* p must lie in \(0, 1\]"),
        ({"mask": "independent", "p": 1.5}, "p is 1.5"),
        ({"rho": 2.0}, "rho is 2.0"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"local_steps": 0}, "local_steps is 0"),
        ({"chunk_size": 0}, "chunk_size is 0"),
    ],
)
def test_a_wrong_configuration_is_refused_with_what_was_given(fields, message):
    with pytest.raises(FedmaskError, match=message):
        dataclasses.replace(CONFIG, **fields)


def test_a_configuration_survives_json_an_infinite_alpha_included():
    config = dataclasses.replace(CONFIG, alpha=float("inf"), batch_size="full")
    assert RunConfig.from_json(config.to_json()) == config
    with pytest.raises(FedmaskError, match="field 'colour' is unknown"):
        RunConfig.from_json({"colour": 1})


def test_wrong_models_are_refused():
    with pytest.raises(FedmaskError, match="model 'mine' is unknown"):
        trainer(dataclasses.replace(CONFIG, model="mine"))
    with pytest.raises(FedmaskError, match="groups is 7"):
        resnet18(groups=7)
    with pytest.raises(FedmaskError, match="groups is 5"):
        SmallCNN(groups=5)
    with pytest.raises(FedmaskError, match="stem 'deep' is unknown"):
        resnet18(stem="deep")
