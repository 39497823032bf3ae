"""Every recipe once, as a function of a factor on its step sizes, for test tables."""

import dataclasses

import personax
from personax import Meta, Moreau, asynchronous

STEPS = {"num_steps": 3, "batch_size": 4}


def _with_personal_head(algorithm):
    return dataclasses.replace(algorithm, sharing=personax.Sharing("dense_1", frozen="dense_0.bias"))


SYNCHRONOUS = {
    "fedavg": lambda s: personax.fedavg(lr=0.05 * s, **STEPS),
    "fedavg_epochs": lambda s: personax.fedavg(lr=0.05 * s, num_epochs=2, batch_size=4, sampling="shuffled"),
    "fedavg_adam": lambda s: personax.fedavg(
        lr=0.01 * s,
        optimizer=personax.optimizer("adam"),
        server=personax.synchronous(0.5 * s, weighting="samples"),
        **STEPS,
    ),
    "fedprox": lambda s: personax.fedprox(strength=0.5 * s, lr=0.05 * s, **STEPS),
    "scaffold_1": lambda s: personax.scaffold(lr=0.05 * s, option=1, **STEPS),
    "scaffold_2": lambda s: personax.scaffold(lr=personax.step_sizes.Decay(0.05 * s, 0.01), option=2, **STEPS),
    "aruba": lambda s: personax.aruba(personax.Aruba(0.05 * s), **STEPS),
    "local_only": lambda s: personax.local_only(lr=0.05 * s, clip_norm=5.0 * s, **STEPS),
    "per_fedavg_exact": lambda s: personax.per_fedavg(
        adapt_lr=0.05 * s, lr=0.05 * s, hvp=personax.curvature.exact, **STEPS
    ),
    "per_fedavg_fo": lambda s: personax.per_fedavg(
        adapt_lr=0.05 * s, lr=0.05 * s, hvp=personax.curvature.first_order, **STEPS
    ),
    "per_fedavg_hf": lambda s: personax.per_fedavg(adapt_lr=0.05 * s, lr=0.05 * s, query_share=0.3 * s, **STEPS),
    "gmeta": lambda s: personax.per_fedavg(adapt_lr=0.05 * s, lr=0.05 * s, num_adapt_steps=3, **STEPS),
    "gmeta_printed": lambda s: personax.per_fedavg(
        adapt_lr=0.05 * s,
        lr=0.05 * s,
        num_adapt_steps=2,
        curvature_on="outer",
        num_steps=3,
        batch_size=personax.BatchSizes(4, adapt=(3, 2)),
    ),
    "pfedme": lambda s: personax.pfedme(
        strength=2.0 * s, lr=0.05 * s, prox_lr=0.05 * s, server=personax.synchronous(0.7 * s), **STEPS
    ),
    "ditto": lambda s: personax.ditto(strength=0.5 * s, lr=0.05 * s, local_lr=0.03 * s, **STEPS),
    # Adapters are patterns of names, which these networks have, too.
    "fedsa_lora": lambda s: personax.fedsa_lora(
        lr=0.05 * s, personal="dense_1.kernel", frozen="dense_0.bias", optimizer=personax.optimizer("adam"), **STEPS
    ),
    "feddpa": lambda s: personax.feddpa(
        lr=0.05 * s,
        num_personal_steps=2,
        num_steps=1,
        personal="dense_1",
        shared="dense_0.kernel",
        frozen="dense_0.bias",
        batch_size=4,
    ),
    "apfl": lambda s: personax.apfl(lr=personax.step_sizes.Decay(0.05 * s, 0.01), mix=0.3 * s, radius=9.0 * s, **STEPS),
    "fedper": lambda s: personax.fedper(personal="dense_1", lr=0.05 * s, **STEPS),
    "lg_fedavg": lambda s: personax.lg_fedavg(personal="dense_0", lr=0.05 * s, num_epochs=1, batch_size=4),
    "fedrep": lambda s: personax.fedrep(
        personal="dense_1", lr=0.05 * s, num_personal_epochs=2, personal_lr=0.03 * s, **STEPS
    ),
    "fedbabu": lambda s: personax.fedbabu(head="dense_1", lr=0.05 * s, **STEPS),
    "fedalt": lambda s: personax.fedalt(personal="*.bias", lr=0.05 * s, num_personal_steps=2, **STEPS),
    "fedsim": lambda s: personax.fedsim(
        personal="*.bias", lr=0.01 * s, optimizer=personax.optimizer("adam"), clip_norm=5.0 * s, **STEPS
    ),
    "anil": lambda s: personax.anil(head="dense_1", adapt_lr=0.05 * s, lr=0.05 * s, num_adapt_steps=2, **STEPS),
}
NORMALIZED = {  # for a network with batch normalization
    "fedbn": lambda s: personax.fedbn(lr=0.05 * s, num_epochs=2, batch_size=4, sampling="shuffled"),
}
SYNCHRONOUS |= NORMALIZED
ASYNCHRONOUS = {
    "fedasync": lambda s: personax.fedasync(lr=0.05 * s, **STEPS),
    "fedasync_mixing": lambda s: personax.fedasync_mixing(lr=0.05 * s, mixing=0.6 * s, strength=0.1 * s, **STEPS),
    "fedbuff": lambda s: personax.fedbuff(lr=0.05 * s, buffer_size=3, server_lr=0.8 * s, **STEPS),
    "persafl_maml": lambda s: personax.persafl(Meta(0.05 * s), lr=0.05 * s, **STEPS),
    "persafl_me": lambda s: personax.persafl(Moreau(2.0 * s, 0.05 * s, 5), lr=0.05 * s, **STEPS),
    "scaffold_async": lambda s: personax.scaffold(lr=0.05 * s, server=asynchronous(0.5 * s, max_staleness=6), **STEPS),
    "ditto_async": lambda s: personax.ditto(
        strength=0.5 * s, lr=personax.step_sizes.Decay(0.05 * s, 0.01), server=asynchronous(0.5 * s), **STEPS
    ),
    "apfl_buffered_adam": lambda s: personax.apfl(
        lr=0.05 * s, mix=0.3 * s, server=personax.buffered(2, 0.01 * s, optimizer=personax.optimizer("adam")), **STEPS
    ),
    "fedrep_async": lambda s: personax.fedrep(
        personal="dense_1", lr=0.05 * s, num_personal_steps=2, server=asynchronous(0.5 * s), **STEPS
    ),
    "persafl_maml_personal_head": lambda s: _with_personal_head(personax.persafl(Meta(0.05 * s), lr=0.05 * s, **STEPS)),
    "persafl_me_personal_head": lambda s: _with_personal_head(
        personax.persafl(Moreau(2.0 * s, 0.05 * s, 5), lr=0.05 * s, **STEPS)
    ),
    "aruba_async": lambda s: personax.aruba(personax.Aruba(0.05 * s), server=asynchronous(0.5 * s), **STEPS),
}
RECIPES = SYNCHRONOUS | ASYNCHRONOUS
