"""Simulate a whole federation: an algorithm along a schedule, from the first event to the last."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from personax.algorithms import Algorithm
from personax.data.federation import Federation
from personax.fast.backends import wave_overhead
from personax.fast.backends import wave_width as largest_width
from personax.fast.flops import operations_of
from personax.fast.passes import optimized
from personax.fast.precision import Precision, products_in
from personax.keys import typed_key
from personax.schedules import Schedule
from personax.simulation.averages import Tracker
from personax.simulation.checks import check_model, check_run, check_statistics
from personax.simulation.engine import Procedure, Program, SimulationRun, initial_params, initialize, replicate
from personax.simulation.execution import Execution, Monitor
from personax.simulation.results import NonFiniteUpdate, Result, Snapshot, State, Unshared, repeat
from personax.simulation.speed import gradient_program
from personax.simulation.store import Kept, Store, kept_shapes
from personax.simulation.stream import Stream, Streamed, block_sizes
from personax.simulation.waves import WavePlan, best_width, plan_arrivals, plan_rounds, stack, widen
from personax.simulation.work import bytes_per_event
from personax.typing import Array, Params, Task


def simulate(
    algorithm: Algorithm | Sequence[Algorithm],
    task: Task,
    federation: Federation,
    schedule: Schedule | Iterable[Schedule],
    *,
    key: Array,
    params: Params | None = None,
    start: Snapshot | None = None,
    monitor: Monitor = Monitor(),
    execution: Execution = Execution(),
) -> Result:
    """Run an algorithm on a federation along a schedule.

    Args:
        algorithm: a recipe, or one for each key: a sweep over their numbers.
        task: the model and its loss.
        federation: the clients and their data.
        schedule: who reports when; one for all seeds, or one for each.
        key: one key, or an array of keys that runs that many seeds together.
        params: the initial model of all seeds; by default the task's model is initialized from each key.
        start: a snapshot of the same run to continue from.
        monitor: what is watched on the way, see `Monitor`.
        execution: how it is executed, see `Execution`.
    """
    for part in (federation, federation.newcomers):
        if part is not None:
            check_model(task, part, params)
    given = (algorithm, task, federation, schedule)
    planned = plan_run(*given, key=key, tracker=monitor.tracker, execution=execution)
    return run_plan(planned, params=params, start=start, monitor=monitor)


class PlannedRun(NamedTuple):
    """A run whose waves are planned: everything except where it starts and who watches it."""

    run: SimulationRun
    schedules: list[Schedule]
    stream: Stream | None
    precision: Precision

    def seedless(self, leaf: np.ndarray) -> Any:
        """Drop the axis of seeds if the run has a single key."""
        return leaf if self.run.program.has_seeds else leaf[0]

    def state_shapes(self, num_events: int | Sequence[int]) -> State:
        """Return the shapes and types of the state, into which a checkpoint is read, without computing anything.

        `num_events` is how far the run has come (with several seeds, each): a run that streams from the host has
        states of the clients that it visited.
        """
        run, streams = self.run, self.stream is not None
        num_personal = 1 if streams else run.program.num_clients
        shapes = jax.eval_shape(lambda key: _initial_state(run._replace(key=key), None, num_personal), run.key)
        if not streams:
            return shapes
        done = zip(self.schedules, np.atleast_1d(num_events), strict=True)
        num = sum(len(np.unique(schedule.client[:num])) for schedule, num in done)
        return shapes._replace(
            personal=kept_shapes(run.program.num_clients, run.program.has_seeds, shapes.personal, num)
        )

    def pauses(self, every: int) -> list[list[int]]:
        """Return how many events of each seed have arrived at each pause, before the first event and at the end."""
        plan = self.run.plan
        return [_num_arrived(plan, wave).tolist() for wave in (0, *_stops(plan, self.schedules[0], 0, every))]

    def shares(self, other: "PlannedRun", wave: int) -> bool:
        """Return whether the first `wave` waves of another run are those of this one, whose state is then the same."""
        mine, its = self.run.plan, other.run.plan
        same = lambda one, another: np.array_equal(one[:, :wave], another[:, :wave])
        sizes = (mine.num_slots, mine.num_places) == (its.num_slots, its.num_places)
        return sizes and wave <= mine.num_waves and all(map(same, mine.waves, its.waves))


def plan_run(
    algorithm: Algorithm | Sequence[Algorithm],
    task: Task,
    federation: Federation,
    schedule: Schedule | Iterable[Schedule],
    *,
    key: Array,
    tracker: Tracker | None = None,
    execution: Execution = Execution(),
) -> PlannedRun:
    """Check that algorithm, federation and schedules fit, and plan the waves; the model is checked by `check_model`."""
    key = typed_key(key)
    has_seeds = key.ndim > 0
    num_seeds = len(key) if has_seeds else 1
    schedules = [schedule] * num_seeds if isinstance(schedule, Schedule) else list(schedule)
    stream = Stream() if execution.stream is None and federation.is_mapped else execution.stream
    sweeps = not isinstance(algorithm, Algorithm)
    algorithm = algorithm if isinstance(algorithm, Algorithm) else _swept(algorithm, key)
    check_run(algorithm, federation, schedules, num_seeds, tracker, streams=stream is not None)
    devices = execution.devices
    check_statistics(algorithm, task, federation)
    mesh = None if devices is None else Mesh(np.asarray(devices), ("clients",))
    largest, skips = int(federation.counts.max()), execution.on_nonfinite == "skip"
    task = optimized(task, execution.passes)
    program = Program(task, federation.num_clients, largest, execution.cohort_chunk, has_seeds, sweeps, mesh)
    overhead = overhead_of(algorithm, task, federation, num_seeds)
    ahead = tracker is None and stream is None
    num_devices = 1 if devices is None else len(devices)
    plan = plan_waves(algorithm, schedules, execution.wave_width, overhead, ahead, num_devices)
    run = SimulationRun(program, algorithm, federation, key, plan, tracker, skips)
    return PlannedRun(run, schedules, stream, execution.precision)


def run_plan(
    planned: PlannedRun, *, params: Params | None = None, start: Snapshot | None = None, monitor: Monitor = Monitor()
) -> Result:
    """Run what `plan_run` gave, with the same tracker. The arguments are those of `simulate`."""
    run, schedules, stream, precision = planned
    plan, seedless = run.plan, planned.seedless
    unshared = _unshared(run, params) if start is None else start.unshared
    frozen_has_seeds = unshared.has_seeds and unshared.frozen is not None
    run = run._replace(program=replace(run.program, frozen_has_seeds=frozen_has_seeds), frozen=unshared.frozen)
    if start is None:
        wave, state = 0, _first_state(run, params, stream is not None)
    else:
        _check_start(start, plan, seedless, stream is not None)
        wave, state = start.wave, start.state
    observe = monitor.observe
    stops = _stops(plan, schedules[0], wave, monitor.every if observe else None)
    if stream is None:
        advance_to, shown = _resident(run, seedless), lambda state: state
    else:
        streamed = _streamed(run, stream, state.personal, stops, wave)
        advance_to, shown, state = streamed.advance, streamed.shown, state._replace(personal=())
    snap = lambda state, wave: replace(
        _snapshot(plan, schedules, run.federation.ids, seedless, shown(state), wave), unshared=unshared
    )
    history = [observe(snap(state, wave))] if observe and start is None else []
    for stop in stops:
        if monitor.until and monitor.until(snap(state, wave)):
            break
        with products_in(precision):
            state = advance_to(state, wave, stop)
        wave = stop
        if not run.skips and np.any(state.faults.num):
            raise _fault_error(snap(state, wave), run)
        if observe:
            history.append(observe(snap(state, wave)))
    up, down = bytes_per_event(run.algorithm, state.server, run.program.has_seeds)
    arrived = np.arange(schedules[0].num_events) < _num_arrived(plan, wave)[:, None]
    sent, received = np.stack([s.aggregated for s in schedules]) * arrived * up, arrived * down
    return Result(snap(state, wave), history, seedless(sent), seedless(received))


def _resident(run: SimulationRun, seedless: Callable[[np.ndarray], Any]) -> Callable[[State, int, int], State]:
    """A run with all data and all personal states on the device."""
    program, mesh = run.program, run.program.mesh
    waves = jax.device_put(jax.tree.map(seedless, run.plan.waves))
    data, key, waves = replicate(mesh, (run.federation.train, run.key, waves))
    procedure = Procedure(run.algorithm, replicate(mesh, run.frozen))
    return lambda state, begin, stop: run.advance(
        program, procedure, data, key, waves, run.tracker, replicate(mesh, state), begin, stop, run.skips
    )


def _streamed(run: SimulationRun, stream: Stream, kept: Kept, stops: list[int], wave: int) -> Streamed:
    """A run with its data and its personal states on the host."""
    store = Store(kept, stream.memory, stream.folder)
    return Streamed(run, store, block_sizes(run.plan, run.federation, kept.layout.num_bytes, stops, wave))


def _first_state(run: SimulationRun, params: Params | None, streams: bool) -> State:
    """The state before the first event; in a streamed run nobody has been visited."""
    program = run.program
    if not streams:
        return _initial_state(run, params, program.num_clients)
    state = _initial_state(run, params, 1)
    default = jax.tree.map(lambda leaf: np.asarray(leaf).squeeze(int(program.has_seeds)), state.personal)
    return state._replace(personal=Kept(program.num_clients, program.has_seeds, default, {}))


def _initial_state(run: SimulationRun, params: Params | None, num_personal: int) -> State:
    """From the given model or the task's own, with the personal states of so many clients."""
    if params is None:
        first = initial_params(run.program.task, run.federation, key=run.key)
    else:
        given = jax.tree.map(jnp.asarray, run.algorithm.sharing.trained(params))
        first = repeat(given, len(run.key)) if run.program.has_seeds else given
    return initialize(
        run.program, run.algorithm, first, run.tracker, num_personal, run.plan.num_slots, run.plan.num_places
    )


