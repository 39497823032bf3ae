"""Which events can be trained together.

Consecutive events whose downloads all happened before the first of them, by different clients, form a *wave*: they are
trained at once and then applied one after another, with the result of one-by-one execution. A model that is needed
after it has been replaced waits in a slot; slots are assigned here, so that a run holds about as many old models as
are in use at the same time.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from personax.schedules import Schedule


class Waves(NamedTuple):
    """Arrays [waves, width]; entries past the end of a wave are not `valid`."""

    client: Any
    update: Any  # that client's own earlier updates
    event: Any
    valid: Any
    aggregated: Any
    read: Any  # the slot of the model that the client had downloaded
    save: Any  # the slot for the model after this event; past the last slot where it is not needed


class Plan(NamedTuple):
    """The waves of one run, how many of them there are before padding, and how many slots they use."""

    waves: Waves
    num_waves: int
    num_slots: int


def plan_rounds(schedule: Schedule) -> Plan:
    """One wave for each round: every member starts from the current model."""
    num_rounds = int(schedule.round_ends.sum())
    bounds = np.arange(num_rounds + 1) * (schedule.num_events // num_rounds)
    return Plan(_table(schedule, bounds, int(bounds[1])), num_rounds, 0)


def plan_arrivals(schedule: Schedule, width: int | None = None, overhead: float = 2.0) -> Plan:
    """Waves of at most `width` events; by default the `best_width`, for which the run costs least.

    A wave of width W is taken to cost W + `overhead`: its members, and what starting it costs.
    """
    bounds = wave_bounds(schedule)
    width = width or best_width(np.diff(bounds), overhead)
    pieces = [np.arange(a, b, width) for a, b in pairwise(bounds)]
    bounds = np.r_[np.concatenate(pieces), schedule.num_events]
    waves = _table(schedule, bounds, width)
    slots, num_used = _assign_slots(schedule, bounds)
    # Shapes that hardly depend on the seed: usually every client has one update in flight, from a model of its own.
    num_slots = schedule.num_clients + 1 if 2 * num_used > schedule.num_clients else _power_of_two(num_used)
    read = np.where(waves.valid, slots[schedule.started_at[waves.event]], 0)
    save = np.where(waves.valid, slots[waves.event + 1], -1)
    return Plan(waves._replace(read=read, save=np.where(save < 0, num_slots, save)), len(bounds) - 1, num_slots)


def wave_bounds(schedule: Schedule) -> np.ndarray:
    """Where waves begin, and the end: a wave ends before a later download, or before a client's second event."""
    bounds, members, begin = [0], set(), 0
    for event, (client, started_at) in enumerate(
        zip(schedule.client.tolist(), schedule.started_at.tolist(), strict=True)
    ):
        if started_at > begin or client in members:
            bounds.append(event)
            members, begin = set(), event
        members.add(client)
    return np.asarray([*bounds, schedule.num_events])


def best_width(lengths: np.ndarray, overhead: float) -> int:
    """The W of 1, 2, 3, 4, 6, 8, 12, 16, ... that makes `sum ceil(length / W) (W + overhead)` smallest."""
    powers = 2 ** np.arange(int(np.ceil(np.log2(lengths.max()))) + 1)
    widths = np.union1d(powers, 3 * powers[1:] // 2)
    costs = [np.ceil(lengths / width).sum() * (width + overhead) for width in widths]
    return int(widths[np.argmin(costs)])


def _table(schedule: Schedule, bounds: np.ndarray, width: int) -> Waves:
    event = bounds[:-1, None] + np.arange(width)
    valid = event < bounds[1:, None]
    event = np.where(valid, event, 0)
    unused = np.zeros_like(event)
    aggregated = schedule.aggregated[event]
    return Waves(schedule.client[event], schedule.updates()[event], event, valid, aggregated, unused, unused)


def _assign_slots(schedule: Schedule, bounds: np.ndarray) -> tuple[np.ndarray, int]:
    """A slot for each model that some event starts from, by the number of events before it; -1 for the others."""
    wave_of = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    last_use = np.full(schedule.num_events + 1, -1)
    np.maximum.at(last_use, schedule.started_at, wave_of)
    slots, free, num_slots = np.full(schedule.num_events + 1, -1), [], 0
    expiring: list[tuple[int, int]] = []  # a heap of last uses and slots
    for model in np.flatnonzero(last_use >= 0).tolist():
        made_in = wave_of[model - 1] if model else -1
        while expiring and expiring[0][0] <= made_in:
            free.append(heappop(expiring)[1])
        slots[model], num_slots = (free.pop(), num_slots) if free else (num_slots, num_slots + 1)
        heappush(expiring, (int(last_use[model]), int(slots[model])))
    return slots, num_slots


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def stack(plans: Sequence[Plan], num_clients: int) -> Plan:
    """Plans of several seeds side by side: arrays [seeds, waves, width], padded with waves that contain nothing.

    The number of waves is rounded up to a power of two, for waves that are half full or better, so that runs of similar
    length share a program.
    """
    num_waves, num_slots = max(plan.num_waves for plan in plans), max(plan.num_slots for plan in plans)
    num_events, width = max(int(plan.waves.valid.sum()) for plan in plans), plans[0].waves.client.shape[1]
    padded = _power_of_two(max(num_waves, -(-2 * num_events // width)) if num_slots else num_waves)
    fill = Waves(num_clients, 0, 0, False, False, 0, num_slots)  # pyright: ignore[reportArgumentType]

    def pad(array: np.ndarray, value: object) -> np.ndarray:
        return np.pad(array, ((0, padded - len(array)), (0, 0)), constant_values=value)  # pyright: ignore[reportCallIssue, reportArgumentType]

    stacked = [Waves(*map(pad, plan.waves, fill)) for plan in plans]
    for waves, plan in zip(stacked, plans, strict=True):
        waves.save[waves.save == plan.num_slots] = num_slots
    return Plan(Waves(*map(np.stack, zip(*stacked, strict=True))), num_waves, num_slots)


def widen(plan: Plan, num_clients: int, multiple: int) -> Plan:
    """The same waves with a width that is a multiple of a number of devices; the new places contain nothing."""
    missing = -plan.waves.client.shape[2] % multiple
    if not missing:
        return plan
    fill = Waves(num_clients, 0, 0, False, False, 0, plan.num_slots)
    pad = lambda array, value: np.pad(array, ((0, 0), (0, 0), (0, missing)), constant_values=value)
    return plan._replace(waves=Waves(*map(pad, plan.waves, fill)))
