"""Every recipe once, as a function of a factor on its step sizes, for tables of tests."""

import personax
from personax import Meta, Moreau, asynchronous

STEPS = {"num_steps": 3, "batch_size": 4}

SYNCHRONOUS = {
    "fedavg": lambda s: personax.fedavg(0.05 * s, **STEPS),
    "fedavg_epochs": lambda s: personax.fedavg(0.05 * s, num_epochs=2, batch_size=4, sampling="shuffled"),
    "fedavg_adam": lambda s: personax.fedavg(
        0.01 * s,
        optimizer=personax.optimizer("adam"),
        server=personax.synchronous(0.5 * s, weighting="samples"),
        **STEPS,
    ),
    "fedprox": lambda s: personax.fedprox(0.5 * s, 0.05 * s, **STEPS),
    "scaffold_1": lambda s: personax.scaffold(0.05 * s, 1, **STEPS),
    "scaffold_2": lambda s: personax.scaffold(personax.Decay(0.05 * s, 0.01), 2, **STEPS),
    "aruba": lambda s: personax.aruba(personax.Aruba(0.05 * s), **STEPS),
    "local_only": lambda s: personax.local_only(0.05 * s, clip_norm=5.0 * s, **STEPS),
    "per_fedavg_exact": lambda s: personax.per_fedavg(0.05 * s, 0.05 * s, personax.exact, **STEPS),
    "per_fedavg_fo": lambda s: personax.per_fedavg(0.05 * s, 0.05 * s, personax.first_order, **STEPS),
    "per_fedavg_hf": lambda s: personax.per_fedavg(0.05 * s, 0.05 * s, query_share=0.3 * s, **STEPS),
    "gmeta": lambda s: personax.per_fedavg(0.05 * s, 0.05 * s, num_adapt_steps=3, **STEPS),
    "pfedme": lambda s: personax.pfedme(2.0 * s, 0.05 * s, 0.05 * s, server=personax.synchronous(0.7 * s), **STEPS),
    "apfl": lambda s: personax.apfl(personax.Decay(0.05 * s, 0.01), 0.3 * s, radius=9.0 * s, **STEPS),
}
ASYNCHRONOUS = {
    "fedasync": lambda s: personax.fedasync(0.05 * s, **STEPS),
    "fedasync_mixing": lambda s: personax.fedasync_mixing(0.05 * s, 0.6 * s, 0.1 * s, **STEPS),
    "fedbuff": lambda s: personax.fedbuff(0.05 * s, 3, 0.8 * s, **STEPS),
    "persafl_maml": lambda s: personax.persafl(Meta(0.05 * s), 0.05 * s, **STEPS),
    "persafl_me": lambda s: personax.persafl(Moreau(2.0 * s, 0.05 * s, 5), 0.05 * s, **STEPS),
    "scaffold_async": lambda s: personax.scaffold(0.05 * s, server=asynchronous(0.5 * s, max_staleness=6), **STEPS),
    "apfl_buffered_adam": lambda s: personax.apfl(
        0.05 * s, 0.3 * s, server=personax.buffered(2, 0.01 * s, optimizer=personax.optimizer("adam")), **STEPS
    ),
    "aruba_async": lambda s: personax.aruba(personax.Aruba(0.05 * s), server=asynchronous(0.5 * s), **STEPS),
}
RECIPES = SYNCHRONOUS | ASYNCHRONOUS
