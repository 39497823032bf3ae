"""Evaluate personalized models. A `Scoring` states what is scored; training is never affected."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.client.local import Start, local_update
from personax.client.sampling import ClientRows, Draw, draw_rows, gather
from personax.data.federation import ClientData, Federation
from personax.evaluation.scores import Evaluation
from personax.evaluation.scoring import COMPUTED, Scoring
from personax.fast.passes import optimized
from personax.keys import RunStream, run_stream, typed_key
from personax.objectives.divided import split
from personax.objectives.objective import descend
from personax.objectives.statistics import statistics_of
from personax.sharing import Sharing, join, names_of, only, require_patterns, statistics_at
from personax.simulation.checks import check_model
from personax.simulation.results import Result, Snapshot, repeat
from personax.simulation.stream import roomy
from personax.typing import Array, Batch, Metrics, Params, Personal, Scalar, Shared, Task

_CHUNK = 64  # clients and rows to score at once
_MOST = 1 << 14  # clients to draw adaptation batches for at once
MOST_MAPPED = 1 << 10  # clients to read from a file at once


@dataclass(frozen=True)
class _ScoringProgram:
    """The static parts of a scoring program, besides shapes and the static fields of the scoring."""

    task: Task
    has_seeds: bool
    max_train: int
    max_test: int


class _ScoredRun(NamedTuple):
    """The parts of a run that are scored, for one or several seeds. Models without state omit the last four."""

    params: Params
    key: Array
    shared: Shared = ()
    personal: Personal = ()  # for the clients to score
    version: Any = ()
    visits: Any = ()


def evaluate(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    result: Result | Snapshot,
    scoring: Scoring,
    *,
    key: Array,
) -> Evaluation:
    """Score each client's model on that client's data, as specified by the scoring.

    With several seeds, `key` is one key for all or one per seed. If it is the run's key, `"localized"` models use the
    run's own batches. The run is not modified.
    """
    snapshot = result.snapshot if isinstance(result, Result) else result
    check_scoring(algorithm, *_first_client(snapshot), scoring)
    scored = _scored(algorithm, federation, snapshot, scoring)
    at = np.broadcast_to(np.arange(scored.num_clients), (*np.shape(snapshot.num_events), scored.num_clients))
    positions = snapshot.cohort if scoring.clients == "cohort" else at
    found = []
    most = MOST_MAPPED if scored.is_mapped else _MOST
    for begin in range(0, positions.shape[-1], most):
        here = positions[..., begin : begin + most]
        run = _run_of(algorithm, snapshot, scoring, here, key)
        found.append(_score_clients(algorithm, task, scored, here, scoring, run, snapshot.has_seeds))
    metrics = {name: np.concatenate([part[name] for part in found], axis=positions.ndim - 1) for name in found[0]}
    num_test = scored.test_counts if scoring.reads_test else scored.counts
    ids, at = scored.ids[positions], (snapshot.num_events, snapshot.time)
    return Evaluation(scoring, metrics, ids, num_test[positions], scored.counts[positions], *at, algorithm.divided)


def client_models(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    result: Result | Snapshot,
    scoring: Scoring,
    clients: Sequence[int] | np.ndarray,
    *,
    key: Array,
) -> Params:
    """Return the models that `evaluate` scores with the same key, for the clients at these positions.

    Leaves are [clients, ...] or [seeds, clients, ...]. With `clients="held_out"`, positions are among the newcomers; a
    scoring of the last cohort works for any client.

    >>> import jax, personax as px
    >>> fed = px.datasets.synthetic(num_clients=3, num_features=4, num_samples=20, key=jax.random.key(0))
    >>> task, algorithm = px.classification(px.logistic_regression(10)), px.fedavg(lr=0.1, num_steps=2)
    >>> result = px.simulate(algorithm, task, fed, px.rounds(3, 2, key=jax.random.key(0)), key=jax.random.key(0))
    >>> scoring = px.Scoring("adapted", lr=0.1)
    >>> models = px.client_models(algorithm, task, fed, result, scoring, [0, 2], key=jax.random.key(1))
    >>> models["dense_0"]["kernel"].shape  # a leading axis of two clients
    (2, 4, 10)
    """
    snapshot = result.snapshot if isinstance(result, Result) else result
    scoring = replace(scoring, clients="all") if scoring.clients == "cohort" else scoring
    check_scoring(algorithm, *_first_client(snapshot), scoring)
    scored, places = _scored(algorithm, federation, snapshot, scoring), np.asarray(clients, int)
    if places.ndim != 1 or not len(places) or places.min() < 0 or places.max() >= scored.num_clients:
        raise ValueError(f"`clients` must be positions in 0..{scored.num_clients - 1}, got {clients}.")
    at = np.broadcast_to(places, (*np.shape(snapshot.num_events), len(places)))
    run = _run_of(algorithm, snapshot, scoring, at, key)
    return _of_clients(_itself, *_arguments(algorithm, task, scored, at, scoring, run, snapshot.has_seeds))


def evaluate_client(
    algorithm: Algorithm, task: Task, data: Federation, start: Start, scoring: Scoring, *, update: int, key: Array
) -> dict[str, float]:
    """Score one client from its own state, with the same numbers as `evaluate`.

    `data` is a federation of this client only, with its id. `start` is the start of its next visit, and `update` the
    number of its updates so far. The scoring's `clients` is ignored.
    """
    if data.num_clients != 1:
        raise ValueError(f"`data` must have one client, got {data.num_clients}. Score several with `evaluate`.")
    start = jax.tree.map(jnp.asarray, start)
    params = join(start.anchor, start.frozen, split(start.personal)[0])
    check_scoring(algorithm, params, start.personal, scoring)
    run = _ScoredRun(params, typed_key(key))
    if not is_common(algorithm, scoring):
        personal = jax.tree.map(lambda leaf: leaf[None], start.personal)
        version, visits = jnp.asarray(start.round, jnp.int32), jnp.full(1, update, jnp.int32)
        run = run._replace(shared=start.shared, personal=personal, version=version, visits=visits)
    found = _score_clients(algorithm, task, data, np.zeros(1, int), scoring, run, has_seeds=False)
    return {metric: float(values[0]) for metric, values in found.items()}


def _score_clients(
    algorithm: Algorithm,
    task: Task,
    scored: Federation,
    positions: np.ndarray,
    scoring: Scoring,
    run: _ScoredRun,
    has_seeds: bool,
) -> Metrics:
    """Compute the metrics of the clients at these positions; `run` has their states."""
    return _of_clients(_metrics_of, *_arguments(algorithm, task, scored, positions, scoring, run, has_seeds))


def _arguments(
    algorithm: Algorithm,
    task: Task,
    scored: Federation,
    positions: np.ndarray,
    scoring: Scoring,
    run: _ScoredRun,
    has_seeds: bool,
) -> tuple:
    """Return the arguments of `_of_clients`."""
    train, test, places = _data(scored, scoring.reads_test, positions)
    test_counts = scored.test_counts if scoring.reads_test else scored.counts
    program = _ScoringProgram(optimized(task), has_seeds, int(scored.counts.max()), int(test_counts.max()))
    adapt_data = test if scoring.adapt_on == "test" else train
    drawn = _draw_all(scoring, adapt_data, places, run.key) if scoring.adapts else ()
    # The shared model, and plain steps from it, are the same program for every algorithm.
    return program, None if is_common(algorithm, scoring) else algorithm, scoring, train, test, run, places, drawn


def _data(scored: Federation, reads_test: bool, positions: np.ndarray) -> tuple[ClientData, ClientData, Array]:
    """Return training data, test data (or training data again), and the positions of these clients in them."""
    if not scored.is_mapped:
        return scored.train, scored.test if reads_test else scored.train, jnp.asarray(positions, jnp.int32)
    clients = np.unique(positions)
    of = lambda part, counts: part(clients, roomy(int(counts[clients].sum())), roomy(len(clients)))
    train = of(scored.train_of, scored.counts)
    test = of(scored.test_of, scored.test_counts) if reads_test else train
    return train, test, jnp.asarray(np.searchsorted(clients, positions), jnp.int32)


def _scored(algorithm: Algorithm, federation: Federation, snapshot: Snapshot, scoring: Scoring) -> Federation:
    """Return the clients to score; clients with their own state must be those that the run trained."""
    if scoring.clients == "held_out":
        if federation.newcomers is None:
            raise ValueError("This federation has no held-out clients. Create one with `hold_out(...)`.")
        return federation.newcomers
    shares = scoring.clients == "all" and is_common(algorithm, scoring)
    if not shares and not np.array_equal(federation.ids, snapshot.ids):
        raise ValueError(
            f"The run's {len(snapshot.ids)} clients differ from the {federation.num_clients} of this federation in "
            "number, identity or order. Score the run on the federation that it was trained on."
        )
    return federation


def _run_of(
    algorithm: Algorithm, snapshot: Snapshot, scoring: Scoring, positions: np.ndarray, key: Array
) -> _ScoredRun:
    """Return the parts of a run that a scoring needs."""
    keys, seeds = typed_key(key), np.shape(snapshot.num_events)
    if keys.shape not in ((), seeds):
        raise ValueError(f"`key` must be one key, or one per seed of the run, got {keys.shape} for {seeds}.")
    keys = jnp.broadcast_to(keys, seeds)
    run = _ScoredRun(snapshot.params, keys)
    if is_common(algorithm, scoring):
        return run
    if scoring.clients == "held_out":
        init = lambda params: repeat(algorithm.divided.init_personal(params), positions.shape[-1])
        personal = jax.vmap(init)(snapshot.params) if snapshot.has_seeds else init(snapshot.params)
        visits = np.zeros_like(positions)
    elif positions.shape[-1] == len(snapshot.ids) and np.all(positions == np.arange(len(snapshot.ids))):
        personal, visits = snapshot.personal, snapshot.visits
    else:
        personal = snapshot.personal_of(positions)
        visits = np.take_along_axis(snapshot.visits, positions, axis=-1)
    version = snapshot.state.server.version
    return run._replace(
        shared=snapshot.shared, personal=personal, version=version, visits=jnp.asarray(visits, jnp.int32)
    )


def _draw_all(scoring: Scoring, data: ClientData, positions: Array, key: Array) -> tuple[Array, Array, Array]:
    """Draw the rows, weights and dropout keys of all adaptation batches, [..., clients, steps, batch].

    Draw step by step: one small program then works for any number of steps, and compiling it is slow.
    """
    draw = partial(_draw_step, scoring.batch_size, data, positions, key)
    axis, num = positions.ndim, scoring.num_steps
    drawn = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis), *map(draw, range(max(num, 1))))
    return drawn if num else jax.tree.map(lambda leaf: leaf[(slice(None),) * axis + (slice(0, 0),)], drawn)


@partial(jax.jit, static_argnums=0)
def _draw_step(batch_size: int, data: ClientData, positions: Array, key: Array, step: Array) -> tuple:
    def of_seed(positions: Array, key: Array) -> tuple:
        return jax.vmap(lambda at: _draw(batch_size, _client(data, at), key, step[None]))(positions)

    drawn = jax.vmap(of_seed)(positions, key) if key.ndim else of_seed(positions, key)
    return jax.tree.map(lambda leaf: jnp.squeeze(leaf, positions.ndim), drawn)


def _draw(batch_size: int, where: ClientRows, key: Array, steps: Array) -> tuple[Array, Array, Array]:
    draws = (Draw("adapt", 0, batch_size),)
    rows, weight, keys = draw_rows(run_stream(typed_key(key), RunStream.ADAPTATION), where, steps, draws, "shuffled")
    return rows, weight, keys[:, 0]


def observer(
    algorithm: Algorithm, task: Task, federation: Federation, scoring: Scoring, *, key: Array
) -> Callable[[Snapshot], Evaluation]:
    """Make a function for `Monitor(observe=...)` that scores a run into `result.history`."""
    return lambda snapshot: evaluate(algorithm, task, federation, snapshot, scoring, key=key)


def adaptation_curve(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    result: Result | Snapshot,
    scoring: Scoring,
    num_steps: Sequence[int] = (0, 1, 2, 5, 10),
    *,
    key: Array,
) -> dict[int, Evaluation]:
    """Evaluate with several numbers of adaptation steps; more steps continue the batches of fewer.

    With `clients="held_out"`, these are new participants (Fallah's few steps: `"adapted"`; APFL (7): `"recomputed"`).
    """
    if not scoring.can_adapt:
        raise ValueError(f"Only 'adapted' or 'recomputed' models take adaptation steps, got {scoring.model!r}.")
    score = partial(evaluate, algorithm, task, federation, result, key=key)
    return {num: score(replace(scoring, num_steps=num)) for num in num_steps}


def personalize(
    algorithm: Algorithm,
    task: Task,
    params: Params,
    client_data: tuple[np.ndarray, np.ndarray],
    scoring: Scoring,
    *,
    personal: Personal | None = None,
    shared: Shared | None = None,
    id: int = 0,
    key: Array,
) -> Params:
    """Personalize the shared model for one client with its own (x, y), whether it took part in training or not.

    The scoring's `model` is `"adapted"` or `"recomputed"`; its `clients` and scored data are ignored. A newcomer has no
    `personal` state and gets the initial one. `shared` is the state that the server broadcasts with the model
    (`result.shared`). Batches depend on the key and the client's `id`, as in `evaluate`.
    """
    if not scoring.can_adapt or scoring.adapt_on == "test":
        raise ValueError(
            "`personalize` needs a scoring of an 'adapted' or 'recomputed' model with training data, got "
            f"{scoring.describe(algorithm.divided)}"
        )
    alone = Federation.from_clients([client_data], ids=[id])
    check_model(task, alone, params)
    padded = 1 << (len(alone.x) - 1).bit_length()  # rows: clients of similar sizes share a program
    data, objective = alone.train_of(np.zeros(1, int), padded, 1), algorithm.divided
    if personal is None:
        _require_trained_part(algorithm, replace(scoring, clients="held_out"))
    own = objective.init_personal(params) if personal is None else personal
    check_scoring(algorithm, params, own, scoring)
    common = objective.init_shared(params) if shared is None else shared
    if shared is None and jax.tree.leaves(common) and scoring.model == "recomputed":
        raise ValueError(
            f"{algorithm.objective} needs the state broadcast with the model. Give `shared=result.shared`."
        )
    return personalize_one(optimized(task), algorithm, scoring, data, typed_key(key), params, common, own)


@partial(jax.jit, static_argnames=("task",))
def personalize_one(
    task: Task,
    algorithm: Algorithm,
    scoring: Scoring,
    data: ClientData,
    key: Array,
    params: Params,
    shared: Shared,
    personal: Personal,
) -> Params:
    """Personalize the shared model for the only client of `data`."""
    steps = jnp.arange(scoring.num_steps)
    drawn = _draw(scoring.batch_size, _client(data, jnp.int32(0)), key, steps) if scoring.adapts else ()
    return _adapted(algorithm, task, scoring, data, drawn, params, shared, personal)


def _first_client(snapshot: Snapshot) -> tuple[Params, Personal]:
    """Return the shared model and the first client's personal state, for the first seed."""
    seed = (0,) * snapshot.has_seeds
    params = jax.tree.map(lambda leaf: leaf[seed], snapshot.params)
    one = snapshot.personal_of(np.zeros((*np.shape(snapshot.num_events), 1), int))
    return params, jax.tree.map(lambda leaf: leaf[(*seed, 0)], one)


def check_scoring(algorithm: Algorithm, params: Params, personal: Personal, scoring: Scoring) -> None:
    """Raise an error if the algorithm has no such model."""
    sharing = algorithm.sharing
    if scoring.model == "global" and sharing.personal:
        raise ValueError(
            f"{_listed(sharing)} is personal, so the shared part alone is not a complete model. Score a 'personal' or "
            "'adapted' model, or a 'recomputed' one for held-out clients."
        )
    _require_trained_part(algorithm, scoring)
    kept = jax.eval_shape(algorithm.divided.models, params, personal)
    names = {*COMPUTED, *kept}
    if scoring.model not in names:
        raise ValueError(f"{algorithm.objective} has no {scoring.model!r} model. Score one of {sorted(names)}.")
    require_patterns(scoring.tunes, names_of(params), "tunes")


def _require_trained_part(algorithm: Algorithm, scoring: Scoring) -> None:
    """Raise an error if a newcomer, or a tuned part, would be scored without any training."""
    sharing = algorithm.sharing
    how = "recomputed" if sharing.personal else "adapted"
    trains = (scoring.model == how and scoring.num_steps > 0) or (scoring.model == "localized" and sharing.personal)
    if sharing.is_completed_by_clients and scoring.clients == "held_out" and not trains:
        raise ValueError(
            f"A newcomer's {_listed(sharing)} is at its initial value and must be trained first. Score models that are "
            f"{how!r} with at least one step."
        )
    if sharing.tuned and scoring.model == "recomputed":
        raise ValueError(f"A 'recomputed' model has {_listed(sharing)} at its initial value. Score an 'adapted' one.")


def _listed(sharing: Sharing) -> str:
    return ", ".join(sharing.personal or sharing.tuned)


def is_common(algorithm: Algorithm, scoring: Scoring) -> bool:
    """Return True if a scoring needs only the shared model, without state of a client or an algorithm."""
    return scoring.is_stateless and not algorithm.sharing.divides


Finish = Callable[[_ScoringProgram, Scoring, ClientData, ClientData, Scalar, Params], Any]


@partial(jax.jit, static_argnames=("finish", "program"))
def _of_clients(
    finish: Finish,
    program: _ScoringProgram,
    algorithm: Algorithm | None,
    scoring: Scoring,
    train: ClientData,
    test: ClientData,
    run: _ScoredRun,
    positions: Array,
    drawn: tuple,
) -> Any:
    """Apply `finish` to each client's model: `_metrics_of` or `_itself`."""

    def one(run: _ScoredRun, client: tuple) -> Any:
        model = _client_model(program, algorithm, scoring, train, test, run, *client)
        return finish(program, scoring, train, test, client[0], model)

    def all_clients(run: _ScoredRun, positions: Array, drawn: tuple) -> Any:
        clients = (positions, run.personal, run.visits, drawn)
        return jax.lax.map(partial(one, run), clients, batch_size=_CHUNK)

    return (jax.vmap(all_clients) if program.has_seeds else all_clients)(run, positions, drawn)


def _metrics_of(
    program: _ScoringProgram,
    scoring: Scoring,
    train: ClientData,
    test: ClientData,
    position: Scalar,
    model: Params,
) -> Metrics:
    found: Metrics = {}
    if scoring.score_on != "training":
        found |= _metrics(program.task, test, _client(test, position), model, program.max_test)
    if scoring.score_on != "test":
        on_train = _metrics(program.task, train, _client(train, position), model, program.max_train)
        found |= {f"train_{name}": values for name, values in on_train.items()}
    return found


def _itself(
    program: _ScoringProgram,
    scoring: Scoring,
    train: ClientData,
    test: ClientData,
    position: Scalar,
    model: Params,
) -> Params:
    return model


def _client_model(
    program: _ScoringProgram,
    algorithm: Algorithm | None,
    scoring: Scoring,
    train: ClientData,
    test: ClientData,
    run: _ScoredRun,
    position: Scalar,
    personal: Personal,
    visits: Any,
    drawn: tuple,
) -> Params:
    """Compute the model of one client that a scoring requests."""
    if scoring.model == "global":
        return run.params
    if scoring.can_adapt:
        data = test if scoring.adapt_on == "test" else train
        return _adapted(algorithm, program.task, scoring, data, drawn, run.params, run.shared, personal)
    assert algorithm is not None  # only the models above work without one
    if scoring.model == "localized":
        where = _client(train, position)._replace(update=visits)
        visit = partial(local_update, algorithm.objective, algorithm.local, program.task)
        sharing = algorithm.sharing
        begin = Start(sharing.shared(run.params), run.shared, personal, run.version, sharing.base(run.params))
        done = visit(train, program.max_train, where, begin, run_stream(run.key))
        return join(done.end, split(done.personal)[0], run.params)
    return algorithm.divided.models(run.params, personal)[scoring.model]


def _client(data: ClientData, position: Scalar) -> ClientRows:
    return ClientRows(data.start[position], data.num_samples[position], data.ids[position], jnp.zeros((), jnp.int32))


def _adapted(
    algorithm: Algorithm | None,
    task: Task,
    scoring: Scoring,
    data: ClientData,
    drawn: tuple,
    params: Params,
    shared: Shared,
    personal: Personal,
) -> Params:
    """Adapt the shared model to a client's data, by gradient steps or as the objective defines."""
    whole = params if algorithm is None else algorithm.divided.whole(params, personal)
    if not scoring.adapts:
        return whole
    batches: Batch = gather(data, *drawn)
    statistics = (task.statistics,) if _updates_statistics(task, params, batches) else ()
    if scoring.model == "adapted" or algorithm is None:
        moving = whole if algorithm is None else algorithm.sharing.adapted(whole)
        moving = only(whole, scoring.tunes) if scoring.tunes else moving
        of_moving = lambda part, batch: task.loss(join(part, whole), batch)
        parts = (statistics_at(one, whole) for one in statistics)
        return join(descend(of_moving, moving, batches, scoring.lr, *parts)[0], whole)
    return algorithm.divided.personalize(task.loss, params, personal, shared, batches, scoring.lr, *statistics)


def _updates_statistics(task: Task, params: Params, batches: Batch) -> bool:
    """Return True if there are batches and the model has statistics."""
    if task.statistics is None or not len(batches.weight):
        return False
    return statistics_of(task, params, jax.tree.map(lambda leaf: leaf[0], batches)) is not None


def _metrics(task: Task, data: ClientData, client: ClientRows, params: Params, max_count: int) -> Metrics:
    """Average each metric over all the client's rows, in slices."""

    def part(begin: Array) -> tuple[Metrics, Array]:
        places = begin + jnp.arange(_CHUNK, dtype=client.start.dtype)
        weight = (places < client.num_samples).astype(float)
        batch = gather(data, client.start + jnp.minimum(places, client.num_samples - 1), weight, jax.random.key(0))
        return task.metrics(params, batch), weight.sum()

    found, counts = jax.lax.map(part, jnp.arange(0, max_count, _CHUNK, dtype=jnp.int32))

    def total(values: Array) -> Array:
        along = counts.reshape(counts.shape + (1,) * (values.ndim - 1))
        # A slice of only padding may have nonfinite metrics.
        return jnp.where(along > 0, values * along, 0).sum(axis=0)

    return {name: total(values) / counts.sum() for name, values in found.items()}
