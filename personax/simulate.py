"""A whole federation as one run: an algorithm, along a schedule, from the first event to the last."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from personax.algorithms import Algorithm
from personax.checks import check_model, check_run
from personax.engine import Program, Run, initial_params, initialise, replicate
from personax.federation import Federation
from personax.iterates import Tracker
from personax.keys import typed_key
from personax.operations import operations_of
from personax.precision import Precision, products_in, require_precision
from personax.results import NO_EVENT, STAGES, Faults, NonFiniteUpdate, Result, Snapshot, State, repeat
from personax.schedules import Schedule
from personax.server import ServerState
from personax.store import Kept, Store, kept_shapes
from personax.stream import Stream, Streamed, block_sizes
from personax.typing import Array, Batch, Params, Task
from personax.values import require_count, require_one_of
from personax.waves import Plan, best_width, plan_arrivals, plan_rounds, stack, widen

CPU_OVERHEAD = 2.0  # of a wave, in members
CPU_WIDTH = 16  # members of a wave; measured: from 24 on slower, whatever the model, because caches overflow
LAUNCH_OPERATIONS = 2.4e8  # what an H200 computes, in such small pieces, while the kernels of one gradient are launched


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
    stream: Stream | None = None,
    devices: Sequence[Any] | None = None,
    precision: Precision = "default",
) -> Result:
    """Run an algorithm on a federation along a schedule.

    An array of keys runs that many seeds together, on one schedule or on a sequence of one for each; a sequence of
    algorithms, one for each key, is a sweep over their numbers. `params` is the initial model of all seeds; by default
    the task's model is initialised from each key. `observe(snapshot)` is called before the first event, then every
    `every` rounds (or, where there are none, events: at the next wave) and at the end; `start` is a snapshot of the
    same run to continue from. `tracker` follows models between the server's. At most `cohort_chunk` clients train at
    once (by default all, on a CPU large models one by one), and asynchronous waves hold at most `wave_width` (by
    default what costs least). A client whose update is not finite raises `NonFiniteUpdate`, or is skipped and counted.

    With a `stream`, or a federation that is memory-mapped, data and personal states stay on the host and only those of
    the clients of the next waves are on the device; the numbers are the same. `devices` share the members of each
    wave; `cohort_chunk` then counts on each of them. (docs/scale.md)

    `precision` is that of the clients' matrix products; "bf16" and "tf32" add up in float32.
    """
    key = typed_key(key)
    has_seeds = key.ndim > 0
    num_seeds = len(key) if has_seeds else 1
    schedules = [schedule] * num_seeds if isinstance(schedule, Schedule) else list(schedule)
    stream = Stream() if stream is None and federation.is_mapped else stream
    sweeps = not isinstance(algorithm, Algorithm)
    algorithm = algorithm if isinstance(algorithm, Algorithm) else _swept(algorithm, key)
    check_run(algorithm, federation, schedules, num_seeds, tracker, streams=stream is not None)
    _check_options(every, cohort_chunk, wave_width, on_nonfinite, devices)
    require_precision(precision)
    for part in (federation, federation.newcomers):
        if part is not None:
            check_model(task, part, params)
    mesh = None if devices is None else Mesh(np.asarray(devices), ("clients",))
    largest, skips = int(federation.counts.max()), on_nonfinite == "skip"
    program = Program(task, federation.num_clients, largest, cohort_chunk, has_seeds, sweeps, mesh)
    overhead = _overhead(algorithm, task, federation, num_seeds)
    ahead = tracker is None and stream is None
    plan = _plan(algorithm, schedules, wave_width, overhead, ahead, 1 if devices is None else len(devices))
    seedless = (lambda leaf: leaf) if has_seeds else (lambda leaf: leaf[0])
    run = Run(program, algorithm, federation, key, plan, tracker, skips)
    if start is None:
        wave, state = 0, _first_state(run, params, stream is not None)
    else:
        _check_start(start, plan, seedless, stream is not None)
        wave, state = start.wave, start.state
    stops = _stops(plan, schedules[0], wave, every if observe else None)
    if stream is None:
        go_on, shown = _resident(run, seedless), lambda state: state
    else:
        streamed = _streamed(run, stream, state.personal, stops, wave)
        go_on, shown, state = streamed.advance, streamed.shown, state._replace(personal=())
    snap = lambda state, wave: _snapshot(plan, schedules, federation.ids, seedless, shown(state), wave)
    history = [observe(snap(state, wave))] if observe and start is None else []
    for stop in stops:
        with products_in(precision):
            state = go_on(state, wave, stop)
        if not skips:
            _raise_fault(state.faults, schedules, federation)
        wave = stop
        if observe:
            history.append(observe(snap(state, wave)))
    up, down = _bytes(algorithm, state.server, has_seeds)
    sent = seedless(np.stack([s.aggregated for s in schedules]) * up)
    return Result(snap(state, wave), history, sent, np.full_like(sent, down))


def _check_options(
    every: int | None,
    cohort_chunk: int | None,
    wave_width: int | None,
    on_nonfinite: str,
    devices: Sequence[Any] | None,
) -> None:
    require_count("every", every)
    require_count("cohort_chunk", cohort_chunk)
    require_count("wave_width", wave_width)
    require_one_of("on_nonfinite", on_nonfinite, ("raise", "skip"))
    if devices is not None and not len(devices):
        raise ValueError("`devices` must have at least one device, got none. Give `jax.devices()`, or leave it out.")


def _resident(run: Run, seedless: Callable[[np.ndarray], Any]) -> Callable[[State, int, int], State]:
    """A run with all data and all personal states on the device."""
    program, mesh = run.program, run.program.mesh
    waves = jax.device_put(jax.tree.map(seedless, run.plan.waves))
    data, key, waves = replicate(mesh, (run.federation.train, run.key, waves))
    return lambda state, begin, stop: run.advance(
        program, run.algorithm, data, key, waves, run.tracker, replicate(mesh, state), begin, stop, run.skips
    )


def _streamed(run: Run, stream: Stream, kept: Kept, stops: list[int], wave: int) -> Streamed:
    """A run with its data and its personal states on the host."""
    store = Store(kept, stream.memory, stream.folder)
    return Streamed(run, store, block_sizes(run.plan, run.federation, kept.layout.num_bytes, stops, wave))


def state_shapes(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    schedule: Schedule | Iterable[Schedule],
    *,
    key: Array,
    tracker: Tracker | None = None,
    num_events: int | Sequence[int] = 0,
) -> State:
    """The shapes and types of a run's state, without computing anything: what a checkpoint is read into.

    `num_events` is how far it has come (with several seeds, each): a run from the host has states of whom it visited.
    """
    key = typed_key(key)
    has_seeds, streams = key.ndim > 0, federation.is_mapped
    schedules = [schedule] if isinstance(schedule, Schedule) else list(schedule)
    program = Program(task, federation.num_clients, int(federation.counts.max()), None, has_seeds)
    overhead, ahead = _overhead(algorithm, task, federation, len(schedules)), tracker is None and not streams
    plan = _plan(algorithm, schedules, None, overhead, ahead, 1)
    run = Run(program, algorithm, federation, key, plan, tracker, skips=False)
    num_personal = 1 if streams else federation.num_clients
    shapes = jax.eval_shape(lambda key: _initial_state(run._replace(key=key), None, num_personal), key)
    if not streams:
        return shapes
    num = sum(len(np.unique(s.client[:n])) for s, n in zip(schedules, np.atleast_1d(num_events), strict=True))
    return shapes._replace(personal=kept_shapes(federation.num_clients, has_seeds, shapes.personal, num))


def _first_state(run: Run, params: Params | None, streams: bool) -> State:
    """The state before the first event; in a streamed run nobody has been visited."""
    program = run.program
    if not streams:
        return _initial_state(run, params, program.num_clients)
    state = _initial_state(run, params, 1)
    default = jax.tree.map(lambda leaf: np.asarray(leaf).squeeze(int(program.has_seeds)), state.personal)
    return state._replace(personal=Kept(program.num_clients, program.has_seeds, default, {}))


def _initial_state(run: Run, params: Params | None, num_personal: int) -> State:
    """From the given model or the task's own, with the personal states of so many clients."""
    if params is None:
        first = initial_params(run.program.task, run.federation, key=run.key)
    else:
        given = jax.tree.map(jnp.asarray, params)
        first = repeat(given, len(run.key)) if run.program.has_seeds else given
    return initialise(
        run.program, run.algorithm, first, run.tracker, num_personal, run.plan.num_slots, run.plan.num_places
    )