def _unshared(run: SimulationRun, params: Params | None) -> Unshared:
    """The parameters that the server does not have, of the given model or the task's own."""
    sharing = run.algorithm.sharing
    if not sharing.divides:
        return Unshared()
    has_seeds = params is None and run.program.has_seeds
    if params is None:
        params = initial_params(run.program.task, run.federation, key=run.key)
    params = jax.tree.map(jnp.asarray, params)
    first = jax.tree.map(lambda leaf: leaf[0], params) if has_seeds else params
    run.algorithm.divided.require_division(first)
    return Unshared(sharing.base(params), sharing.own(params), has_seeds)


def _swept(algorithms: Sequence[Algorithm], key: Array) -> Algorithm:
    """Several algorithms as one, whose numbers have a leading axis."""
    if len(algorithms) != key.size or key.ndim != 1:
        raise ValueError(f"Give one algorithm, or one for each key, got {len(algorithms)} for keys of {key.shape}.")
    others = {jax.tree.structure(one): one for one in algorithms}
    if len(others) > 1:
        got = ", ".join(map(str, others.values()))
        raise ValueError(f"Algorithms of a sweep must differ in numbers alone, got {got}. Run them separately.")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *algorithms)


def overhead_of(algorithm: Algorithm, task: Task, federation: Federation, num_seeds: int) -> float:
    """The fixed cost of an asynchronous wave, in units of one member's cost."""
    count = lambda: num_seeds * operations_of(gradient_program(algorithm, task, federation))
    return 0.0 if algorithm.server.is_synchronous else wave_overhead(count)


