"""Simulate a federation: run an algorithm along a schedule, from the first event to the last."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
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
from personax.simulation.control import Control, with_chosen
from personax.simulation.engine import Procedure, Program, SimulationRun, initial_params, initialize, replicate
from personax.simulation.execution import Execution, Monitor
from personax.simulation.results import Controlled, NonFiniteUpdate, Result, Snapshot, State, Unshared, repeat
from personax.simulation.speed import gradient_program
from personax.simulation.store import Kept, Store, kept_shapes
from personax.simulation.stream import Sizes, Stream, Streamed, block_sizes, largest_sizes
from personax.simulation.waves import (
    WavePlan,
    best_width,
    ended,
    plan_arrivals,
    plan_rounds,
    stack,
    widen,
    with_rounds,
)
from personax.simulation.work import traffic_of_events
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
        algorithm: a recipe; or one for each key, to sweep over their numbers.
        task: the model and its loss.
        federation: the clients and their data.
        schedule: the schedule of events, one for all seeds or one for each.
        key: one key, or an array of keys that runs that many seeds together.
        params: the initial model of all seeds. By default, the task's model is initialized from each key.
        start: a snapshot of the same run to continue from.
        monitor: callbacks and trackers, see `Monitor`.
        execution: settings that do not change the results, see `Execution`.
    """
    shapes = check_model(task, federation, params)
    if federation.newcomers is not None:
        check_model(task, federation.newcomers, params)
    for one in [algorithm] if isinstance(algorithm, Algorithm) else algorithm:
        one.require_model(shapes)
    given = (algorithm, task, federation, schedule)
    planned = plan_run(*given, key=key, tracker=monitor.tracker, execution=execution)
    return run_plan(planned, params=params, start=start, monitor=monitor)


