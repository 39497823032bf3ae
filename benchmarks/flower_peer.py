"""FedAvg in Flower's simulation: a peer of `personax bench` (see peer.py).

One simulation serves all requests: its server reads them. Each of the machine's cores, or its GPU, runs clients.
"""

import importlib
import json
import logging
import os
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peer import Setting, Work, random_clients, read_work, serve, setting_of
from torch_parts import Network, as_images, distance, from_ours, init_params

ASKED = json.loads(os.environ.get("FLOWER_PEER", "{}"))
client_app, server_app = ClientApp(), ServerApp()


@cache
def clients(checked: bool) -> tuple[Setting, torch.Tensor, torch.Tensor]:
    """The data of all clients, created once per process."""
    if checked:
        work: Work = read_work(ASKED["check"])
        setting, images, labels = work.setting, work.x[:, 0, 0], work.y[:, 0, 0]
    else:
        setting = setting_of(ASKED["setting"])
        images, labels = random_clients(setting)
    return setting, as_images(setting, images, ASKED["device"]), torch.from_numpy(labels).long().to(ASKED["device"])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """A visit. In the check, every client is asked, and only existing ones count."""
    torch.set_num_threads(1)
    checked = bool(message.content["config"]["check"])
    setting, images, labels = clients(checked)
    who = int(context.node_config["partition-id"])
    counted, who = who < len(images), who % len(images)
    arrays = message.content["arrays"].to_torch_state_dict()
    network = Network(setting, list(arrays.values())).to(images.device)
    optimizer = torch.optim.SGD(network.parameters(), setting.lr)
    order = torch.randperm(setting.num_samples)[: setting.num_steps * setting.batch_size].split(setting.batch_size)
    for rows in order:
        optimizer.zero_grad()
        network.loss(images[who][rows], labels[who][rows]).backward()
        optimizer.step()
    weight = MetricRecord({"num-examples": setting.num_samples if counted else 0})
    return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": weight}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Check the work, then run on request until the input ends."""
    setting, work = setting_of(ASKED["setting"]), read_work(ASKED["check"])
    num = setting.num_clients

    def rounds(network: Network, num_rounds: int, cohort_size: int, checked: bool) -> dict[str, torch.Tensor]:
        asked = {"fraction_train": cohort_size / num, "fraction_evaluate": 0.0}
        strategy = FedAvg(**asked, min_train_nodes=cohort_size, min_evaluate_nodes=0, min_available_nodes=num)
        start, told = ArrayRecord(network.state_dict()), ConfigRecord({"check": checked})
        return strategy.start(grid, start, num_rounds, train_config=told).arrays.to_torch_state_dict()

    before = Network(work.setting, from_ours(work.setting, work.start, "cpu"))
    after = rounds(before, 1, num, True)
    error = distance(work.setting, list(after.values()), work)
    network = Network(setting, init_params(setting, "cpu"))

    def run(num_rounds: int) -> None:
        rounds(network, num_rounds, setting.cohort_size, False)

    run(2)
    told = f"flwr {version('flwr')}, torch {torch.__version__}"
    serve(lambda *_: (run, {"version": told, "error": error, "note": "one thread a client"}))


def start() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    gpu = 0.0 if ASKED["device"] == "cpu" else 0.25
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": gpu}}
    run_simulation(server_app, client_app, ASKED["setting"]["num_clients"], backend_config=resources)


if __name__ == "__main__":
    os.environ["FLOWER_PEER"] = sys.argv[1]  # Ray's processes import this file as a module, and find the setting there
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    importlib.import_module("flower_peer").start()
