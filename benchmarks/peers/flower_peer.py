"""Flower's simulation: FedAvg over Ray, one core a client."""

import os
import statistics
import time

import torch
import work
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message, context):
    """One client's round."""
    torch.set_num_threads(work.THREADS)
    model = work.network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train(model, int(context.node_config["partition-id"]))
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": work.IMAGES}),
    }
    return Message(content=RecordDict(content), reply_to=message)


class Timed(FedAvg):
    """FedAvg that tells of rounds and of its own aggregation."""

    def configure_train(self, server_round, arrays, config, grid):
        """As FedAvg's."""
        if server_round == 1:
            work.tell(event="ready")
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        """As FedAvg's, timed."""
        replies = list(replies)
        start = time.perf_counter()
        outcome = super().aggregate_train(server_round, replies)
        TIMES.append(time.perf_counter() - start)
        work.tell(event="round", clients=len(replies))
        return outcome


TIMES: list[float] = []


@server_app.main()
def serve(grid, context):
    """All rounds."""
    everyone = {"min_train_nodes": work.CLIENTS, "min_available_nodes": work.CLIENTS}
    strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, **everyone)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(work.network().state_dict()),
        num_rounds=work.WARM_UP + work.ROUNDS,
        train_config=ConfigRecord({}),
    )
    work.tell(event="aggregation", what="mean", seconds=statistics.median(TIMES[work.WARM_UP :]))


if __name__ == "__main__":
    cores = os.cpu_count() or 1
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=work.CLIENTS,
        backend_config={
            "init_args": {"num_cpus": cores, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