def _swept(algorithms: Sequence[Algorithm], key: Array) -> Algorithm:
    """Several algorithms as one, whose numbers have a leading axis."""
    if len(algorithms) != key.size or key.ndim != 1:
        raise ValueError(f"Give one algorithm, or one for each key, got {len(algorithms)} for keys of {key.shape}.")
    others = {jax.tree.structure(one): one for one in algorithms}
    if len(others) > 1:
        got = ", ".join(map(str, others.values()))
        raise ValueError(f"Algorithms of a sweep must differ in numbers alone, got {got}. Run them one by one.")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *algorithms)


def _overhead(algorithm: Algorithm, task: Task, federation: Federation, num_seeds: int) -> float:
    """What a wave costs beside its members, in members: next to nothing on a CPU, many small kernels elsewhere."""
    if jax.default_backend() == "cpu" or algorithm.server.buffer_size is None:
        return CPU_OVERHEAD
    size = algorithm.local.size_of("outer")
    x, y = (jnp.repeat(leaf, size, axis=0) for leaf in federation.first_sample)
    batch = Batch(x, y, jnp.ones(size), jax.random.key(0))
    params = jax.eval_shape(lambda key: initial_params(task, federation, key=key), jax.random.key(0))
    num_operations = operations_of(jax.make_jaxpr(jax.grad(task.loss))(params, batch).jaxpr)
    return LAUNCH_OPERATIONS / (num_seeds * max(num_operations, 1))


