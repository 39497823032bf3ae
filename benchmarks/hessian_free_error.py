"""Measure the error of a Hessian-free product, by radius and matrix product precision (docs/departures.md)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import personax as px

RADII = (1e-4, 1e-3, 1e-2, 1e-1)


def main() -> None:
    rng = np.random.default_rng(0)
    task = px.classification(px.mlp((80, 60), 10))
    batch = lambda: px.Batch(
        jnp.asarray(rng.integers(0, 256, (40, 784)).astype(np.uint8)),
        jnp.asarray(rng.integers(0, 10, 40)),
        jnp.ones(40),
        jax.random.key(0),
    )
    here, elsewhere = batch(), batch()
    params = task.model.init(jax.random.key(0), here.x)
    vector = jax.grad(task.loss)(params, elsewhere)
    product = lambda hvp: jax.jit(lambda w, v: hvp(task.loss, w, v, here))(params, vector)
    with jax.default_matmul_precision("highest"):
        truth = product(px.curvature.exact)
    print(f"{jax.devices()[0].device_kind}: relative error by radius")
    for precision in ("default", "highest"):
        with jax.default_matmul_precision(precision):
            products = [product(px.curvature.relative_difference(radius)) for radius in RADII]
        errors = [optax.tree.norm(optax.tree.sub(found, truth)) / optax.tree.norm(truth) for found in products]
        print(f"{precision:10}", *(f"{r:g}: {float(e):.2%}  " for r, e in zip(RADII, errors, strict=True)))


if __name__ == "__main__":
    main()
