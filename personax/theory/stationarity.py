"""The distance from stationarity of the clients' mean objective, which the convergence theorems bound."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from personax.client.step_sizes import Clock
from personax.objectives import Objective, Visit
from personax.objectives.objective import Batches
from personax.theory.region import Region
from personax.typing import Array, Batch, LossFn, Params


class Stationarity(NamedTuple):
    """The values `|grad F(w)|^2`, with F = (1/n) sum_i F_i, and `(1/n) sum_i |grad F_i(w) - grad F(w)|^2`.

    >>> import jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # the minimum of the mean is at 3
    >>> found = px.theory.stationarity(px.Erm(), loss, jnp.array([3.0]), px.theory.sample_clients(fed))
    >>> float(found.squared_norm), float(found.squared_spread)
    (0.0, 4.0)
    """

    squared_norm: Array
    squared_spread: Array


def client_gradients(
    objective: Objective, loss: LossFn, params: Params, batches: Batch, *, as_trained: bool = False
) -> Params:
    """Compute `grad F_i(w)` of each client, leaves [clients, ...], exactly on the given samples.

    For `Meta`, this is Fallah (5), gMeta (8) and PersA-FL (5), always with exact Hessians. For `Moreau`, it is PersA-FL
    (7), as exact as its inner steps: use a small `tolerance`, which leaves an error of up to lambda / (lambda - L)
    times it (PersA-FL (26)). For `Erm`, it is grad f_i. Departures from the paper: none. With `as_trained`, `Meta`
    applies Hessians as it does in training, which measures its bias.

    >>> import jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # f_i(w) = |w - mean|^2 / 2 + constant
    >>> px.theory.client_gradients(px.Erm(), loss, jnp.zeros(1), px.theory.sample_clients(fed)).tolist()
    [[-1.0], [-5.0]]
    """
    tracked = objective.tracked()
    if tracked is None:
        raise ValueError(
            f"Clients of `objective` must minimize a single function, as with Erm, Meta or Moreau (got {objective}). "
            "Other objectives have no stationary point."
        )
    return _client_gradients(loss, objective if as_trained else tracked, params, batches)


def stationarity(objective: Objective, loss: LossFn, params: Params, batches: Batch) -> Stationarity:
    """Return the squared norm that Fallah Theorem 4.5, gMeta Theorem 8 and PersA-FL Theorems 1 to 3 bound.

    Evaluate it at the server's model, or at the randomly chosen iterate of Fallah's Remark 4.7, which `simulate(...,
    tracker=RandomIterate())` returns in `result.tracked`. The second number is bounded by Lemmas 4.4 (Fallah), 7
    (gMeta), and 3 and 7 (PersA-FL). To record it during a run, use `observe=lambda snapshot: stationarity(...,
    snapshot.params, ...)`.

    >>> import jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # the minimum of the mean is at 3
    >>> float(px.theory.stationarity(px.Erm(), loss, jnp.zeros(1), px.theory.sample_clients(fed)).squared_norm)
    9.0
    """
    return _summary(client_gradients(objective, loss, params, batches))


def stationarity_along(objective: Objective, loss: LossFn, region: Region, batches: Batch) -> Stationarity:
    """Compute `stationarity` at each model of a region, such as the `path` of a run.

    >>> import jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # the minimum of the mean is at 3
    >>> region = px.theory.path([jnp.zeros(1), jnp.array([3.0])])
    >>> px.theory.stationarity_along(px.Erm(), loss, region, px.theory.sample_clients(fed)).squared_norm.tolist()
    [9.0, 0.0]
    """
    one = lambda model: stationarity(objective, loss, model, batches)
    return jax.lax.map(one, region.models)


@partial(jax.jit, static_argnums=0)
def _client_gradients(loss: LossFn, objective: Objective, params: Params, batches: Batch) -> Params:
    def of_client(batch: Batch) -> Params:
        visit = Visit(params, (), Clock(0, 0, 1), 0.0)
        iterate, memory = objective.begin(params, objective.init_personal(params))
        return objective.gradient(loss, iterate, memory, visit, _all_of(objective, batch))[0]

    return jax.lax.map(of_client, batches)


def _all_of(objective: Objective, batch: Batch) -> Batches:
    """All of a client's samples as every batch of a local step, which makes its estimate exact."""
    repeat = lambda num: jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), batch)
    return {role: repeat(num) for role, num in objective.roles().items() if num}


def _summary(gradients: Params) -> Stationarity:
    total = lambda tree: sum(jax.tree.leaves(jax.tree.map(lambda leaf: jnp.sum(jnp.square(leaf)), tree)))
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0, keepdims=True), gradients)
    num = len(jax.tree.leaves(gradients)[0])
    away = jax.tree.map(lambda leaf, center: leaf - center, gradients, mean)
    return Stationarity(jnp.asarray(total(mean)), jnp.asarray(total(away)) / num)
