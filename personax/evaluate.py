"""Personalise, then test: which model is scored is a value, and training is never touched."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.federation import ClientData, Federation
from personax.results import Result
from personax.sampling import Client, Draw, draw_rows, gather, run_stream, typed_key
from personax.typing import Array, Metrics, Params, Personal, Scalar, Shared, Task
from personax.values import Static, require_count, require_nonnegative, require_one_of, value

_CHUNK = 64  # clients, and rows, that are scored at once


@value
class Protocol:
    """Which model of a client is scored on its test data.

    `"global"`: the shared model as it is. `"personal"`: the personal model that the client keeps (`"local"`: APFL's v
    alone). `"adapted"`: the one that the objective makes from the shared model with `num_steps` fresh batches of the
    client's *training* data, at step size `lr`: gradient steps, the Moreau envelope's inner problem (at its own step
    size), steps of the client's v (APFL (7)), ARUBA's refinement.
    """

    model: Static[Literal["global", "personal", "local", "adapted"]] = "adapted"
    num_steps: Static[int] = 1
    lr: float = 0.01
    batch_size: Static[int] = 40

    def __post_init__(self) -> None:
        require_one_of("model", self.model, ("global", "personal", "local", "adapted"))
        require_count("num_steps", self.num_steps)
        require_nonnegative("lr", self.lr)
        require_count("batch_size", self.batch_size)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Each metric of each client, [clients] or [seeds, clients], and the protocol that gave it."""

    protocol: Protocol
    metrics: dict[str, np.ndarray]

    def mean(self, name: str) -> np.ndarray:
        """The mean over clients, uniform; one number for each seed."""
        return self.metrics[name].mean(axis=-1)


def evaluate(
    algorithm: Algorithm, task: Task, federation: Federation, result: Result, protocol: Protocol, *, key: Array
) -> Evaluation:
    """Score every client's model on that client's test data."""
    names = {"adapted", *_kept_models(algorithm, result)}
    if protocol.model not in names:
        raise ValueError(f"{algorithm.objective} keeps no {protocol.model!r} model; score one of {sorted(names)}.")
    score = partial(_score, task, federation.num_clients, int(federation.test.num_samples.max()))
    if result.has_seeds:
        score = jax.vmap(score, in_axes=(None, None, None, None, 0, 0, 0, None))
    found = score(
        algorithm, protocol, federation.train, federation.test, result.params, result.shared, result.personal, key
    )
    return Evaluation(protocol, {name: np.asarray(values) for name, values in found.items()})


def _kept_models(algorithm: Algorithm, result: Result) -> list[str]:
    """The names of the models that a client holds."""
    seed = (0,) * result.has_seeds
    params = jax.tree.map(lambda leaf: leaf[seed], result.params)
    personal = jax.tree.map(lambda leaf: leaf[(*seed, 0)], result.personal)
    return list(jax.eval_shape(algorithm.objective.models, params, personal))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _score(
    task: Task,
    num_clients: int,
    max_count: int,
    algorithm: Algorithm,
    protocol: Protocol,
    train: ClientData,
    test: ClientData,
    params: Params,
    shared: Shared,
    personal: Personal,
    key: Array,
) -> Metrics:
    def one(position: Array) -> Metrics:
        own = jax.tree.map(lambda leaf: leaf[position], personal)
        model = _client_model(algorithm, task, protocol, train, position, params, shared, own, key)
        return _metrics(task, test, _client(test, position), model, max_count)

    return jax.lax.map(one, jnp.arange(num_clients), batch_size=_CHUNK)


def _client(data: ClientData, position: Scalar) -> Client:
    return Client(data.start[position], data.num_samples[position], data.ids[position], jnp.zeros((), jnp.int32))


def _client_model(
    algorithm: Algorithm,
    task: Task,
    protocol: Protocol,
    train: ClientData,
    position: Scalar,
    params: Params,
    shared: Shared,
    personal: Personal,
    key: Array,
) -> Params:
    objective = algorithm.objective
    if protocol.model != "adapted":
        return objective.models(params, personal)[protocol.model]
    steps, draws = jnp.arange(protocol.num_steps), (Draw("adapt", 0, protocol.batch_size),)
    rows, weight, keys = draw_rows(run_stream(typed_key(key)), _client(train, position), steps, draws, "shuffled")
    batches = gather(train, rows, weight, keys[:, 0])
    return objective.personalize(task.loss, params, personal, shared, batches, protocol.lr)


def _metrics(task: Task, data: ClientData, client: Client, params: Params, max_count: int) -> Metrics:
    """The mean of each metric over all the client's rows, in slices."""

    def part(begin: Array) -> tuple[Metrics, Array]:
        places = begin + jnp.arange(_CHUNK, dtype=client.start.dtype)
        weight = (places < client.num_samples).astype(float)
        batch = gather(data, client.start + jnp.minimum(places, client.num_samples - 1), weight, jax.random.key(0))
        return task.metrics(params, batch), weight.sum()

    found, counts = jax.lax.map(part, jnp.arange(0, max_count, _CHUNK, dtype=jnp.int32))
    # A slice of nothing but filler may have no finite metric of its own.
    total = lambda values: jnp.where(counts > 0, values * counts, 0).sum()
    return {name: total(values) / counts.sum() for name, values in found.items()}


def personalize(
    algorithm: Algorithm,
    task: Task,
    params: Params,
    client_data: tuple[np.ndarray, np.ndarray],
    protocol: Protocol,
    *,
    personal: Personal | None = None,
    shared: Shared | None = None,
    key: Array,
) -> Params:
    """One client's model from the shared one and its own (x, y), seen in training or not.

    A newcomer has no `personal` state: it gets the one that every client starts from.
    """
    data = Federation.from_clients([client_data]).train
    objective = algorithm.objective
    own = objective.init_personal(params) if personal is None else personal
    common = objective.init_shared(params) if shared is None else shared
    return _client_model(algorithm, task, protocol, data, 0, params, common, own, key)
