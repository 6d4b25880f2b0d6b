"""What a client does: local SGD from the global weights, and evaluation of those weights.

Both are pure functions of (configuration, data, weights, round, client). A :class:`Trainer` holds the one
model and the data that they need; a process has one and uses it for any client of any round.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedmask.blocks import Blocks, canonical_name, named_parameters
from fedmask.errors import FedmaskError
from fedmask.federated.config import BatchSize, RunConfig
from fedmask.federated.data import ImageData
from fedmask.federated.models import SmallCNN, crop_kernels, resnet18
from fedmask.federated.partition import Partition
from fedmask.randomness import Purpose, permutation, words

__all__ = ["ClientReport", "ModelFactory", "Trainer", "batches", "initial_model", "one_thread"]

ModelFactory = Callable[[], nn.Module]


@dataclass(frozen=True)
class ClientReport:
    """What a client tells beside its update.

    Attributes:
        samples: n_k.
        steps: gradient steps made.
        loss: mean training loss over the samples seen, at the weights they were seen with.
        buffers: the model's buffers after training, by canonical name.
    """

    samples: int
    steps: int
    loss: float
    buffers: Mapping[str, Tensor]


class Trainer:
    """A model and the data, ready for any client of any round.

    Attributes:
        blocks: the model's parameters in flat order.
        weights: (d,), the run's initial weights.
    """

    def __init__(self, config: RunConfig, data: ImageData, partition: Partition, factory: ModelFactory | None) -> None:
        """``factory`` makes a model of your own; None makes the one that the configuration names."""
        self._config, self._partition = config, partition
        self._device = torch.device(config.device)
        self._model = initial_model(config, data, factory).to(self._device)
        self.blocks = Blocks.of(self._model)
        self.weights = self.blocks.flatten(dict(self._model.named_parameters(remove_duplicate=False)))
        # Weight decay moves a weight without a gradient too, and what a model of one's own does is not known.
        plain = factory is None and config.weight_decay == 0
        self._crops = crop_kernels(self._model, data.train_images.shape[1:]) if plain else {}
        self._parameters = dict(named_parameters(self._model))
        self._train = _resident(data.train_images, data.train_labels, self._device)
        self._test = _resident(data.test_images, data.test_labels, self._device)
        shape = (1, -1, 1, 1)
        self._mean = torch.tensor(data.channel_mean * 255, dtype=torch.float32, device=self._device).view(shape)
        self._std = torch.tensor(data.channel_std * 255, dtype=torch.float32, device=self._device).view(shape)

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the model's buffers, by canonical name."""
        return {name: buffer.clone() for name, buffer in self._named_buffers()}

    def train(
        self,
        round_: int,
        client: int,
        weights: Float[Tensor, " parameters"],
        buffers: Mapping[str, Tensor],
        update: Float[Tensor, " parameters"],
        *,
        shard: Int64[np.ndarray, " samples"] | None = None,
        repeat: int = 0,
    ) -> ClientReport:
        """Train locally from ``weights`` and write Δ_k = θ − θ_k into ``update``; nothing else changes.

        With a ``shard`` the client trains on these samples instead of its own. A ``repeat`` other than 0 is
        another training than the run's, with an order of batches of its own.
        """
        config = self._config
        identity = 0 if config.control == "identical-clients" else client
        shard = self._partition.shard(identity) if shard is None else shard
        self._load(weights, buffers)
        self._model.train()
        draw = repeat << 32
        torch.manual_seed(int(words(config.seed, Purpose.TRAINING, 1, round_=round_, client=identity, draw=draw)[0]))
        optimizer = torch.optim.SGD(
            self._model.parameters(),
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
        losses = torch.zeros((), dtype=torch.float64, device=self._device)
        steps, seen = 0, 0
        for batch in batches(len(shard), config, round_, identity, repeat=repeat):
            optimizer.zero_grad(set_to_none=True)
            losses += self._gradient(shard[batch])
            optimizer.step()
            steps, seen = steps + 1, seen + len(batch)
        self._write_update(weights.to(self._device), update)
        return ClientReport(len(shard), steps, float(losses) / seen, self.buffers())

    def gradient_variance(
        self, client: int, weights: Float[Tensor, " parameters"], buffers: Mapping[str, Tensor]
    ) -> float:
        """tr C_k, the trace of the covariance (n − 1) of the per-sample gradients on a client's shard.

        The variance of a minibatch gradient of b of the n samples is (tr C_k / b)(1 − b/n).

        Raises:
            FedmaskError: if the client holds fewer than two samples.
        """
        shard = self._partition.shard(client)
        if len(shard) < 2:
            raise FedmaskError(f"client {client} holds {len(shard)} samples; a covariance needs two")
        self._load(weights, buffers)
        self._model.train()
        parameters = list(self._parameters.values())
        mean = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        squares = 0.0
        for sample in shard:
            self._model.zero_grad(set_to_none=True)
            self._gradient(np.array([sample]))
            for total, p in zip(mean, parameters, strict=True):
                assert p.grad is not None
                squares += float(p.grad.double().square().sum())
                total += p.grad
        of_mean = sum(float(total.square().sum()) for total in mean) / len(shard) ** 2
        return (squares - len(shard) * of_mean) / (len(shard) - 1)

    @torch.no_grad()
    def evaluate(
        self, weights: Float[Tensor, " parameters"], buffers: Mapping[str, Tensor], part: int
    ) -> tuple[float, int]:
        """(sum of losses, correct) over one part of the test set, of ``evaluation_batch`` samples at most."""
        self._load(weights, buffers)
        self._model.eval()
        images, labels = self._test
        size = self._config.evaluation_batch
        where = slice(part * size, (part + 1) * size)
        scores = self._scores(images[where])
        wanted = labels[where].to(self._device)
        loss = cross_entropy(scores, wanted, reduction="none").double().sum()
        return float(loss), int((scores.argmax(dim=1) == wanted).sum())

    def shard(self, client: int) -> Int64[np.ndarray, " samples"]:
        """The places of a client's samples in the training set."""
        return self._partition.shard(client)

    def samples(
        self, indices: Int64[np.ndarray, " samples"]
    ) -> tuple[Float32[Tensor, "samples channels height width"], Int64[Tensor, " samples"]]:
        """Normalized training images, as the network sees them, and their labels."""
        images, labels = self._train
        chosen = torch.from_numpy(indices)
        return self._normalized(images[chosen.to(images.device)]), labels[chosen.to(labels.device)].to(self._device)

    @property
    def test_samples(self) -> int:
        """Size of the test set."""
        return len(self._test[1])

    def _gradient(self, indices: Int64[np.ndarray, " batch"]) -> Float[Tensor, ""]:
        """Accumulate the gradient of the mean loss over a batch, in chunks; return the sum of losses."""
        images, labels = self._train
        whole = self._config.batch_size == "full"
        size = self._config.chunk_size if whole else len(indices)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for start in range(0, len(indices), size):
            chosen = torch.from_numpy(indices[start : start + size])
            scores = self._scores(images[chosen.to(images.device)])
            loss = cross_entropy(scores, labels[chosen.to(labels.device)], reduction="sum")
            (loss / len(indices)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _scores(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        inputs = self._normalized(images)
        if self._config.precision == "float32":
            return self._model(inputs)  # type: ignore[no-any-return]
        with torch.autocast(self._device.type, torch.bfloat16):
            scores: Tensor = self._model(inputs)
        return scores.float()

    def _normalized(self, images: Tensor) -> Float32[Tensor, "batch channels height width"]:
        return (images.to(self._device).float() - self._mean) / self._std

    def _load(self, weights: Tensor, buffers: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, view in self.blocks.views(weights).items():
                self._parameters[name].copy_(self._cropped(name, view))
            for name, buffer in self._named_buffers():
                buffer.copy_(buffers[name])

    def _write_update(self, weights: Tensor, update: Tensor) -> None:
        """θ − θ_k; zero for the taps that were cut, which stay as they are."""
        updates = self.blocks.views(update)
        with torch.no_grad():
            for name, view in self.blocks.views(weights).items():
                if name in self._crops:
                    updates[name].zero_()
                trained = self._parameters[name]
                torch.sub(self._cropped(name, view), trained, out=self._cropped(name, updates[name]))

    def _cropped(self, name: str, weight: Tensor) -> Tensor:
        crop = self._crops.get(name)
        return weight if crop is None else weight[:, :, *crop]

    def _named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((canonical_name(name), buffer) for name, buffer in self._model.named_buffers())


def initial_model(config: RunConfig, data: ImageData, factory: ModelFactory | None = None) -> nn.Module:
    """The model with the weights that the run's seed gives it.

    Raises:
        FedmaskError: if the configuration names an unknown model and no factory is given.
    """
    classes, channels = len(data.classes), data.train_images.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(words(config.seed, Purpose.INITIAL_WEIGHTS, 1)[0]))
        if factory is not None:
            return factory()
        if config.model == "resnet18":
            return resnet18(classes=classes, channels=channels, stem=config.stem, groups=config.groups)
        if config.model == "cnn":
            return SmallCNN(classes=classes, channels=channels, groups=config.groups)
    raise FedmaskError(
        f"model {config.model!r} is unknown; use resnet18 or cnn, or pass a model of your own from Python"
    )


def batches(
    samples: int, config: RunConfig, round_: int, client: int, *, repeat: int = 0
) -> Iterator[Int64[np.ndarray, " batch"]]:
    """The batches of a client's local training, as places in its shard.

    Every epoch goes through the shard once in an order of its own; its last batch may be smaller. With
    ``local_steps``, epochs follow until the steps are done.
    """
    size: BatchSize = samples if config.batch_size == "full" else config.batch_size
    assert size != "full"
    steps, epoch = 0, 0
    while epoch < config.local_epochs if config.local_steps is None else steps < config.local_steps:
        if config.batch_size == "full":
            order = np.arange(samples)
        else:
            draw = (repeat << 32) + epoch
            order = permutation(config.seed, Purpose.BATCHES, samples, round_=round_, client=client, draw=draw)
        for start in range(0, samples, size):
            if config.local_steps is not None and steps == config.local_steps:
                return
            yield order[start : start + size]
            steps += 1
        epoch += 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: gradients differ in their last bits between thread counts."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _resident(images: np.ndarray, labels: Int64[np.ndarray, " samples"], device: torch.device) -> tuple[Tensor, Tensor]:
    """Images and labels as tensors where they are read from: mapped memory on the CPU, else the device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        # Through one dimension, so that an axis of size one has its regular stride: PyTorch chooses kernels by
        # strides, and a process that got the same images by another way would differ in the last bits.
        flat = torch.from_numpy(np.ascontiguousarray(images)).reshape(-1)
        return flat.view(images.shape).to(device), torch.from_numpy(np.ascontiguousarray(labels)).to(device)
