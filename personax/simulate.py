"""A whole federation as one compiled program: clients vmapped, events looped over, seeds vmapped."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.checks import check_model, check_run
from personax.federation import ClientData, Federation
from personax.iterates import Path, Tracker
from personax.keys import BATCHES, INIT, ITERATES, run_stream, typed_key
from personax.local import Update, local_update
from personax.results import NO_EVENT, STAGES, Faults, NonFiniteUpdate, Result, Snapshot, State, repeat
from personax.sampling import Client
from personax.schedules import Schedule
from personax.server import ServerState, Upload
from personax.tasks import as_inputs
from personax.typing import Array, Model, Params, Personal, PyTree, Task
from personax.values import require_count, require_one_of
from personax.waves import Plan, Waves, plan_arrivals, plan_rounds, stack


@dataclass(frozen=True)
class _Program:
    """What is compiled in, beside the shapes."""

    task: Task
    num_clients: int
    max_count: int
    cohort_chunk: int | None
    has_seeds: bool
    sweeps: bool  # each seed has an algorithm of its own


def simulate(
    algorithm: Algorithm | Sequence[Algorithm],
    task: Task,
    federation: Federation,
    schedule: Schedule | Iterable[Schedule],
    *,
    key: Array,
    params: Params | None = None,
    every: int | None = None,
    observe: Callable[[Snapshot], Any] | None = None,
    tracker: Tracker | None = None,
    cohort_chunk: int | None = None,
    wave_width: int | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    start: Snapshot | None = None,
) -> Result:
    """Run an algorithm on a federation along a schedule.

    An array of keys runs that many seeds together, on one schedule or on a sequence of one for each; a sequence of
    algorithms, one for each key, is a sweep over their numbers. `params` is the initial model of all seeds; by default
    the task's model is initialised from each key. `observe(snapshot)` is called before the first event, then every
    `every` rounds (or, where there are none, events: at the next wave) and at the end; `start` is a snapshot of the
    same run to continue from. `tracker` follows models between the server's. At most `cohort_chunk` clients train at
    once, and asynchronous waves hold at most `wave_width` (by default what costs least). A client whose update is not
    finite raises `NonFiniteUpdate`, or is skipped and counted.
    """
    key = typed_key(key)
    has_seeds = key.ndim > 0
    num_seeds = len(key) if has_seeds else 1
    schedules = [schedule] * num_seeds if isinstance(schedule, Schedule) else list(schedule)
    sweeps = not isinstance(algorithm, Algorithm)
    algorithm = algorithm if isinstance(algorithm, Algorithm) else _swept(algorithm, key)
    check_run(algorithm, federation, schedules, num_seeds, tracker)
    require_count("every", every)
    require_count("cohort_chunk", cohort_chunk)
    require_count("wave_width", wave_width)
    require_one_of("on_nonfinite", on_nonfinite, ("raise", "skip"))
    largest = int(federation.counts.max())
    program = _Program(task, federation.num_clients, largest, cohort_chunk, has_seeds, sweeps)
    check_model(task, federation, params)
    if federation.newcomers is not None:
        check_model(task, federation.newcomers, params)
    plan = _plan(algorithm, schedules, wave_width)
    seedless = (lambda leaf: leaf) if has_seeds else (lambda leaf: leaf[0])
    waves = jax.tree.map(lambda leaf: jnp.asarray(seedless(leaf)), plan.waves)
    if start is None:
        state = _first_state(program, algorithm, federation, key, params, tracker, plan)
    else:
        _check_start(start, plan, seedless)
        state = start.state
    wave, skips = 0 if start is None else start.wave, on_nonfinite == "skip"
    snap = partial(_snapshot, plan, schedules, federation.ids, seedless)
    history = [observe(snap(state, wave))] if observe and start is None else []
    for stop in _stops(plan, schedules[0], wave, every if observe else None):
        state = _advance(program, algorithm, federation.train, key, waves, tracker, state, wave, stop, skips)
        if not skips:
            _raise_fault(state.faults, federation)
        wave = stop
        if observe:
            history.append(observe(snap(state, wave)))
    up, down = _bytes(algorithm, state.server, has_seeds)
    sent = seedless(np.stack([s.aggregated for s in schedules]) * up)
    return Result(snap(state, wave), history, sent, np.full_like(sent, down))


def state_shapes(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    schedule: Schedule | Iterable[Schedule],
    *,
    key: Array,
    tracker: Tracker | None = None,
) -> State:
    """The shapes and types of a run's state, without computing anything: what a checkpoint is read into."""
    key = typed_key(key)
    has_seeds = key.ndim > 0
    schedules = [schedule] if isinstance(schedule, Schedule) else list(schedule)
    program = _Program(task, federation.num_clients, int(federation.counts.max()), None, has_seeds, False)
    plan = _plan(algorithm, schedules, None)
    return jax.eval_shape(lambda key: _first_state(program, algorithm, federation, key, None, tracker, plan), key)


