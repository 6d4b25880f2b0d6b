"""Who trains the cohort: this process, or several, each with one thread; the result is the same bytes."""

import dataclasses
import io
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
import torch.multiprocessing
from jaxtyping import Float
from torch import Tensor

from fedmask.errors import FedmaskError
from fedmask.federated.config import RunConfig
from fedmask.federated.data import ImageData
from fedmask.federated.partition import Partition
from fedmask.federated.training import ClientReport, ModelFactory, Trainer, one_thread

__all__ = ["InProcess", "Processes", "Workers", "default_workers", "end_with_parent"]


@runtime_checkable
class Workers(Protocol):
    """Trains clients and evaluates, over one buffer of updates."""

    updates: Float[Tensor, "clients parameters"]

    def train(
        self, round_: int, clients: Sequence[int], weights: Tensor, buffers: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, ClientReport]]:
        """Train all clients; yield (row, report) as each is done and its update stands in that row."""

    def evaluate(self, weights: Tensor, buffers: Mapping[str, Tensor]) -> tuple[float, float]:
        """(mean loss, accuracy) over the whole test set."""


class InProcess:
    """Everything in the calling process, on the CPU or a CUDA device."""

    def __init__(self, trainer: Trainer, config: RunConfig) -> None:
        """A buffer for the cohort on the trainer's device."""
        self._trainer, self._config = trainer, config
        weights = trainer.weights
        self.updates = torch.empty(config.cohort, len(weights), dtype=weights.dtype, device=weights.device)

    def train(
        self, round_: int, clients: Sequence[int], weights: Tensor, buffers: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, ClientReport]]:
        """See :class:`Workers`."""
        for row, client in enumerate(clients):
            with one_thread():
                report = self._trainer.train(round_, client, weights, buffers, self.updates[row])
            yield row, report

    def evaluate(self, weights: Tensor, buffers: Mapping[str, Tensor]) -> tuple[float, float]:
        """See :class:`Workers`."""
        parts = range(_parts(self._trainer.test_samples, self._config))
        with one_thread():
            sums = [self._trainer.evaluate(weights, buffers, part) for part in parts]
        return _means(sums, self._trainer.test_samples)


@dataclass(frozen=True)
class _Setup:
    """What a worker starts from. Tensors here are shared memory, the data set's included."""

    config: RunConfig
    data: dict[str, Any]
    arrays: dict[str, Tensor]
    partition: Partition
    factory: ModelFactory | None
    weights: Tensor
    updates: Tensor


class Processes:
    """Worker processes on the CPU that share the global weights and the buffer of updates with this one."""

    def __init__(
        self,
        workers: int,
        trainer: Trainer,
        config: RunConfig,
        data: ImageData,
        partition: Partition,
        factory: ModelFactory | None,
    ) -> None:
        """Start the processes; a factory of your own must be picklable."""
        fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
        arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
        plain = {name: value for name, value in fields.items() if name not in arrays}
        update_bytes = (config.cohort + 1) * trainer.weights.nbytes
        _check_shared_memory(update_bytes + sum(array.nbytes for array in arrays.values()))
        weights = _shared(trainer.weights)
        self.updates = _shared(torch.empty(config.cohort, len(weights), dtype=weights.dtype))
        shared = {name: _shared(torch.from_numpy(np.array(array))) for name, array in arrays.items()}
        self._weights, self._config, self._test_samples = weights, config, trainer.test_samples
        self._pool = ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(_Setup(config, plain, shared, partition, factory, weights, self.updates),),
        )

    def __enter__(self) -> "Processes":
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the processes; after an error, without waiting for clients not yet begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def train(
        self, round_: int, clients: Sequence[int], weights: Tensor, buffers: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, ClientReport]]:
        """See :class:`Workers`."""
        self._weights.copy_(weights)
        packed = _pack(buffers)
        with _dying_workers():
            rows = {self._pool.submit(_train, round_, client, packed, row): row for row, client in enumerate(clients)}
        pending: set[Future[tuple[ClientReport, bytes]]] = set(rows)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                report, returned = _result(future)
                yield rows[future], dataclasses.replace(report, buffers=_unpack(returned))

    def evaluate(self, weights: Tensor, buffers: Mapping[str, Tensor]) -> tuple[float, float]:
        """See :class:`Workers`."""
        self._weights.copy_(weights)
        parts = range(_parts(self._test_samples, self._config))
        packed = _pack(buffers)
        with _dying_workers():
            futures = [self._pool.submit(_evaluate, packed, part) for part in parts]
        return _means([_result(future) for future in futures], self._test_samples)


def default_workers(config: RunConfig) -> int:
    """One process a core, but no more than clients in a round; one for a CUDA device."""
    if config.device != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, config.cohort))


T = TypeVar("T")

_worker: tuple[Trainer, _Setup] | None = None


def _start(setup: _Setup) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    end_with_parent()
    torch.set_num_threads(1)
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in setup.arrays.items()}
    data = ImageData(**setup.data, **arrays)
    _worker = Trainer(setup.config, data, setup.partition, setup.factory), setup


def end_with_parent() -> None:
    """In a worker process: end when its parent does, however that ended."""

    # A killed parent closes no pipe that its children do not hold open too, so they would wait for ever.
    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _train(round_: int, client: int, buffers: bytes, row: int) -> tuple[ClientReport, bytes]:
    assert _worker is not None
    trainer, setup = _worker
    report = trainer.train(round_, client, setup.weights, _unpack(buffers), setup.updates[row])
    return dataclasses.replace(report, buffers={}), _pack(report.buffers)


def _evaluate(buffers: bytes, part: int) -> tuple[float, int]:
    assert _worker is not None
    trainer, setup = _worker
    return trainer.evaluate(setup.weights, _unpack(buffers), part)


def _pack(buffers: Mapping[str, Tensor]) -> bytes:
    # As bytes: a tensor sent as it is would hold a file descriptor for each buffer of each client.
    stream = io.BytesIO()
    torch.save(dict(buffers), stream)
    return stream.getvalue()


def _unpack(packed: bytes) -> dict[str, Tensor]:
    buffers: dict[str, Tensor] = torch.load(io.BytesIO(packed), weights_only=True)
    return buffers


def _shared(tensor: Tensor) -> Tensor:
    return tensor.clone().share_memory_()  # type: ignore[no-any-return, no-untyped-call]


def _check_shared_memory(needed: int) -> None:
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < needed:
        raise FedmaskError(
            f"worker processes need {needed / 1e6:.0f} MB of shared memory and /dev/shm has "
            f"{shutil.disk_usage(shared).free / 1e6:.0f} MB free; use 1 worker, or enlarge it"
        )


def _result(future: "Future[T]") -> T:
    with _dying_workers():
        return future.result()


@contextmanager
def _dying_workers() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise FedmaskError(
            "a worker process died, perhaps for want of memory; "
            "run the same command again to go on, with fewer workers if memory is short"
        ) from None


def _parts(samples: int, config: RunConfig) -> int:
    return -(-samples // config.evaluation_batch)


def _means(sums: Sequence[tuple[float, int]], samples: int) -> tuple[float, float]:
    """In the order of parts, so that the sum does not depend on who computed them."""
    return sum(loss for loss, _ in sums) / samples, sum(correct for _, correct in sums) / samples
