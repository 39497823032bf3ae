"""Personalise, then test: what is scored is stated by a `Protocol`, and training is never touched."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.federation import ClientData, Federation
from personax.keys import ADAPTATION, run_stream, typed_key
from personax.local import local_update
from personax.objectives.objective import descend
from personax.protocol import Protocol
from personax.results import Result, Snapshot
from personax.sampling import Client, Draw, draw_rows, gather
from personax.scores import Evaluation
from personax.typing import Array, Batch, Metrics, Params, Personal, Scalar, Shared, Task

_CHUNK = 64  # clients, and rows, that are scored at once


@dataclass(frozen=True)
class _Program:
    """What is compiled in, beside the shapes and the protocol's static parts."""

    task: Task
    has_personal: bool  # whether the clients have states of their own, or start anew
    max_train: int
    max_test: int


class _Run(NamedTuple):
    """What a run left, of one seed or of several."""

    params: Params
    shared: Shared
    personal: Personal  # of all clients
    version: Array
    visits: Array
    positions: Array  # of the clients to score
    key: Array


def evaluate(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    result: Result | Snapshot,
    protocol: Protocol,
    *,
    key: Array,
) -> Evaluation:
    """Score each client's model on that client's data, as the protocol says.

    With several seeds `key` is one for all, or one for each. The batches of `"localized"` models are the run's own if
    it is the run's key. Nothing of the run is changed.
    """
    snapshot = result.snapshot if isinstance(result, Result) else result
    _check_model(algorithm, snapshot, protocol)
    held_out = protocol.clients == "held_out"
    scored = _newcomers(federation) if held_out else federation
    at = np.broadcast_to(np.arange(scored.num_clients), (*np.shape(snapshot.num_events), scored.num_clients))
    positions = snapshot.cohort if protocol.clients == "cohort" else at
    key = typed_key(key)
    run = _Run(
        snapshot.params,
        snapshot.shared,
        () if held_out else snapshot.personal,
        snapshot.state.server.version,
        jnp.asarray(np.zeros_like(at) if held_out else snapshot.visits, jnp.int32),
        jnp.asarray(positions, jnp.int32),
        key,
    )
    needs_test = protocol.score_on != "training" or protocol.adapt_on == "test"
    test = scored.test if needs_test else scored.train
    largest = [int(data.num_samples.max()) for data in (scored.train, test)]
    score = partial(_score, _Program(task, not held_out, *largest), algorithm, protocol, scored.train, test)
    if snapshot.has_seeds:
        run = run._replace(key=jnp.broadcast_to(key, np.shape(snapshot.num_events)))
        score = jax.vmap(score)
    metrics = {name: np.asarray(values) for name, values in score(run).items()}
    num_samples = np.asarray((scored.train if protocol.score_on == "training" else test).num_samples)[positions]
    return Evaluation(protocol, metrics, positions, num_samples, snapshot.num_events, snapshot.time)


def observer(
    algorithm: Algorithm, task: Task, federation: Federation, protocol: Protocol, *, key: Array
) -> Callable[[Snapshot], Evaluation]:
    """What `simulate(..., observe=...)` calls to score a run as it goes; `Trajectory(result.history)` reads it."""
    return lambda snapshot: evaluate(algorithm, task, federation, snapshot, protocol, key=key)