@partial(jax.jit, static_argnames=("program",))
def _advance(
    program: _Program,
    algorithm: Algorithm,
    data: ClientData,
    key: Array,
    waves: Waves,
    tracker: Tracker | None,
    state: State,
    begin: int,
    stop: int,
    skips: bool,
) -> State:
    """Waves `begin` to `stop`; ends early at an update that is not finite, unless those are skipped."""
    step = partial(_wave, program, data, tracker)
    streams_of = lambda key: (run_stream(key, BATCHES), run_stream(key, ITERATES))
    streams = jax.vmap(streams_of)(key) if program.has_seeds else streams_of(key)
    if program.has_seeds:
        at = lambda index: jax.tree.map(lambda leaf: leaf[:, index], waves)
        step = jax.vmap(step, in_axes=(0 if program.sweeps else None, 0, 0, 0))
    else:
        at = lambda index: jax.tree.map(lambda leaf: leaf[index], waves)

    def more(carry: tuple[Array, State]) -> Array:
        healthy = jnp.all(carry[1].faults.num == 0) | skips
        return (carry[0] < stop) & healthy

    def next_wave(carry: tuple[Array, State]) -> tuple[Array, State]:
        return carry[0] + 1, step(algorithm, streams, at(carry[0]), carry[1])

    return jax.lax.while_loop(more, next_wave, (jnp.asarray(begin), state))[1]


def _wave(
    program: _Program,
    data: ClientData,
    tracker: Tracker | None,
    algorithm: Algorithm,
    streams: tuple[Array, Array],
    wave: Waves,
    state: State,
) -> State:
    """Train the members of one wave, then let the server receive them."""
    synchronous = algorithm.server.buffer_size is None
    now = (state.server.params, state.server.shared, state.server.version)
    anchors = now if synchronous else jax.tree.map(lambda leaf: leaf[wave.read], state.slots)
    updates = _train(program, algorithm, data, tracker, streams[0], wave, state.personal, anchors)
    finite, stage = _finite(updates)
    usable = wave.valid & finite
    target = jnp.where(usable, wave.client, program.num_clients)
    personal = jax.tree.map(lambda a, new: a.at[target].set(new, mode="drop"), state.personal, updates.personal)
    version = jnp.broadcast_to(anchors[2], wave.client.shape)
    weight = data.num_samples[wave.client].astype(float)
    uploads = Upload(updates.delta, updates.end, updates.extra, version, weight, usable & wave.aggregated)
    tracked = state.tracked
    if tracker is not None:
        iterates, memories = updates.path
        path = Path(now[0], iterates, memories, target, usable, state.server.version, streams[1])
        tracked = tracker.update(tracked, path, state.personal)
    server, slots = _receive(program, algorithm, state, uploads, wave)
    return State(server, personal, slots, tracked, _note(state.faults, wave, finite, stage))


def _train(
    program: _Program,
    algorithm: Algorithm,
    data: ClientData,
    tracker: Tracker | None,
    stream: Array,
    wave: Waves,
    personal: Personal,
    anchors: PyTree,
) -> Update:
    """The visits of a wave's members, each a function of its own client alone."""
    record = (lambda iterate, memory: ()) if tracker is None else (lambda iterate, memory: (iterate, memory))
    synchronous = algorithm.server.buffer_size is None

    def visit(client: Array, update: Array, anchor: PyTree) -> Update:
        where = Client(data.start[client], data.num_samples[client], data.ids[client], update)
        own = jax.tree.map(lambda leaf: leaf[client], personal)
        params, shared, version = anchors if synchronous else anchor
        return local_update(
            algorithm.objective,
            algorithm.local,
            program.task.loss,
            data,
            program.max_count,
            where,
            params,
            shared,
            own,
            version,
            stream,
            record,
        )

    members = (wave.client, wave.update, () if synchronous else anchors)
    if program.cohort_chunk is None:
        return jax.vmap(visit)(*members)
    return jax.lax.map(lambda member: visit(*member), members, batch_size=program.cohort_chunk)


