"""Waves: groups of events that can be trained together.

Events of different clients whose downloads have happened form a *wave*, which is trained at once. Then updates arrive
sequentially in the schedule's order, up to the first one that is not trained yet. An update that was trained ahead of
its turn waits in a *place*. The result equals sequential execution. A model that is still needed after it has been
replaced waits in a *slot*. Places and slots are assigned here, so that a run holds only about as many old models as are
in use at the same time.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from personax.schedules import Schedule

_AHEAD = 2  # how many wave widths beyond the next arrival an event may be trained
_SAMPLE = 1024  # number of events from which a width is chosen


class Waves(NamedTuple):
    """Arrays [waves, width] of events to train, where `valid`, and [waves, arrivals] of updates that then arrive."""

    client: Any
    update: Any  # the number of that client's earlier updates
    event: Any
    valid: Any
    aggregated: Any
    read: Any  # the slot of the model that the client downloaded
    hold: Any  # the place where the update waits for its turn; beyond the last place for none
    take: Any  # the places of the updates that arrive, in order; -1 for none
    save: Any  # the slot for the model after each arrival; beyond the last slot for none


class WavePlan(NamedTuple):
    """The waves of a run, their number before padding, and the numbers of slots and places they use."""

    waves: Waves
    num_waves: int
    num_slots: int
    num_places: int

    @property
    def num_arrived(self) -> np.ndarray:
        """The number of events that have arrived after each wave."""
        return np.cumsum((self.waves.take >= 0).sum(axis=-1), axis=-1)


class _Order(NamedTuple):
    """The wave in which each event is trained, its column there, and the wave after which it arrives."""

    trained: np.ndarray
    column: np.ndarray
    arrived: np.ndarray


def plan_rounds(schedule: Schedule) -> WavePlan:
    """Plan one wave per round: every member starts from the current model, and all reports arrive together."""
    num_rounds = int(schedule.round_ends.sum())
    size = schedule.num_events // num_rounds
    wave, column = np.divmod(np.arange(schedule.num_events), size)
    waves = _table(schedule, _Order(wave, column, wave), size, size)
    take = np.broadcast_to(np.arange(size), waves.client.shape)
    valid = schedule.reported.reshape(waves.client.shape)
    return WavePlan(waves._replace(take=take, valid=valid), num_rounds, 0, 0)


def plan_arrivals(schedule: Schedule, width: int, ahead: bool = True) -> WavePlan:
    """Plan waves of at most `width` events.

    Without `ahead`, no event is trained ahead of its turn: a wave has consecutive events, which all arrive after it.
    """
    order = _order(schedule.client, schedule.started_at, width, ahead)
    slots, num_used = _assign_slots(schedule, order)
    # These shapes hardly depend on the seed: usually each client has one update in flight, from its own model version.
    num_slots = schedule.num_clients + 1 if 2 * num_used > schedule.num_clients else _power_of_two(num_used)
    places, num_places = _assign_places(order), _AHEAD * width if ahead else width
    waves = _table(schedule, order, width, _num_arrivals(width, ahead))
    hold = np.where(waves.valid, places[waves.event], num_places)
    waves.take[order.arrived, _since(order.arrived)] = places
    waves.save[order.arrived, _since(order.arrived)] = slots[1:]
    save = np.where(waves.save < 0, num_slots, waves.save)
    read = np.where(waves.valid, slots[schedule.started_at[waves.event]], 0)
    return WavePlan(waves._replace(read=read, hold=hold, save=save), len(waves.valid), num_slots, num_places)


def wave_bounds(schedule: Schedule) -> np.ndarray:
    """The beginnings of waves of consecutive events with unlimited width, and the end."""
    arrived = _order(schedule.client, schedule.started_at, schedule.num_events, ahead=False).arrived
    return np.r_[0, np.flatnonzero(np.diff(arrived)) + 1, schedule.num_events]


def best_width(schedule: Schedule, overhead: float, ahead: bool = True, most: float = np.inf) -> int:
    """Choose the width W from 1, 2, 3, 4, 6, 8, 12, 16, ... up to `most` with the lowest cost on the first events.

    The model of the cost of a wave is W + `overhead`: its members, plus a fixed cost.
    """
    client, started_at = schedule.client[:_SAMPLE], schedule.started_at[:_SAMPLE]
    num_waves = lambda width: int(_order(client, started_at, width, ahead).arrived[-1]) + 1
    powers = 2 ** np.arange(schedule.num_clients.bit_length() + 1)
    fewest = num_waves(int(powers[-1]))  # with this width, events only wait for each other
    at_least = {
        width: max(len(client) / width, fewest) * (width + overhead)
        for width in np.union1d(powers, 3 * powers[1:] // 2).tolist()
        if width <= most
    }
    best, least = 1, np.inf
    for width, bound in sorted(at_least.items(), key=lambda item: item[1]):
        if bound >= least:
            break
        cost = num_waves(width) * (width + overhead)
        if cost < least:
            best, least = width, cost
    return best


def _num_arrivals(width: int, ahead: bool) -> int:
    """The largest number of arrivals after a wave: more than its width, to catch up after waves with fewer."""
    return 3 * width // 2 if ahead else width


def _order(client: np.ndarray, started_at: np.ndarray, width: int, ahead: bool) -> _Order:
    """Assign events to waves of at most `width`, earliest arrivals first."""
    num, most = len(client), _num_arrivals(width, ahead)
    # A client starts from its own last state, and from a model that has been downloaded.
    ready_at = np.maximum(started_at, _previous(client) + 1)
    queue = np.argsort(ready_at, kind="stable").tolist()
    times = ready_at.tolist()
    trained, column, arrived = [-1] * num, [0] * num, [0] * num
    ready: list[int] = []
    wave = done = queued = 0
    while done < num:
        while queued < num and times[queue[queued]] <= done:
            heappush(ready, queue[queued])
            queued += 1
        members, furthest = 0, done + _AHEAD * width
        while ready and members < width and ready[0] < furthest and (ahead or ready[0] == done + members):
            event = heappop(ready)
            trained[event], column[event] = wave, members
            members += 1
        last = min(done + most, num)
        while done < last and trained[done] >= 0:
            arrived[done] = wave
            done += 1
        wave += 1
    return _Order(np.asarray(trained), np.asarray(column), np.asarray(arrived))


def _previous(client: np.ndarray) -> np.ndarray:
    """The previous event of the same client for each event; -1 for the first."""
    order = np.argsort(client, kind="stable")
    before = np.r_[-1, order[:-1]]
    before[np.r_[True, client[order][1:] != client[order][:-1]]] = -1
    found = np.empty(len(client), int)
    found[order] = before
    return found


def _since(arrived: np.ndarray) -> np.ndarray:
    """The number of events before each one that arrived after the same wave."""
    return np.arange(len(arrived)) - np.searchsorted(arrived, arrived)


def _table(schedule: Schedule, order: _Order, width: int, num_arrivals: int) -> Waves:
    num_waves = int(order.arrived[-1]) + 1
    event, valid = np.zeros((num_waves, width), int), np.zeros((num_waves, width), bool)
    event[order.trained, order.column] = np.arange(schedule.num_events)
    valid[order.trained, order.column] = True
    none, nowhere = np.zeros_like(event), np.full((num_waves, num_arrivals), -1)
    aggregated = schedule.aggregated[event]
    updates = schedule.updates()[event]
    return Waves(schedule.client[event], updates, event, valid, aggregated, none, none, nowhere, nowhere.copy())


def _assign_slots(schedule: Schedule, order: _Order) -> tuple[np.ndarray, int]:
    """A slot for each model from which an event starts, indexed by the number of events before it; -1 for others."""
    last_use = np.full(schedule.num_events + 1, -1)
    np.maximum.at(last_use, schedule.started_at, order.trained)
    uses, made_in = last_use.tolist(), [-1, *order.arrived.tolist()]
    slots, free, num_slots = [-1] * len(uses), [], 0
    expiring: list[list[int]] = [[] for _ in range(made_in[-1] + 1)]  # slots by their model's last use
    now = -1
    for model in np.flatnonzero(last_use >= 0).tolist():
        while now < made_in[model]:
            now += 1
            free += expiring[now]
        if not free:
            free.append(num_slots)
            num_slots += 1
        slots[model] = free.pop()
        expiring[uses[model]].append(slots[model])
    return np.asarray(slots), num_slots


def _assign_places(order: _Order) -> np.ndarray:
    """A place for each event, reserved from the wave in which it is trained to the wave after which it arrives."""
    trained, arrived = order.trained.tolist(), order.arrived.tolist()
    places, free, num_places, arriving = [-1] * len(trained), [], 0, 0
    for event in np.lexsort((order.column, order.trained)).tolist():
        while arrived[arriving] < trained[event]:
            free.append(places[arriving])
            arriving += 1
        if not free:
            free.append(num_places)
            num_places += 1
        places[event] = free.pop()
    return np.asarray(places)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def stack(plans: Sequence[WavePlan], num_clients: int) -> WavePlan:
    """Stack the plans of several seeds: arrays [seeds, waves, width], padded with empty waves.

    The number of waves is rounded up to a power of two, assuming waves that are at least half full, so that runs of
    similar length share a program.
    """
    num_waves, num_slots = max(plan.num_waves for plan in plans), max(plan.num_slots for plan in plans)
    num_events, width = max(int(plan.waves.valid.sum()) for plan in plans), plans[0].waves.client.shape[1]
    padded = _power_of_two(max(num_waves, -(-2 * num_events // width)) if num_slots else num_waves)
    num_places = plans[0].num_places
    fill = _nothing(num_clients, num_slots, num_places)

    def pad(array: np.ndarray, value: object) -> np.ndarray:
        return np.pad(array, ((0, padded - len(array)), (0, 0)), constant_values=value)  # pyright: ignore[reportCallIssue, reportArgumentType]

    stacked = [Waves(*map(pad, plan.waves, fill)) for plan in plans]
    for waves, plan in zip(stacked, plans, strict=True):
        waves.save[waves.save == plan.num_slots] = num_slots
    return WavePlan(Waves(*map(np.stack, zip(*stacked, strict=True))), num_waves, num_slots, num_places)


def widen(plan: WavePlan, num_clients: int, multiple: int) -> WavePlan:
    """Widen waves to a multiple of the number of devices, padding them with empty entries."""
    if plan.waves.client.shape[2] % multiple == 0:
        return plan
    fill = _nothing(num_clients, plan.num_slots, plan.num_places)
    pad = lambda array, value: np.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % multiple)), constant_values=value)
    return plan._replace(waves=Waves(*map(pad, plan.waves, fill)))


def with_rounds(plan: WavePlan, schedules: Sequence[Schedule], first: int, end: int) -> WavePlan:
    """Return the plan of rounds with the cohorts that these schedules have in the rounds `first` to `end`."""
    arrays = {name: getattr(plan.waves, name).copy() for name in ("client", "update", "valid", "aggregated")}
    for seed, schedule in enumerate(schedules):
        size = schedule.round_size
        part = slice(first * size, end * size)
        columns = (
            schedule.client[part],
            schedule.updates(part.start, part.stop),
            schedule.reported[part],
            schedule.aggregated[part],
        )
        for array, column in zip(arrays.values(), columns, strict=True):
            array[seed, first:end, :size] = column.reshape(-1, size)
    return plan._replace(waves=plan.waves._replace(**arrays))


def ended(plan: WavePlan, num_clients: int, waves: Sequence[int | None]) -> WavePlan:
    """Return the plan of seeds that each end before a wave, or not at all: nothing is trained or arrives afterwards."""
    arrays = Waves(*(array.copy() for array in plan.waves))
    for array, value in zip(arrays, _nothing(num_clients, plan.num_slots, plan.num_places), strict=True):
        for seed, wave in enumerate(waves):
            if wave is not None:
                array[seed, wave:] = value
    return plan._replace(waves=arrays)


def _nothing(num_clients: int, num_slots: int, num_places: int) -> Waves:
    """The values of an empty entry, in which nothing is trained and nothing arrives."""
    return Waves(num_clients, 0, 0, False, False, 0, num_places, -1, num_slots)