def adaptation_curve(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    result: Result | Snapshot,
    protocol: Protocol,
    num_steps: Sequence[int] = (0, 1, 2, 5, 10),
    *,
    key: Array,
) -> dict[int, Evaluation]:
    """Scores against the number of adaptation steps; more steps continue the batches of fewer.

    With `clients="held_out"` these are new participants (Fallah's few steps: `"adapted"`; APFL (7): `"recomputed"`).
    """
    if protocol.model not in ("adapted", "recomputed"):
        raise ValueError(f"Only 'adapted' or 'recomputed' models take adaptation steps, got {protocol.model!r}.")
    score = partial(evaluate, algorithm, task, federation, result, key=key)
    return {num: score(replace(protocol, num_steps=num)) for num in num_steps}


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

    The protocol's `model` is `"adapted"` or `"recomputed"`; its `clients` and what it scores do not matter here. A
    newcomer has no `personal` state: it gets the one that every client starts from.
    """
    if protocol.model not in ("adapted", "recomputed") or protocol.adapt_on == "test":
        raise ValueError(
            "A client's model is 'adapted' or 'recomputed' with its training data, got a protocol that scores "
            f"{protocol.describe()}"
        )
    data = Federation.from_clients([client_data]).train
    objective = algorithm.objective
    own = objective.init_personal(params) if personal is None else personal
    common = objective.init_shared(params) if shared is None else shared
    return _adapted(algorithm, task, protocol, data, _client(data, 0), params, common, own, key)


def _check_model(algorithm: Algorithm, snapshot: Snapshot, protocol: Protocol) -> None:
    seed = (0,) * snapshot.has_seeds
    params = jax.tree.map(lambda leaf: leaf[seed], snapshot.params)
    personal = jax.tree.map(lambda leaf: leaf[(*seed, 0)], snapshot.personal)
    kept = jax.eval_shape(algorithm.objective.models, params, personal)
    names = {"localized", "adapted", "recomputed", *kept}
    if protocol.model not in names:
        raise ValueError(f"{algorithm.objective} keeps no {protocol.model!r} model; score one of {sorted(names)}.")


def _newcomers(federation: Federation) -> Federation:
    if federation.newcomers is None:
        raise ValueError("This federation holds no clients out of training. Make one that does with `hold_out(...)`.")
    return federation.newcomers


@partial(jax.jit, static_argnames=("program",))
def _score(
    program: _Program, algorithm: Algorithm, protocol: Protocol, train: ClientData, test: ClientData, run: _Run
) -> Metrics:
    def one(position: Array) -> Metrics:
        model = _client_model(program, algorithm, protocol, train, test, run, position)
        found: Metrics = {}
        if protocol.score_on != "training":
            found |= _metrics(program.task, test, _client(test, position), model, program.max_test)
        if protocol.score_on != "test":
            on_train = _metrics(program.task, train, _client(train, position), model, program.max_train)
            found |= {f"train_{name}": values for name, values in on_train.items()}
        return found

    return jax.lax.map(one, run.positions, batch_size=_CHUNK)


def _client_model(
    program: _Program,
    algorithm: Algorithm,
    protocol: Protocol,
    train: ClientData,
    test: ClientData,
    run: _Run,
    position: Scalar,
) -> Params:
    """The model of one client that the protocol asks for."""
    objective, loss = algorithm.objective, program.task.loss
    if program.has_personal:
        own = jax.tree.map(lambda leaf: leaf[position], run.personal)
    else:
        own = objective.init_personal(run.params)
    if protocol.model == "localized":
        where = _client(train, position)._replace(update=run.visits[position])
        visit = partial(local_update, objective, algorithm.local, loss, train, program.max_train, where)
        return visit(run.params, run.shared, own, run.version, run_stream(run.key)).end
    if protocol.model in ("adapted", "recomputed"):
        data = test if protocol.adapt_on == "test" else train
        where = _client(data, position)
        return _adapted(algorithm, program.task, protocol, data, where, run.params, run.shared, own, run.key)
    return objective.models(run.params, own)[protocol.model]


def _client(data: ClientData, position: Scalar) -> Client:
    return Client(data.start[position], data.num_samples[position], data.ids[position], jnp.zeros((), jnp.int32))


def _adapted(
    algorithm: Algorithm,
    task: Task,
    protocol: Protocol,
    data: ClientData,
    where: Client,
    params: Params,
    shared: Shared,
    personal: Personal,
    key: Array,
) -> Params:
    """The shared model after adaptation to a client's data, by gradient steps or by the objective's own way."""
    if not protocol.adapts:
        return params
    steps, draws = jnp.arange(protocol.num_steps), (Draw("adapt", 0, protocol.batch_size),)
    rows, weight, keys = draw_rows(run_stream(typed_key(key), ADAPTATION), where, steps, draws, "shuffled")
    batches: Batch = gather(data, rows, weight, keys[:, 0])
    if protocol.model == "adapted":
        return descend(task.loss, params, batches, protocol.lr)[0]
    return algorithm.objective.personalize(task.loss, params, personal, shared, batches, protocol.lr)


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