def _receive(
    program: _Program, algorithm: Algorithm, state: State, uploads: Upload, wave: Waves
) -> tuple[ServerState, PyTree]:
    """Hand a wave's uploads to the server: at once at the end of a round, or one after another."""
    server, objective = algorithm.server, algorithm.objective
    if server.buffer_size is None:
        received = server.receive(state.server, uploads)
        return server.step(received, objective, program.num_clients), state.slots

    def arrive(now: ServerState, upload: Upload) -> tuple[ServerState, PyTree]:
        one = jax.tree.map(lambda leaf: leaf[None], upload)
        now = server.step_if_full(server.receive(now, one), objective, program.num_clients)
        return now, (now.params, now.shared, now.version)

    last, models = jax.lax.scan(arrive, state.server, uploads)
    return last, jax.tree.map(lambda slot, new: slot.at[wave.save].set(new, mode="drop"), state.slots, models)


def _finite(updates: Update) -> tuple[Array, Array]:
    """Whether each update is finite, and the first stage (of `STAGES`) that is not."""
    num = len(jax.tree.leaves(updates.delta)[0])

    def all_finite(tree: PyTree) -> Array:
        # A sum is finite when its terms are, and several times faster than looking at each.
        sums = [leaf.reshape(num, -1).sum(axis=1, dtype=float) for leaf in jax.tree.leaves(tree)]
        return jnp.isfinite(sum(sums, jnp.zeros(num)))

    good = jnp.stack([all_finite(tree) for tree in (updates.delta, updates.personal, updates.extra)])
    return good.all(axis=0), jnp.argmin(good, axis=0)


def _note(faults: Faults, wave: Waves, finite: Array, stage: Array) -> Faults:
    bad = wave.valid & ~finite
    events = jnp.where(bad, wave.event, NO_EVENT)
    first = jnp.argmin(events)
    earlier = events[first] < faults.event
    pick = lambda new, old: jnp.where(earlier, new[first], old)
    return Faults(
        faults.num + bad.sum(dtype=jnp.int32),
        pick(events.astype(jnp.int32), faults.event),
        pick(wave.client.astype(jnp.int32), faults.client),
        pick(stage.astype(jnp.int32), faults.stage),
    )


def _first_state(
    program: _Program,
    algorithm: Algorithm,
    federation: Federation,
    key: Array,
    params: Params | None,
    tracker: Tracker | None,
    plan: Plan,
) -> State:
    """The state before the first event, from the given model or the task's own."""
    data = federation.train
    if params is None:
        first = initial_params(program.task, federation, key=key)
    else:
        given = jax.tree.map(jnp.asarray, params)
        first = repeat(given, len(key)) if program.has_seeds else given
    wave = jax.tree.map(lambda leaf: leaf[0, 0], plan.waves)
    return _initialise(program, algorithm, data, first, tracker, wave, plan.num_slots)


def initial_params(task: Task, federation: Federation, *, key: Array) -> Params:
    """The model that a run with this key starts from; with several keys along a leading axis."""
    keys = typed_key(key)
    return first_params(task.model, federation.train.x[:1], keys, keys.ndim > 0)


@partial(jax.jit, static_argnames=("model", "has_seeds"))
def first_params(model: Model, x: Array, key: Array, has_seeds: bool = False) -> Params:
    """The task's own initial model, of which `x` tells the shape; a program of its own, which all algorithms share."""
    init = lambda key: model.init(run_stream(key, INIT), as_inputs(x))
    return jax.vmap(init)(key) if has_seeds else init(key)


@partial(jax.jit, static_argnames=("program", "num_slots"))
def _initialise(
    program: _Program,
    algorithm: Algorithm,
    data: ClientData,
    params: Params,
    tracker: Tracker | None,
    wave: Waves,
    num_slots: int,
) -> State:
    """The state before the first event, for each seed; `wave` is one of the run's, for the shapes of its uploads."""

    def one(algorithm: Algorithm, params: Params) -> State:
        objective = algorithm.objective
        personal = repeat(objective.init_personal(params), program.num_clients)
        anchor = (params, objective.init_shared(params), jnp.zeros((), jnp.int32))
        anchors = anchor if algorithm.server.buffer_size is None else repeat(anchor, len(wave.client))
        train = partial(_train, program, algorithm, data, None, jax.random.key(0), wave)
        extra_of_one = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        extra = jax.tree.map(extra_of_one, jax.eval_shape(train, personal, anchors).extra)
        server = algorithm.server.init(objective, params, extra)
        slots = repeat((server.params, server.shared, server.version), num_slots)
        tracked = () if tracker is None else tracker.init(params, personal)
        none = jnp.full((), NO_EVENT, jnp.int32)
        return State(server, personal, slots, tracked, Faults(jnp.zeros((), jnp.int32), none, none, none))

    of_seeds = jax.vmap(one, in_axes=(0 if program.sweeps else None, 0))
    return (of_seeds if program.has_seeds else one)(algorithm, params)


