"""Who wins, and for whom: personalized and plain algorithms on one non-IID federation, same cohorts and batches.

`python examples/compare.py`, without a download: the digits are embedded. `personax compare` does the same from a file,
and more: progress, resuming, a report.
"""

import time

import jax

import personax as px

NUM_CLIENTS, NUM_SEEDS = 30, 3


def federation() -> px.Federation:
    """The embedded 8x8 digits, 3 of 10 classes for each client, 80 % of its samples to train on and 20 % to test."""
    pool, key = px.datasets.digits(), jax.random.key(0)
    train, test = px.partition.classes_per_client(pool.y, NUM_CLIENTS, 3, key=key).split(0.2, key=key)
    return px.Federation.from_partition(pool.x, pool.y, train, test, origin=f"{pool.name}.")


def contestants() -> dict[str, tuple[px.Algorithm, px.Protocol]]:
    """Each algorithm with the model that is scored."""
    local = {"num_steps": 5, "batch_size": 10}
    tuned = px.Protocol("adapted", num_steps=5, lr=0.1, batch_size=10)
    shared, kept = px.Protocol("global"), px.Protocol("personal")
    meta, envelope = px.Meta(0.1, hvp=px.relative_difference(1e-2)), px.Moreau(1.0, 0.1, 20)
    return {
        "Local only": (px.local_only(0.1, **local), kept),
        "FedAvg": (px.fedavg(0.1, **local), shared),
        "FedAvg + 5 steps": (px.fedavg(0.1, **local), tuned),
        "SCAFFOLD + 5 steps": (px.scaffold(0.1, **local), tuned),
        "Per-FedAvg (HF) + 5 steps": (px.per_fedavg(0.1, 0.1, **local), tuned),
        "APFL, adaptive": (px.apfl(0.1, 0.5, **local), kept),
        "pFedMe": (px.pfedme(1.0, 0.3, 0.1, 20, **local), kept),
        "PersA-FL-MAML + 5 steps": (px.persafl(meta, 0.1, px.asynchronous(0.2), **local), tuned),
        "PersA-FL-ME": (px.persafl(envelope, 0.3, px.asynchronous(0.2), **local), kept),
    }


def main() -> None:
    fed, keys = federation(), jax.random.split(jax.random.key(0), NUM_SEEDS)
    print(fed, end="\n\n")
    task = px.classification(px.mlp((32,), 10))
    delays = [px.persafl_delays(NUM_CLIENTS, key=key) for key in keys]
    in_rounds = [px.rounds(NUM_CLIENTS, 60, 10, key=k, delays=d) for k, d in zip(keys, delays, strict=True)]
    one_by_one = [px.arrivals(NUM_CLIENTS, 600, delays=d, key=k) for k, d in zip(keys, delays, strict=True)]
    print(f"600 updates, in 60 rounds of 10 or one by one as they arrive, under the same delays; {NUM_SEEDS} seeds\n")
    found = {}
    for name, (algorithm, protocol) in contestants().items():
        begin = time.perf_counter()
        asynchronous = algorithm.server.buffer_size is not None
        result = px.simulate(algorithm, task, fed, one_by_one if asynchronous else in_rounds, key=keys)
        found[name] = px.evaluate(algorithm, task, fed, result, protocol, key=jax.random.key(1))
        print(f"{name:28}{time.perf_counter() - begin:5.1f} s")
    print()
    print(px.Comparison(found, local="Local only", together="FedAvg").table())


if __name__ == "__main__":
    main()