class PlannedRun(NamedTuple):
    """A run whose waves are planned: everything except its initial state and its monitor."""

    run: SimulationRun
    schedules: list[Schedule]
    stream: Stream | None
    precision: Precision
    replan: Callable[[list[Schedule]], WavePlan]
    control: tuple[Controlled, ...] = ()  # of each seed, if there is a controller
    original: "PlannedRun | None" = None  # the run before its control

    def seedless(self, leaf: np.ndarray) -> Any:
        """Drop the axis of seeds if the run has a single key."""
        return leaf if self.run.program.has_seeds else leaf[0]

    def state_shapes(self, num_events: int | Sequence[int]) -> State:
        """Return the shapes and types of the state, to read a checkpoint into, without computing anything.

        `num_events` is the number of events so far (for each of several seeds): a run that streams from the host only
        has the states of the clients that it has visited.
        """
        run, streams = self.run, self.stream is not None
        num_personal = 1 if streams else run.program.num_clients
        shapes = jax.eval_shape(lambda key: _initial_state(run._replace(key=key), None, num_personal), run.key)
        if not streams:
            return shapes
        done = zip(self.schedules, np.atleast_1d(num_events), strict=True)
        num = sum(len(np.unique(schedule.client[:num][schedule.reported[:num]])) for schedule, num in done)
        return shapes._replace(
            personal=kept_shapes(run.program.num_clients, run.program.has_seeds, shapes.personal, num)
        )

    def decided(self, control: tuple[Controlled, ...], wave: int, next_wave: int) -> "PlannedRun":
        """Return the run after a decision before a wave, up to the next decision: later cohorts are not yet final."""
        plan, schedules = self.run.plan, self.schedules
        if any(one.chosen for one in control):
            num = next_wave - wave
            schedules = [
                schedule.with_cohorts(wave, [one.chosen[-1][1]] * num) if one.chosen and not one.ended else schedule
                for schedule, one in zip(schedules, control, strict=True)
            ]
            plan = with_rounds(plan, schedules, wave, next_wave)
        if any(one.ended for one in control):
            plan = ended(plan, self.run.program.num_clients, [one.wave if one.ended else None for one in control])
        return self._replace(run=self.run._replace(plan=plan), schedules=schedules, control=control)

    def controlled(self, control: tuple[Controlled, ...]) -> "PlannedRun":
        """Return the run with the cohorts that controllers chose, in which seeds end where they ended them."""
        first = self.original or self
        if not control:
            return first
        schedules = list(map(with_chosen, first.schedules, control))
        same = all(one is other for one, other in zip(schedules, first.schedules, strict=True))
        plan = first.run.plan if same else first.replan(schedules)
        if any(one.ended for one in control):
            plan = ended(plan, first.run.program.num_clients, [one.wave if one.ended else None for one in control])
        run = first.run._replace(plan=plan)
        return first._replace(run=run, schedules=schedules, control=control, original=first)

    @property
    def has_ended(self) -> bool:
        """Return True if controllers have ended all seeds."""
        return bool(self.control) and all(one.ended for one in self.control)

    def stops(self, every: int | None, wave: int = 0) -> list[int]:
        """Return the waves after `wave` after which the run pauses: every `every` rounds or events, and the end."""
        first = self.original or self
        return _stops(first.run.plan, first.schedules[0], wave, every)

    def unshared(self) -> Unshared:
        """Return the parameters that the server does not have, where the run starts from the task's own model."""
        return unshared_of(self.run, None)

    def pauses(self, every: int) -> list[list[int]]:
        """Return the number of events of each seed that have arrived at each pause, including the start and the end."""
        return [_num_arrived(self.run.plan, wave).tolist() for wave in (0, *self.stops(every))]

    def shares(self, other: "PlannedRun", wave: int) -> bool:
        """Return True if the first `wave` waves of two runs agree, so that their states there are equal."""
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
    """Check that algorithm, federation and schedules are compatible, and plan the waves. (See also `check_model`.)"""
    key = typed_key(key)
    has_seeds = key.ndim > 0
    num_seeds = len(key) if has_seeds else 1
    schedules = [schedule] * num_seeds if isinstance(schedule, Schedule) else list(schedule)
    stream = Stream() if execution.stream is None and federation.is_mapped else execution.stream
    sweeps = not isinstance(algorithm, Algorithm)
    algorithm = algorithm if isinstance(algorithm, Algorithm) else _swept(algorithm, key)
    check_run(algorithm, federation, schedules, num_seeds, tracker, streams=stream is not None)
    devices = execution.devices
    check_statistics(algorithm, task, *federation.first_sample)
    mesh = None if devices is None else Mesh(np.asarray(devices), ("clients",))
    largest, skips = int(federation.counts.max()), execution.on_nonfinite == "skip"
    task = optimized(task, execution.passes)
    divides = mesh is not None and stream is not None
    program = Program(task, federation.num_clients, largest, execution.cohort_chunk, has_seeds, sweeps, mesh, divides)
    overhead = overhead_of(algorithm, task, federation, num_seeds)
    ahead = tracker is None and stream is None
    num_devices = 1 if devices is None else len(devices)
    width = execution.wave_width
    replan = lambda schedules: plan_waves(algorithm, schedules, width, overhead, ahead, num_devices)
    run = SimulationRun(program, algorithm, federation, key, replan(schedules), tracker, skips)
    return PlannedRun(run, schedules, stream, execution.precision, replan)


def run_plan(
    planned: PlannedRun, *, params: Params | None = None, start: Snapshot | None = None, monitor: Monitor = Monitor()
) -> Result:
    """Run a result of `plan_run`, with the same tracker. The arguments are those of `simulate`."""
    observe, control = monitor.observe, monitor.control
    unshared = unshared_of(planned.run, params) if start is None else start.unshared
    planned = _begun(planned, unshared, control, start)
    run = planned.run
    if start is None:
        wave, state = 0, _first_state(run, params, planned.stream is not None)
    else:
        _check_start(start, planned.run.plan, planned.seedless, planned.stream is not None)
        wave, state = start.wave, start.state
    looks = planned.stops(monitor.every if observe else None, wave)
    decisions = dict(pairwise([0, *planned.stops(control.every)])) if control else {}  # with the next one of each
    stops = sorted({*looks, *(stop for stop in decisions.values() if stop > wave)})
    stream = planned.stream
    store = None if stream is None else Store(state.personal, stream.memory, stream.folder)
    selects = control is not None and control.controller.selects
    running = _running(planned, unshared, store, None if store is None else _sizes(run, store, stops, wave, selects))
    state, seen = state if store is None else state._replace(personal=()), wave
    is_shown = bool(start is not None or observe or control or monitor.until)  # each state is that of a snapshot
    history = [observe(running.snapshot(state, wave))] if observe and start is None else []
    for stop in stops:
        if monitor.until and monitor.until(running.snapshot(state, wave)):
            break
        if control is not None and wave in decisions:
            running = _decided(running, control, state, wave, decisions[wave])
        if running.planned.has_ended:
            break
        state = _copied(state) if is_shown else state
        with products_in(planned.precision):
            state = running.advance(state, wave, stop)
        wave = stop
        if not run.skips and np.any(state.faults.num):
            raise _fault_error(running.snapshot(state, wave), run)
        if observe and stop in looks:
            history, seen = [*history, observe(running.snapshot(state, wave))], wave
    if observe and wave > seen:
        history.append(observe(running.snapshot(state, wave)))
    last = running.snapshot(state, wave)
    sent, received = traffic_of_events(run.algorithm, last)
    return Result(last, history, planned.seedless(sent), planned.seedless(received))


