"""FedAvg in Apple's pfl, configured as in its published benchmark: a peer of `personax bench` (see peer.py)."""

from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import torch
from peer import Ready, Setting, random_clients, read_work, serve
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch_loop import fastest_threads
from torch_parts import Network, Params, as_images, distance, from_ours, init_params, use_tf32


def make_run(setting: Setting, params: Params, images: np.ndarray, labels: np.ndarray) -> tuple[Callable, Network]:
    """Return a function that runs rounds, and the network that they train. The data are tensors from the start."""
    device = params[0].device.type
    clients = as_images(setting, images, device), torch.from_numpy(labels).long().to(device)
    sampler = get_user_sampler("minimize_reuse", list(range(len(images))))
    data = FederatedDataset(lambda i: Dataset([part[i] for part in clients], user_id=str(i)), sampler)
    network = Network(setting, params).to(device)
    optimizer = torch.optim.SGD(network.parameters(), 1.0)
    model = PyTorchModel(model=network, local_optimizer_create=torch.optim.SGD, central_optimizer=optimizer)
    backend = SimulatedBackend(training_data=data, val_data=None, postprocessors=[WeightByUser()])
    visit = NNTrainHyperParams(
        local_batch_size=setting.batch_size,
        local_num_epochs=None,
        local_num_steps=setting.num_steps,
        local_learning_rate=setting.lr,
    )
    algorithm, done = FederatedAveraging(), [0]

    def run(num_rounds: int) -> None:
        done[0] += num_rounds
        length = NNAlgorithmParams(
            central_num_iterations=done[0],
            evaluation_frequency=10**9,  # the first round alone, which is not timed
            train_cohort_size=setting.cohort_size,
            val_cohort_size=None,
        )
        algorithm.run(length, backend, model, visit, None, send_metrics_to_platform=False)
        if device == "cuda":
            torch.cuda.synchronize()

    return run, network


def prepare(setting: Setting, device: str, check: str) -> Ready:
    use_tf32(False)
    work = read_work(check)
    run, network = make_run(work.setting, from_ours(work.setting, work.start, device), work.x[:, 0, 0], work.y[:, 0, 0])
    run(1)
    error = distance(work.setting, list(network.weights), work)
    use_tf32(device == "cuda")
    run, _ = make_run(setting, init_params(setting, device), *random_clients(setting))
    threads = fastest_threads(run) if device == "cpu" else 1
    torch.set_num_threads(threads)
    told = f"pfl {version('pfl')}, torch {torch.__version__}"
    return run, {"version": told, "error": error, "note": f"{threads} threads"}


if __name__ == "__main__":
    serve(prepare)
