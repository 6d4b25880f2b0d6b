"""Federated averaging on real images: data, partition, models, local training, the round loop.

A model and data of your own go in from Python::

    from fedmask.federated import ImageData, RunConfig, simulate
    data = ImageData.from_arrays("mine", train_images, train_labels, test_images, test_labels)
    result = simulate(RunConfig(clients=20, cohort=5, rounds=10, model="mine"), data=data, model=MyNetwork)
    print(result.summary["recovery_factor"])
"""

from fedmask.federated.config import RunConfig
from fedmask.federated.data import ImageData, load_data
from fedmask.federated.models import SmallCNN, resnet18
from fedmask.federated.partition import Partition, dirichlet_partition
from fedmask.federated.rounds import Progress, RoundRecord, RunResult, draw_cohort, simulate, summarize

__all__ = [
    "ImageData",
    "Partition",
    "Progress",
    "RoundRecord",
    "RunConfig",
    "RunResult",
    "SmallCNN",
    "dirichlet_partition",
    "draw_cohort",
    "load_data",
    "resnet18",
    "simulate",
    "summarize",
]