def _swept(algorithms: Sequence[Algorithm], key: Array) -> Algorithm:
    """Several algorithms as one, whose numbers have a leading axis."""
    if len(algorithms) != key.size or key.ndim != 1:
        raise ValueError(f"Give one algorithm, or one for each key, got {len(algorithms)} for keys of {key.shape}.")
    others = {jax.tree.structure(one): one for one in algorithms}
    if len(others) > 1:
        raise ValueError(
            f"Algorithms of a sweep must differ in numbers alone, got {', '.join(map(str, others.values()))}."
        )
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *algorithms)


def _plan(algorithm: Algorithm, schedules: list[Schedule], wave_width: int | None) -> Plan:
    if algorithm.server.buffer_size is None:
        plans = [plan_rounds(s) for s in schedules]
    else:
        # What a wave costs beside its members: many small kernels on an accelerator, next to nothing on a CPU.
        overhead = 2.0 if jax.default_backend() == "cpu" else 64.0
        first = plan_arrivals(schedules[0], wave_width, overhead)
        width = first.waves.client.shape[1]
        plans = [first, *(plan_arrivals(s, width) for s in schedules[1:])]
    return stack(plans, schedules[0].num_clients)


def _stops(plan: Plan, schedule: Schedule, wave: int, every: int | None) -> list[int]:
    """The waves after which a run pauses: every `every` rounds, or events where there are none, and the end."""
    if every is None:
        return [plan.num_waves]
    per_wave = schedule.round_ends[plan.waves.event[0]] if schedule.has_rounds else np.ones_like(plan.waves.valid[0])
    done = np.cumsum((per_wave & plan.waves.valid[0]).sum(axis=1))[: plan.num_waves]
    marks = np.r_[np.arange(every, done[-1], every), done[-1]]
    stops = np.unique(np.searchsorted(done, marks) + 1)
    stops[-1] = plan.num_waves
    return [int(stop) for stop in stops if stop > wave]


def _check_start(start: Snapshot, plan: Plan, seedless: Callable[[np.ndarray], Any]) -> None:
    num_events = seedless(plan.waves.valid[:, : start.wave].sum(axis=(1, 2)))
    if np.any(num_events != start.num_events):
        raise ValueError(
            f"`start` has seen {start.num_events} events, which is not where this run pauses ({num_events}). "
            "Continue with the schedule, the seeds and the `wave_width` that it began with."
        )


def _snapshot(
    plan: Plan,
    schedules: list[Schedule],
    ids: np.ndarray,
    seedless: Callable[[np.ndarray], Any],
    state: State,
    wave: int,
) -> Snapshot:
    num_events = plan.waves.valid[:, :wave].sum(axis=(1, 2))
    times = [s.time[:num].max(initial=0.0) for s, num in zip(schedules, num_events, strict=True)]
    return Snapshot(state, wave, seedless(num_events), seedless(np.asarray(times)), tuple(schedules), ids)


def _raise_fault(faults: Faults, federation: Federation) -> None:
    event, client, stage = (np.atleast_1d(leaf) for leaf in faults[1:])
    seed = int(np.argmin(event))
    if event[seed] == NO_EVENT:
        return
    of_seed = f" of seed {seed}" if len(event) > 1 else ""
    raise NonFiniteUpdate(
        f"The update of {federation.names[client[seed]]} at event {event[seed]}{of_seed} is not finite: "
        f"{STAGES[stage[seed]]}. Use smaller step sizes or `clip_norm`, or skip such updates with on_nonfinite='skip'."
    )


def _bytes(algorithm: Algorithm, server: ServerState, has_seeds: bool) -> tuple[int, int]:
    """Bytes that one event moves up and down."""
    if not algorithm.objective.federated:
        return 0, 0
    size = lambda tree: sum(leaf[:1].nbytes if has_seeds else leaf.nbytes for leaf in jax.tree.leaves(tree))
    return size((server.pending, server.pending_extra)), size((server.params, server.shared))
