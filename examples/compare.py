"""Compare personalized and plain algorithms on one non-IID federation, with the same cohorts and batches.

Run `python examples/compare.py`. It downloads nothing: the digits are embedded. `personax compare` does the same from a
file, with progress bars, resuming and a report.
"""

import time

import jax

import personax as px

NUM_CLIENTS, NUM_SEEDS = 30, 3


def federation() -> px.Federation:
    """The embedded 8x8 digits: 3 of 10 classes for each client, 80 % of its samples for training, 20 % for testing."""
    pool, key = px.datasets.digits(), jax.random.key(0)
    train, test = px.partition.classes_per_client(pool.y, NUM_CLIENTS, 3, key=key).split(0.2, key=key)
    return px.Federation.from_partition(pool.x, pool.y, train, test, origin=f"{pool.name}.")


def contestants() -> dict[str, tuple[px.Algorithm, px.Scoring]]:
    """Each algorithm with the model that is scored."""
    local = {"num_steps": 5, "batch_size": 10}
    tuned = px.Scoring("adapted", num_steps=5, lr=0.1, batch_size=10)
    shared, kept = px.Scoring("global"), px.Scoring("personal")
    meta, envelope = px.Meta(0.1, hvp=px.curvature.relative_difference(1e-2)), px.Moreau(1.0, 0.1, 20)
    return {
        "Local only": (px.local_only(lr=0.1, **local), kept),
        "FedAvg": (px.fedavg(lr=0.1, **local), shared),
        "FedAvg + 5 steps": (px.fedavg(lr=0.1, **local), tuned),
        "SCAFFOLD + 5 steps": (px.scaffold(lr=0.1, **local), tuned),
        "Per-FedAvg (HF) + 5 steps": (px.per_fedavg(adapt_lr=0.1, lr=0.1, **local), tuned),
        "APFL, adaptive": (px.apfl(lr=0.1, mix=0.5, **local), kept),
        "pFedMe": (px.pfedme(strength=1.0, lr=0.3, prox_lr=0.1, num_prox_steps=20, **local), kept),
        "PersA-FL-MAML + 5 steps": (px.persafl(meta, lr=0.1, server=px.asynchronous(0.2), **local), tuned),
        "PersA-FL-ME": (px.persafl(envelope, lr=0.3, server=px.asynchronous(0.2), **local), kept),
    }


def main() -> None:
    fed, keys = federation(), jax.random.split(jax.random.key(0), NUM_SEEDS)
    print(fed, end="\n\n")
    task = px.classification(px.mlp((32,), 10))
    delays = [px.delays.persafl_delays(NUM_CLIENTS, key=key) for key in keys]
    in_rounds = [px.rounds(NUM_CLIENTS, 60, 10, key=k, delays=d) for k, d in zip(keys, delays, strict=True)]
    arriving = [px.arrivals(NUM_CLIENTS, 600, delays=d, key=k) for k, d in zip(keys, delays, strict=True)]
    print(f"600 updates, in 60 rounds of 10 or as they arrive, under the same delays; {NUM_SEEDS} seeds\n")
    found = {}
    for name, (algorithm, scoring) in contestants().items():
        begin = time.perf_counter()
        schedules = in_rounds if algorithm.server.is_synchronous else arriving
        result = px.simulate(algorithm, task, fed, schedules, key=keys)
        found[name] = px.evaluate(algorithm, task, fed, result, scoring, key=jax.random.key(1))
        print(f"{name:28}{time.perf_counter() - begin:5.1f} s")
    print()
    print(px.Comparison(found, local="Local only", shared="FedAvg").table())


if __name__ == "__main__":
    main()