def _begun(planned: PlannedRun, unshared: Unshared, control: Control | None, start: Snapshot | None) -> PlannedRun:
    """Return the plan with the frozen parameters and the previous decisions of its controller."""
    first = planned.original or planned
    has_seeds = unshared.has_seeds and unshared.frozen is not None
    program = replace(first.run.program, frozen_has_seeds=has_seeds)
    first = first._replace(run=first.run._replace(program=program, frozen=unshared.frozen))
    before = () if start is None else start.control
    if control is None:
        if any(one.chosen for one in before):
            raise ValueError(
                "`start` is a snapshot of a run whose controller chose cohorts. Continue it with the same controller: "
                "`Monitor(control=...)`."
            )
        return first
    control.check(first.schedules)
    return first.controlled(before or control.begin(len(first.schedules)))


class _RunningPlan(NamedTuple):
    """A run from any wave on: how it advances, and how its state is shown."""

    planned: PlannedRun
    unshared: Unshared
    store: Store | None
    sizes: Sizes | None  # of the blocks of a streamed run
    advance: Callable[[State, int, int], State]

    def snapshot(self, state: State, wave: int) -> Snapshot:
        """Return the snapshot of a state before a wave."""
        run, schedules = self.planned.run, self.planned.schedules
        shown = state if self.store is None else state._replace(personal=self.store.view())
        num_events = _num_arrived(run.plan, wave)
        times = np.asarray([s.time[:num].max(initial=0.0) for s, num in zip(schedules, num_events, strict=True)])
        at = (self.planned.seedless(num_events), self.planned.seedless(times))
        return Snapshot(shown, wave, *at, tuple(schedules), run.federation.ids, self.unshared, self.planned.control)


def _running(planned: PlannedRun, unshared: Unshared, store: Store | None, sizes: Sizes | None) -> _RunningPlan:
    """A run with its data and personal states on the device, or on the host, where the store has them."""
    run = planned.run
    if store is None or sizes is None:
        return _RunningPlan(planned, unshared, None, None, _resident(run, planned.seedless))
    return _RunningPlan(planned, unshared, store, sizes, Streamed(run, store, sizes).advance)


def _sizes(run: SimulationRun, store: Store, stops: list[int], wave: int, selects: bool) -> Sizes:
    """The shape of the blocks of a streamed run, whose cohorts are known in advance unless a controller selects."""
    sizes = largest_sizes if selects else block_sizes
    return sizes(run.plan, run.federation, store.kept.layout.num_bytes, stops, wave, run.program.num_devices)


def _decided(running: _RunningPlan, control: Control, state: State, wave: int, next_wave: int) -> _RunningPlan:
    """The run after a decision of its controller."""
    planned = running.planned
    run = planned.run
    keys = list(run.key) if run.program.has_seeds else [run.key]
    found = control.decide(run.algorithm, running.snapshot(state, wave), run.federation.counts, keys)
    newly_ended = [one.ended for one in found] != [one.ended for one in planned.control]
    if not newly_ended and not any(one.chosen for one in found):
        return running._replace(planned=planned._replace(control=found))
    planned = planned.decided(found, wave, next_wave)
    return _running(planned, running.unshared, running.store, running.sizes)