def _plan(
    algorithm: Algorithm,
    schedules: list[Schedule],
    wave_width: int | None,
    overhead: float,
    ahead: bool,
    num_devices: int,
) -> Plan:
    """The waves of all seeds. A tracker, or the blocks of a streamed run, want all that trains in a wave to arrive."""
    if algorithm.server.buffer_size is None:
        plans = [plan_rounds(s) for s in schedules]
    else:
        most = CPU_WIDTH if jax.default_backend() == "cpu" else np.inf
        width = wave_width or best_width(schedules[0], overhead, ahead, most)
        plans = [plan_arrivals(s, width, ahead) for s in schedules]
    return widen(stack(plans, schedules[0].num_clients), schedules[0].num_clients, num_devices)


def _stops(plan: Plan, schedule: Schedule, wave: int, every: int | None) -> list[int]:
    """The waves after which a run pauses: every `every` rounds, or events where there are none, and the end."""
    if every is None:
        return [plan.num_waves]
    counted = schedule.round_ends if schedule.has_rounds else np.ones(schedule.num_events, bool)
    done = np.r_[0, np.cumsum(counted)][plan.num_arrived[0, : plan.num_waves]]
    marks = np.r_[np.arange(every, done[-1], every), done[-1]]
    stops = np.unique(np.searchsorted(done, marks) + 1)
    stops[-1] = plan.num_waves
    return [int(stop) for stop in stops if stop > wave]


def _check_start(start: Snapshot, plan: Plan, seedless: Callable[[np.ndarray], Any], streams: bool) -> None:
    if isinstance(start.state.personal, Kept) != streams:
        how = "with its clients' states on the " + ("device" if streams else "host")
        raise ValueError(f"`start` is a snapshot of a run {how}. Continue it in the same way: see `stream`.")
    num_events = seedless(_num_arrived(plan, start.wave))
    if np.any(num_events != start.num_events):
        raise ValueError(
            f"`start` has seen {start.num_events} events, which is not where this run pauses ({num_events}). "
            "Continue with the schedule, the seeds and the `wave_width` that it began with."
        )


def _num_arrived(plan: Plan, wave: int) -> np.ndarray:
    """How many events of each seed have arrived before a wave."""
    return plan.num_arrived[:, wave - 1] if wave else np.zeros(len(plan.num_arrived), int)


def _snapshot(
    plan: Plan,
    schedules: list[Schedule],
    ids: np.ndarray,
    seedless: Callable[[np.ndarray], Any],
    state: State,
    wave: int,
) -> Snapshot:
    num_events = _num_arrived(plan, wave)
    times = [s.time[:num].max(initial=0.0) for s, num in zip(schedules, num_events, strict=True)]
    return Snapshot(state, wave, seedless(num_events), seedless(np.asarray(times)), tuple(schedules), ids)


def _raise_fault(faults: Faults, schedules: list[Schedule], federation: Federation) -> None:
    event, stage = (np.atleast_1d(leaf) for leaf in faults[1:])
    seed = int(np.argmin(event))
    if event[seed] == NO_EVENT:
        return
    client = int(schedules[seed].client[event[seed]])
    of_seed = f" of seed {seed}" if len(event) > 1 else ""
    raise NonFiniteUpdate(
        f"The update of {federation.names[client]} at event {event[seed]}{of_seed} is not finite: "
        f"{STAGES[stage[seed]]}. Use smaller step sizes or `clip_norm`, or skip such updates with on_nonfinite='skip'."
    )


def _bytes(algorithm: Algorithm, server: ServerState, has_seeds: bool) -> tuple[int, int]:
    """Bytes that one event moves up and down."""
    if not algorithm.objective.federated:
        return 0, 0
    size = lambda tree: sum(leaf.nbytes // (len(leaf) if has_seeds else 1) for leaf in jax.tree.leaves(tree))
    return size((server.pending, server.pending_extra)), size((server.params, server.shared))
