"""Noise and smoothness of a federation's losses: the constants of the papers' assumptions, over a given region.

`loss` belongs to a task; `batches` are samples of all clients (`sample_clients`), whose mean losses represent the f_i.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.theory.derivatives import cubic_of, examples_of, gradient_of, product_of, starts
from personax.theory.heterogeneity import gradient_spread, hessian_spread
from personax.theory.quantities import Constants, Measured, largest
from personax.theory.region import Region
from personax.theory.spectrum import Extremes, cubic_norm, extremes
from personax.typing import Array, Batch, LossFn, Params
from personax.values import require_count


class Noise(NamedTuple):
    """Deviations of single examples from their client's mean: the root of the second moment, and the fourth moment.

    >>> import jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # f_i(w) = |w - mean|^2 / 2 + constant
    >>> noise = px.theory.gradient_noise(loss, px.theory.at(jnp.zeros(1)), px.theory.sample_clients(fed))
    >>> noise.deviation.value, noise.kurtosis.value
    (1.0, 1.0)
    """

    deviation: Measured
    kurtosis: Measured


def gradient_bound(loss: LossFn, region: Region, batches: Batch) -> Measured:
    """`B = max_i max_w |grad f_i(w)|`: Fallah (9), gMeta (12); G in PersA-FL (20).

    Departures from the paper: over the region's models; over all of space it is infinite for a quadratic.

    >>> import jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # f_i(w) = |w - mean|^2 / 2 + constant
    >>> px.theory.gradient_bound(loss, px.theory.at(jnp.zeros(1)), px.theory.sample_clients(fed)).value
    5.0
    """
    norms = np.asarray(_gradient_norms(loss, region.models, batches))
    return largest(norms, np.zeros_like(norms), region.description)


def smoothness(loss: LossFn, region: Region, batches: Batch, *, key: Array, num_steps: int = 20) -> Measured:
    """`L = max_i max_w |Hess f_i(w)|`, the largest absolute eigenvalue: Fallah (9), (17a), gMeta (12), PersA-FL (12).

    Computed by `num_steps` Lanczos steps on Hessian-vector products. Departures from the paper: over the region's
    models.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # f_i(w) = |w - mean|^2 / 2 + constant
    >>> batches, region = px.theory.sample_clients(fed), px.theory.at(jnp.zeros(1))
    >>> round(px.theory.smoothness(loss, region, batches, key=jax.random.key(0)).value, 6)
    1.0
    """
    found = _spectra(loss, region, batches, key, num_steps)
    return largest(np.asarray(found.norm), np.asarray(found.norm_error), region.description)


def strong_convexity(loss: LossFn, region: Region, batches: Batch, *, key: Array, num_steps: int = 20) -> Measured:
    """`mu = min_i min_w` of the smallest eigenvalue of Hess f_i(w): APFL Theorem 2; negative if some f_i is not convex.

    Departures from the paper: over the region's models.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # f_i(w) = |w - mean|^2 / 2 + constant
    >>> batches, region = px.theory.sample_clients(fed), px.theory.at(jnp.zeros(1))
    >>> round(px.theory.strong_convexity(loss, region, batches, key=jax.random.key(0)).value, 6)
    1.0
    """
    found = _spectra(loss, region, batches, key, num_steps)
    lowest = largest(-np.asarray(found.smallest), np.asarray(found.smallest_error), region.description)
    return lowest._replace(value=-lowest.value)


def hessian_lipschitz(
    loss: LossFn, region: Region, batches: Batch, *, key: Array, num_starts: int = 4, num_steps: int = 20
) -> Measured:
    """`rho = max_i max_w |D^3 f_i(w)|`: Fallah (10), gMeta (13), PersA-FL (17).

    On a convex region, the Lipschitz constant of the Hessian is the largest norm of its derivative, which is the
    largest |D^3 f_i(w)[v, v, v]| over unit v. It is found by power iteration from `num_starts` random starts.
    Departures from the paper: over the region's models, and a lower estimate at each.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # its Hessian is constant
    >>> batches, region = px.theory.sample_clients(fed), px.theory.at(jnp.zeros(1))
    >>> px.theory.hessian_lipschitz(loss, region, batches, key=jax.random.key(0), num_steps=3).value
    0.0
    """
    require_count("num_starts", num_starts)
    first = starts(region.models, num_starts, key)
    norms = np.asarray(_cubic_norms(loss, num_steps, region.models, batches, first))
    return largest(norms, np.zeros_like(norms), region.description)


def gradient_noise(loss: LossFn, region: Region, batches: Batch) -> Noise:
    """`sigma_G` and `kappa_G`, the largest over clients and models of

        sqrt(E |grad l(w; z) - grad f_i(w)|^2),     E |grad l(w; z) - grad f_i(w)|^4

    over a client's examples z: Fallah (11), gMeta (14), (16), PersA-FL (14). gMeta's kurtosis is this fourth moment,
    not divided by sigma_G^4. Departures from the paper: over the region's models; means over the given
    samples (divided by their number), with the standard errors of such means.

    >>> import jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # f_i(w) = |w - mean|^2 / 2 + constant
    >>> px.theory.gradient_noise(loss, px.theory.at(jnp.zeros(1)), px.theory.sample_clients(fed)).deviation.value
    1.0
    """
    return _noise(_gradient_moments(loss, region.models, batches), region)


def hessian_noise(loss: LossFn, region: Region, batches: Batch, *, key: Array, num_steps: int = 20) -> Noise:
    """`sigma_H` and `kappa_H`: the same as `gradient_noise` for Hessians, in the spectral norm, by Lanczos.

    Fallah (12), gMeta (15), (17), PersA-FL (18). Costs one pass over a client's samples for each sample and step.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # all examples have the same Hessian
    >>> batches, region = px.theory.sample_clients(fed), px.theory.at(jnp.zeros(1))
    >>> px.theory.hessian_noise(loss, region, batches, key=jax.random.key(0), num_steps=3).deviation.value
    0.0
    """
    first = starts(region.models, 1, key)[0]
    return _noise(_hessian_moments(loss, num_steps, region.models, batches, first), region)


def measure(loss: LossFn, region: Region, batches: Batch, *, key: Array, num_steps: int = 20) -> dict[str, Measured]:
    """Measure every constant of `Constants`; `constants_of` converts the result for the bounds.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # f_i(w) = |w - mean|^2 / 2 + constant
    >>> batches, region = px.theory.sample_clients(fed), px.theory.at(jnp.zeros(1))
    >>> measured = px.theory.measure(loss, region, batches, key=jax.random.key(0), num_steps=3)
    >>> measured["gradient_spread"].value
    2.0
    """
    keys = jax.random.split(key, 4)
    steps = {"num_steps": num_steps}
    gradient = gradient_noise(loss, region, batches)
    hessian = hessian_noise(loss, region, batches, key=keys[0], **steps)
    return {
        "gradient_bound": gradient_bound(loss, region, batches),
        "smoothness": smoothness(loss, region, batches, key=keys[1], **steps),
        "hessian_lipschitz": hessian_lipschitz(loss, region, batches, key=keys[2], **steps),
        "gradient_noise": gradient.deviation,
        "hessian_noise": hessian.deviation,
        "gradient_kurtosis": gradient.kurtosis,
        "hessian_kurtosis": hessian.kurtosis,
        "gradient_spread": gradient_spread(loss, region, batches),
        "hessian_spread": hessian_spread(loss, region, batches, key=keys[3], **steps),
    }


def constants_of(measured: dict[str, Measured]) -> Constants:
    """Return the measured values without their errors.

    >>> import personax as px
    >>> measured = {"smoothness": px.theory.Measured(2.0, 0.0, client=0, model=0, region="one model")}
    >>> px.theory.constants_of(measured).smoothness
    2.0
    """
    return Constants(**{name: found.value for name, found in measured.items()})


def _spectra(loss: LossFn, region: Region, batches: Batch, key: Array, num_steps: int) -> Extremes:
    require_count("num_steps", num_steps)
    return _client_spectra(loss, num_steps, region.models, batches, starts(region.models, 1, key)[0])


@partial(jax.jit, static_argnums=0)
def _gradient_norms(loss: LossFn, models: Params, batches: Batch) -> Array:
    norm = lambda model, batch: jnp.linalg.norm(gradient_of(loss, model, batch))
    return jax.lax.map(lambda model: jax.vmap(norm, in_axes=(None, 0))(model, batches), models)


@partial(jax.jit, static_argnums=(0, 1))
def _client_spectra(loss: LossFn, num_steps: int, models: Params, batches: Batch, start: Array) -> Extremes:
    spectrum = lambda model, batch: extremes(product_of(loss, model, batch), start, num_steps)
    return jax.lax.map(lambda model: jax.lax.map(partial(spectrum, model), batches), models)


@partial(jax.jit, static_argnums=(0, 1))
def _cubic_norms(loss: LossFn, num_steps: int, models: Params, batches: Batch, first: Array) -> Array:
    norm = lambda model, batch: cubic_norm(cubic_of(loss, model, batch), first, num_steps)
    return jax.lax.map(lambda model: jax.lax.map(partial(norm, model), batches), models)


class _Moments(NamedTuple):
    """Second and fourth moments of deviations and the standard errors of these means, [models, clients]."""

    second: Array
    fourth: Array
    second_error: Array
    fourth_error: Array


@partial(jax.jit, static_argnums=0)
def _gradient_moments(loss: LossFn, models: Params, batches: Batch) -> _Moments:
    def of_client(model: Params, batch: Batch) -> _Moments:
        center = gradient_of(loss, model, batch)
        deviation = lambda example: jnp.linalg.norm(gradient_of(loss, model, example) - center)
        return _moments(jax.vmap(deviation)(examples_of(batch)), batch.weight)

    return jax.lax.map(lambda model: jax.lax.map(partial(of_client, model), batches), models)


@partial(jax.jit, static_argnums=(0, 1))
def _hessian_moments(loss: LossFn, num_steps: int, models: Params, batches: Batch, start: Array) -> _Moments:
    def of_client(model: Params, batch: Batch) -> _Moments:
        center = product_of(loss, model, batch)

        def deviation(example: Batch) -> Array:
            own = product_of(loss, model, example)
            return extremes(lambda vector: own(vector) - center(vector), start, num_steps).norm

        return _moments(jax.lax.map(deviation, examples_of(batch)), batch.weight)

    return jax.lax.map(lambda model: jax.lax.map(partial(of_client, model), batches), models)


def _moments(deviations: Array, weight: Array) -> _Moments:
    """Weighted means of the second and fourth powers, with the standard errors of means of independent examples."""
    shares = weight / weight.sum()
    squares = deviations**2
    mean = lambda values: shares @ values
    error = lambda values: jnp.sqrt((shares**2) @ (values - mean(values)) ** 2)
    return _Moments(mean(squares), mean(squares**2), error(squares), error(squares**2))


def _noise(found: _Moments, region: Region) -> Noise:
    second, fourth, second_error, fourth_error = map(np.asarray, found)
    deviation = np.sqrt(second)
    # The error of a root, to first order; it is zero without noise.
    error = np.divide(second_error, 2 * deviation, out=np.zeros_like(deviation), where=deviation > 0)
    return Noise(largest(deviation, error, region.description), largest(fourth, fourth_error, region.description))