def _resident(run: SimulationRun, seedless: Callable[[np.ndarray], Any]) -> Callable[[State, int, int], State]:
    """Return the function that advances a run with all data and personal states on the device."""
    mesh = run.program.mesh
    waves = jax.device_put(jax.tree.map(seedless, run.plan.waves))
    data, key, waves = replicate(mesh, (run.federation.train, run.key, waves))
    procedure = Procedure(run.algorithm, replicate(mesh, run.frozen))
    return lambda state, begin, stop: run.advance(procedure, data, key, waves, replicate(mesh, state), begin, stop)


def _copied(state: State) -> State:
    """Copy the personal states of a snapshot, whose memory would be reused."""
    return state._replace(personal=jax.tree.map(jnp.copy, state.personal))


def _first_state(run: SimulationRun, params: Params | None, streams: bool) -> State:
    """The state before the first event. In a streamed run, no client has been visited."""
    program = run.program
    if not streams:
        return _initial_state(run, params, program.num_clients)
    state = _initial_state(run, params, 1)
    default = jax.tree.map(lambda leaf: np.asarray(leaf).squeeze(int(program.has_seeds)), state.personal)
    return state._replace(personal=Kept(program.num_clients, program.has_seeds, default, {}))


def _initial_state(run: SimulationRun, params: Params | None, num_personal: int) -> State:
    """The initial state from the given model or the task's own, with the personal states of `num_personal` clients."""
    if params is None:
        first = initial_params(run.program.task, run.federation, key=run.key)
    else:
        given = jax.tree.map(jnp.asarray, run.algorithm.sharing.trained(params))
        first = repeat(given, len(run.key)) if run.program.has_seeds else given
    return initialize(
        run.program, run.algorithm, first, run.tracker, num_personal, run.plan.num_slots, run.plan.num_places
    )


def unshared_of(run: SimulationRun, params: Params | None) -> Unshared:
    """Return the parameters that the server does not have, from the given model or the task's own."""
    sharing = run.algorithm.sharing
    if not sharing.divides:
        return Unshared()
    has_seeds = params is None and run.program.has_seeds
    if params is None:
        params = initial_params(run.program.task, run.federation, key=run.key)
    params = jax.tree.map(jnp.asarray, params)
    return Unshared(sharing.base(params), sharing.own(params), has_seeds)


def _swept(algorithms: Sequence[Algorithm], key: Array) -> Algorithm:
    """Stack the numbers of several algorithms into one algorithm, along a leading axis."""
    if len(algorithms) != key.size or key.ndim != 1:
        raise ValueError(
            f"Got {len(algorithms)} algorithms for keys of shape {key.shape}. Give one for all, or one for each key."
        )
    others = {jax.tree.structure(one): one for one in algorithms}
    if len(others) > 1:
        got = ", ".join(map(str, others.values()))
        raise ValueError(f"Algorithms of a sweep must differ only in numbers, got {got}. Run them separately.")
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
    """Plan the waves of all seeds. Without `ahead`, all updates of a wave arrive after it, as a tracker requires."""
    if algorithm.server.is_synchronous:
        plans = [plan_rounds(s) for s in schedules]
    else:
        width = width or best_width(schedules[0], overhead, ahead, largest_width())
        plans = [plan_arrivals(s, width, ahead) for s in schedules]
    return widen(stack(plans, schedules[0].num_clients), schedules[0].num_clients, num_devices)


def _stops(plan: WavePlan, schedule: Schedule, wave: int, every: int | None) -> list[int]:
    """The waves after which a run pauses: every `every` rounds (or events, without rounds), and the end."""
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
        raise ValueError(f"`start` is a snapshot of a run {how}. Continue it in the same way (see `stream`).")
    num_events = seedless(_num_arrived(plan, start.wave))
    if np.any(num_events != start.num_events):
        raise ValueError(
            f"`start` is a snapshot after {start.num_events} events, but this run pauses after {num_events}. "
            "Continue with the same schedule, seeds and `wave_width`."
        )


def _num_arrived(plan: WavePlan, wave: int) -> np.ndarray:
    """The number of events of each seed that have arrived before a wave."""
    return plan.num_arrived[:, wave - 1] if wave else np.zeros(len(plan.num_arrived), int)


def _fault_error(snapshot: Snapshot, run: SimulationRun) -> NonFiniteUpdate:
    """The error for the first update that was not finite."""
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