def plan_waves(
    algorithm: Algorithm,
    schedules: list[Schedule],
    width: int | None,
    overhead: float,
    ahead: bool,
    num_devices: int,
) -> WavePlan:
    """The waves of all seeds. A tracker, or the blocks of a streamed run, want all that trains in a wave to arrive."""
    if algorithm.server.is_synchronous:
        plans = [plan_rounds(s) for s in schedules]
    else:
        width = width or best_width(schedules[0], overhead, ahead, largest_width())
        plans = [plan_arrivals(s, width, ahead) for s in schedules]
    return widen(stack(plans, schedules[0].num_clients), schedules[0].num_clients, num_devices)


def _stops(plan: WavePlan, schedule: Schedule, wave: int, every: int | None) -> list[int]:
    """The waves after which a run pauses: every `every` rounds, or events where there are none, and the end."""
    if every is None:
        return [plan.num_waves]
    counted = schedule.round_ends if schedule.has_rounds else np.ones(schedule.num_events, bool)
    done = np.r_[0, np.cumsum(counted)][plan.num_arrived[0, : plan.num_waves]]
    marks = np.r_[np.arange(every, done[-1], every), done[-1]]
    stops = np.unique(np.searchsorted(done, marks) + 1)
    stops[-1] = plan.num_waves
    return [int(stop) for stop in stops if stop > wave]


def _check_start(start: Snapshot, plan: WavePlan, seedless: Callable[[np.ndarray], Any], streams: bool) -> None:
    if isinstance(start.state.personal, Kept) != streams:
        how = "with its clients' states on the " + ("device" if streams else "host")
        raise ValueError(f"`start` is a snapshot of a run {how}. Continue it in the same way: see `stream`.")
    num_events = seedless(_num_arrived(plan, start.wave))
    if np.any(num_events != start.num_events):
        raise ValueError(
            f"`start` has seen {start.num_events} events, which is not where this run pauses ({num_events}). "
            "Continue with the schedule, the seeds and the `wave_width` that it began with."
        )


def _num_arrived(plan: WavePlan, wave: int) -> np.ndarray:
    """The number of events of each seed that have arrived before a wave."""
    return plan.num_arrived[:, wave - 1] if wave else np.zeros(len(plan.num_arrived), int)


def _snapshot(
    plan: WavePlan,
    schedules: list[Schedule],
    ids: np.ndarray,
    seedless: Callable[[np.ndarray], Any],
    state: State,
    wave: int,
) -> Snapshot:
    num_events = _num_arrived(plan, wave)
    times = [s.time[:num].max(initial=0.0) for s, num in zip(schedules, num_events, strict=True)]
    return Snapshot(state, wave, seedless(num_events), seedless(np.asarray(times)), tuple(schedules), ids)


def _fault_error(snapshot: Snapshot, run: SimulationRun) -> NonFiniteUpdate:
    """The error about the first update that was not finite."""
    fault = min(snapshot.faults, key=lambda fault: fault.event)
    of_seed = f" of seed {fault.seed}" if snapshot.has_seeds else ""
    mode = "synchronous" if run.algorithm.server.is_synchronous else "asynchronous"
    algorithm = f"{type(run.algorithm.objective).__name__}, {mode}"
    return NonFiniteUpdate(
        f"The update of {run.federation.names[fault.client]} at event {fault.event}{of_seed} is not finite: "
        f"{fault.stage}. The algorithm ({algorithm}) needs smaller step sizes or `clip_norm`; "
        "`Execution(on_nonfinite='skip')` skips such updates.",
        fault,
    )
