"""Who wins, and for whom: personalized and plain algorithms on one non-IID federation, same cohorts and batches.

Run it with `make demo`, or `python examples/compare.py`. No download: the data is made here.
"""

import time

import jax
import numpy as np

import personax as px

NUM_CLIENTS, NUM_CLASSES, DIMENSION, NUM_SEEDS = 30, 10, 20, 3


def federation(seed: int = 0) -> px.Federation:
    """Clients that hold 5 of 10 classes each and see them through a rotation of their own."""
    rng = np.random.default_rng(seed)
    centers = 0.7 * rng.normal(size=(NUM_CLASSES, DIMENSION))

    def client(num: int, classes: np.ndarray, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        y = rng.choice(classes, num)
        x = (centers[y] + rng.normal(size=(num, DIMENSION))) @ turn
        return x.astype(np.float32), y

    train, test = [], []
    for _ in range(NUM_CLIENTS):
        classes = rng.choice(NUM_CLASSES, 5, replace=False)
        turn = np.linalg.qr(np.eye(DIMENSION) + 0.15 * rng.normal(size=(DIMENSION, DIMENSION)))[0]
        train.append(client(int(rng.integers(10, 40)), classes, turn))
        test.append(client(100, classes, turn))
    return px.Federation.from_clients(train, test=test)


def contestants() -> dict[str, tuple[px.Algorithm, px.Protocol]]:
    """Each algorithm with the model that is scored."""
    local = {"num_steps": 5, "batch_size": 10}
    tuned = px.Protocol("adapted", num_steps=5, lr=0.1, batch_size=10)
    shared, kept = px.Protocol("global"), px.Protocol("personal")
    meta, envelope = px.Meta(0.05, hvp=px.relative_difference(1e-2)), px.Moreau(2.0, 0.05, 20)
    return {
        "Local only": (px.local_only(0.05, **local), kept),
        "FedAvg": (px.fedavg(0.05, **local), shared),
        "FedAvg + 5 steps": (px.fedavg(0.05, **local), tuned),
        "SCAFFOLD + 5 steps": (px.scaffold(0.05, **local), tuned),
        "Per-FedAvg (HF) + 5 steps": (px.per_fedavg(0.05, 0.05, **local), tuned),
        "APFL, adaptive": (px.apfl(0.05, 0.5, **local), kept),
        "pFedMe": (px.pfedme(2.0, 0.3, 0.05, 20, **local), kept),
        "PersA-FL-MAML + 5 steps": (px.persafl(meta, 0.05, px.asynchronous(0.2), **local), tuned),
        "PersA-FL-ME": (px.persafl(envelope, 0.3, px.asynchronous(0.2), **local), kept),
    }


def main() -> None:
    fed, keys = federation(), jax.random.split(jax.random.key(0), NUM_SEEDS)
    task = px.classification(px.mlp((32,), NUM_CLASSES))
    delays = [px.persafl_delays(NUM_CLIENTS, key=key) for key in keys]
    in_rounds = [px.rounds(NUM_CLIENTS, 60, 10, key=k, delays=d) for k, d in zip(keys, delays, strict=True)]
    one_by_one = [px.arrivals(NUM_CLIENTS, 600, delays=d, key=k) for k, d in zip(keys, delays, strict=True)]
    print(
        f"{NUM_CLIENTS} clients, {fed.counts.min()} to {fed.counts.max()} samples of 5 classes each, {NUM_SEEDS} seeds"
    )
    print("600 updates, in 60 rounds of 10 or one by one as they arrive, under the same delays\n")
    print(f"{'algorithm':28}{'accuracy':>10}{'worst 10 %':>12}{'beat alone':>12}{'virtual time':>14}{'seconds':>9}")
    alone = None
    for name, (algorithm, protocol) in contestants().items():
        begin = time.perf_counter()
        asynchronous = algorithm.server.buffer_size is not None
        result = px.simulate(algorithm, task, fed, one_by_one if asynchronous else in_rounds, key=keys)
        accuracy = px.evaluate(algorithm, task, fed, result, protocol, key=jax.random.key(1)).metrics["accuracy"]
        alone = accuracy if alone is None else alone
        worst = np.sort(accuracy, axis=1)[:, : NUM_CLIENTS // 10].mean()
        better = "" if accuracy is alone else f"{(accuracy > alone).mean():.0%}"
        took, virtual = time.perf_counter() - begin, np.mean(result.snapshot.time)
        print(f"{name:28}{accuracy.mean():>10.1%}{worst:>12.1%}{better:>12}{virtual:>14.0f}{took:>9.1f}")


if __name__ == "__main__":
    main()
