"""Shared and personal batch statistics where each client's features have their own gain and offset (docs/models.md).

The embedded 8x8 digits, divided evenly over 20 clients. Client i sees g_i x + o_i, with a gain log-uniform in [1/5, 5]
and an offset uniform in [-2, 2]. Step sizes are chosen on validation data, a fifth of each client's training samples.
"""

from collections.abc import Callable

import jax
import numpy as np

import personax as px

NUM_CLIENTS, NUM_SEEDS, NUM_ROUNDS = 20, 5, 100
LRS = (0.03, 0.1, 0.3)
LOCAL = {"num_epochs": 1, "batch_size": 16, "sampling": "shuffled"}
PLAIN = px.classification(px.mlp((64,), 10, "relu"))
NORMALIZED = px.classification(px.mlp((64,), 10, "relu", norm="batch"))
STATISTICS = ("*.mean", "*.var")


def with_sharing(algorithm: px.Algorithm, personal: tuple[str, ...]) -> px.Algorithm:
    """The same algorithm with a personal part."""
    return px.Algorithm(algorithm.objective, algorithm.local, algorithm.server, px.Sharing(personal))


CONTESTANTS = {  # task, algorithm of a step size, model
    "FedAvg, no normalization": (PLAIN, lambda lr: px.fedavg(lr=lr, **LOCAL), "global"),
    "FedAvg, shared statistics": (NORMALIZED, lambda lr: px.fedavg(lr=lr, **LOCAL), "global"),
    "FedAvg, personal statistics": (
        NORMALIZED,
        lambda lr: with_sharing(px.fedavg(lr=lr, **LOCAL), STATISTICS),
        "personal",
    ),
    "FedBN": (NORMALIZED, lambda lr: px.fedbn(lr=lr, **LOCAL), "personal"),
    "Local only": (NORMALIZED, lambda lr: px.local_only(lr=lr, **LOCAL), "personal"),
}


def federations() -> tuple[px.Federation, px.Federation]:
    """Training data with validation data, and the same training data with test data."""
    pool, key = px.datasets.digits(), jax.random.key(0)
    train, test = px.partition.iid(pool.y, NUM_CLIENTS, key=key).split(0.2, key=key)
    train, validation = train.split(0.2, key=jax.random.key(1))
    rng = np.random.default_rng(0)
    gains, offsets = np.exp(rng.uniform(-np.log(5), np.log(5), NUM_CLIENTS)), rng.uniform(-2, 2, NUM_CLIENTS)
    x = np.asarray(pool.x, np.float32) / (255 if pool.x.dtype == np.uint8 else 1)

    def clients(part: px.Partition) -> list[tuple[np.ndarray, np.ndarray]]:
        rows = [part.rows[part.offsets[i] : part.offsets[i + 1]] for i in range(NUM_CLIENTS)]
        seen = lambda i: np.float32(gains[i]) * x[rows[i]] + np.float32(offsets[i])
        return [(seen(i), pool.y[rows[i]]) for i in range(NUM_CLIENTS)]

    make = lambda other: px.Federation.from_clients(clients(train), clients(other), origin=f"{pool.name}.")
    return make(validation), make(test)


def trained(make: Callable[[float], px.Algorithm], task: px.Task, model: str) -> tuple[float, np.ndarray]:
    """The step size that is best on validation data, and the accuracy on test data of each client of each seed."""
    validation, test = federations()
    keys, scoring = jax.random.split(jax.random.key(0), NUM_SEEDS), px.Scoring(model)
    schedules = [px.rounds(NUM_CLIENTS, NUM_ROUNDS, NUM_CLIENTS // 2, key=key) for key in keys]
    tried = []
    for lr in LRS:
        algorithm = make(lr)
        result = px.simulate(algorithm, task, validation, schedules, key=keys)
        scores = [
            px.evaluate(algorithm, task, fed, result, scoring, key=jax.random.key(1)).metrics["accuracy"]
            for fed in (validation, test)
        ]
        tried.append((float(np.mean(scores[0])), lr, np.asarray(scores[1])))
    _, lr, accuracy = max(tried, key=lambda one: one[0])
    return lr, accuracy


def main() -> None:
    print(federations()[1])
    for name, (task, make, model) in CONTESTANTS.items():
        lr, accuracy = trained(make, task, model)
        of_seeds, worst = accuracy.mean(axis=1), np.sort(accuracy, axis=1)[:, : NUM_CLIENTS // 10].mean()
        spread = f"{of_seeds.mean():.1%} +- {of_seeds.std(ddof=1):.1%}"
        print(f"{name:28} lr {lr:<5} accuracy {spread}, worst tenth of the clients {worst:.1%}")


if __name__ == "__main__":
    main()
