"""The work that every peer does: one round is 10 clients with 500 images each, batch 32, one epoch.

The network is torchvision's ResNet-18 with GroupNorm of 32 groups for 10 classes, lr 0.01, plain SGD. Images are
random bytes, the same everywhere, and so are the initial weights. This file needs PyTorch and torchvision only, so
that every peer can have an environment of its own.
"""

import functools
import json
import time

import torch
from torch import nn

CLIENTS, IMAGES, BATCH, LEARNING_RATE = 10, 500, 32, 0.01
WARM_UP, ROUNDS = 1, 3
THREADS = 1  # of a client; as many clients at a time as there are cores


def network() -> nn.Module:
    """The network with its initial weights."""
    from torchvision.models.resnet import BasicBlock, ResNet

    torch.manual_seed(0)
    return ResNet(BasicBlock, [2, 2, 2, 2], num_classes=10, norm_layer=functools.partial(nn.GroupNorm, 32))


@functools.cache
def images() -> tuple[torch.Tensor, torch.Tensor]:
    """All clients' images, uint8, and labels."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (CLIENTS * IMAGES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return pixels, torch.arange(CLIENTS * IMAGES) % 10


def shard(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One client's images as the network takes them, and labels."""
    pixels, labels = images()
    mine = slice(client * IMAGES, (client + 1) * IMAGES)
    return (pixels[mine].float() - 127.5) / 73.9, labels[mine]


def train(model: nn.Module, client: int) -> None:
    """One epoch, in place."""
    inputs, labels = shard(client)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for batch in torch.randperm(IMAGES).split(BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()


def tell(**what: object) -> None:
    """One line for the driver."""
    print("PEER " + json.dumps({"at": time.time(), **what}), flush=True)
