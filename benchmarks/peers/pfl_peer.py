"""pfl's simulated backend: one process, as many threads as cores (it has no worker processes on one machine's CPU)."""

import copy
import statistics
import time

import torch
import work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel


class Network(torch.nn.Module):
    """The network with the loss that pfl asks for."""

    def __init__(self):
        super().__init__()
        self.network = work.network()

    def loss(self, inputs, labels, eval=False):
        """Mean loss of a batch."""
        self.train(not eval)
        return torch.nn.functional.cross_entropy(self.network(inputs), labels)

    def metrics(self, inputs, labels, eval=True):
        """None."""
        return {}


class Timed(TrainingProcessCallback):
    """Tells of rounds."""

    def on_train_begin(self, *, model):
        """As the base's."""
        work.tell(event="ready")
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """As the base's."""
        work.tell(event="round")
        return False, Metrics()


def main() -> None:
    """All rounds, then the aggregation alone."""
    shards = [work.shard(client) for client in range(work.CLIENTS)]
    turn = iter(range(10**9))
    data = FederatedDataset(lambda client: PyTorchTensorDataset(shards[client]), lambda: next(turn) % work.CLIENTS)
    network = Network()
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    parameters = NNAlgorithmParams(
        central_num_iterations=work.WARM_UP + work.ROUNDS,
        evaluation_frequency=10**6,
        train_cohort_size=work.CLIENTS,
        val_cohort_size=0,
    )
    train = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.LEARNING_RATE, local_batch_size=work.BATCH)
    backend = SimulatedBackend(training_data=data, val_data=data)
    FederatedAveraging().run(
        parameters, backend, model, train, NNEvalHyperParams(local_batch_size=work.BATCH), callbacks=[Timed()]
    )
    state = model.get_parameters()
    updates = [copy.deepcopy(state) for _ in range(work.CLIENTS)]
    times = []
    for _ in range(6):
        users = [copy.deepcopy(update) for update in updates]
        start = time.perf_counter()
        total = None
        for user in users:
            total = backend._aggregator.accumulate(accumulated=total, user_stats=user)
        total.average()
        times.append(time.perf_counter() - start)
    work.tell(event="aggregation", what="mean", seconds=statistics.median(times[1:]))


if __name__ == "__main__":
    main()
