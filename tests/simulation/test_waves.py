"""Waves: what may be trained together, slots replayed in plain Python, widths by brute force, padding."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import personax
from personax.fast.backends import CPU_WAVE_WIDTH
from personax.schedules import Delays, arrivals, persafl_delays, rounds, uniform_arrivals
from personax.schedules.delays import Exponential, Fixed, Given
from personax.simulation.simulate import plan_waves
from personax.simulation.waves import Waves, best_width, plan_arrivals, plan_rounds, stack, wave_bounds

KEY = jax.random.key(3)
small = settings(max_examples=60, deadline=None)
widths = st.integers(1, 9)


@st.composite
def schedules(draw):
    """Continuous delays, whole delays with ties, bounded staleness."""
    num_clients, num_events, seed = draw(st.integers(1, 7)), draw(st.integers(1, 60)), draw(st.integers(0, 2**31 - 1))
    key, table = jax.random.key(seed), np.random.default_rng(seed).integers(0, 4, (5, num_clients)).astype(float)
    kind = draw(st.sampled_from(["random", "ties", "bounded"]))
    if kind == "bounded":
        return uniform_arrivals(num_clients, num_events, draw(st.integers(0, 12)), key=key)
    slow = Delays(Exponential(1.0), upload=Exponential(3.0), pause=Exponential(1.0))
    delays = slow if kind == "random" else Delays(compute=Given(table))
    return arrivals(num_clients, num_events, delays=delays, key=key)


def members(plan):
    """The events of each wave."""
    return [event[valid].tolist() for event, valid in zip(plan.waves.event, plan.waves.valid, strict=True)]


def replay(schedule, plan):
    """Run a plan on the numbers of events and models; model m is the one after m events.

    Returns the model that each event read, and the events in the order of their arrival.
    """
    slots, places, read, arrived = [0] * plan.num_slots, [None] * plan.num_places, {}, []
    for wave in range(len(plan.waves.valid)):
        row = Waves(*(array[wave] for array in plan.waves))
        for event, slot, place in zip(row.event[row.valid], row.read[row.valid], row.hold[row.valid], strict=True):
            earlier = np.flatnonzero(schedule.client[:event] == schedule.client[event])
            assert set(earlier) <= set(arrived) and places[place] is None
            read[int(event)], places[place] = slots[slot], int(event)
        assert np.all(row.hold[~row.valid] == plan.num_places)
        saves = row.save[row.save < plan.num_slots].tolist()
        assert len(set(saves)) == len(saves) and np.all(row.take[row.save < plan.num_slots] >= 0)
        for place, slot in zip(row.take, row.save, strict=True):
            if place >= 0:
                arrived.append(places[place])
                places[place] = None
            if slot < plan.num_slots:
                slots[slot] = len(arrived)
        assert plan.num_arrived[wave] == len(arrived)
    assert not any(event is not None for event in places)
    return [read[event] for event in range(schedule.num_events)], arrived


def models_in_use(schedule, plan):
    """The most models that some later wave still needs, over the moments between waves."""
    wave_of = {event: wave for wave, events in enumerate(members(plan)) for event in events}
    last_use = {}
    for event, model in enumerate(schedule.started_at.tolist()):
        last_use[model] = max(last_use.get(model, -1), wave_of[event])
    made_in = np.searchsorted(plan.num_arrived, np.arange(schedule.num_events) + 1)
    lives = [(made_in[model - 1] if model else -1, last) for model, last in last_use.items()]
    return max(sum(made <= now < last for made, last in lives) for now in range(-1, plan.num_waves))


# closed forms


def test_without_delays_a_wave_is_a_round_of_all_clients():
    schedule = arrivals(5, 40, delays=Delays(), key=KEY)
    assert wave_bounds(schedule).tolist() == list(range(0, 41, 5))
    plan = plan_arrivals(schedule, width=5)
    assert members(plan) == np.arange(40).reshape(8, 5).tolist()
    assert models_in_use(schedule, plan) == 1


def test_a_single_client_trains_alone():
    schedule = arrivals(1, 9, delays=Delays(Exponential(1.0)), key=KEY)
    plan = plan_arrivals(schedule, best_width(schedule, 2.0))
    assert members(plan) == [[event] for event in range(9)]
    assert plan.waves.valid.shape == (9, 1) and plan.num_slots <= 2


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_long_waves_are_cut_to_the_width(width):
    schedule = arrivals(5, 40, delays=Delays(Fixed(1.0)), key=KEY)
    pieces = [list(range(a, min(a + width, b))) for b in range(5, 41, 5) for a in range(b - 5, b, width)]
    assert members(plan_arrivals(schedule, width=width)) == pieces


def test_a_round_is_a_wave_that_needs_no_slots():
    schedule = rounds(7, 6, 3, key=KEY, num_aggregated=2)
    plan = plan_rounds(schedule)
    assert (plan.num_waves, plan.num_slots, plan.waves.valid.shape) == (6, 0, (6, 3)) and plan.waves.valid.all()
    np.testing.assert_array_equal(plan.waves.event.ravel(), np.arange(18))
    for name, column in (
        ("client", schedule.client),
        ("update", schedule.updates()),
        ("aggregated", schedule.aggregated),
    ):
        np.testing.assert_array_equal(getattr(plan.waves, name).ravel(), column)


# measured properties


@pytest.mark.parametrize("num_clients", [30, 300])
def test_waves_are_longer_than_a_birthday_collision(num_clients):
    """Clients take turns, so a wave outlasts draws of uniform clients until one repeats: sqrt(pi n / 2) on average."""
    schedule = arrivals(num_clients, 20 * num_clients, delays=persafl_delays(num_clients, key=KEY), key=KEY)
    lengths = np.diff(wave_bounds(schedule))
    assert np.sqrt(np.pi * num_clients / 2) < lengths.mean() < num_clients
    assert plan_arrivals(schedule, best_width(schedule, 2.0)).num_slots <= num_clients + 1


# random schedules


@small
@given(schedule=schedules(), width=widths, ahead=st.booleans())
def test_every_event_is_trained_once_and_arrives_in_order(schedule, width, ahead):
    plan = plan_arrivals(schedule, width, ahead=ahead)
    read, arrived = replay(schedule, plan)
    assert read == schedule.started_at.tolist()
    assert arrived == list(range(schedule.num_events))
    waves, before = members(plan), np.r_[0, plan.num_arrived]
    assert sorted(event for events in waves for event in events) == list(range(schedule.num_events))
    assert plan.num_waves == len(waves) and all(np.diff(before) > 0)
    for events, first in zip(waves, before[:-1], strict=True):
        clients = schedule.client[events].tolist()
        assert len(set(clients)) == len(clients)
        assert all(schedule.started_at[events] <= first)
        assert len(events) <= width
        assert ahead or events == list(range(first, first + len(events)))
    event, valid = plan.waves.event, plan.waves.valid
    for name, column in (("client", schedule.client), ("update", schedule.updates())):
        np.testing.assert_array_equal(getattr(plan.waves, name)[valid], column[event[valid]])


@small
@given(schedule=schedules(), width=st.integers(1, 9))
def test_training_ahead_takes_no_more_waves(schedule, width):
    plans = {ahead: plan_arrivals(schedule, width, ahead=ahead) for ahead in (True, False)}
    assert plans[True].num_waves <= plans[False].num_waves


def test_training_ahead_fills_waves():
    """Waves of 300 clients are cut off where one is faster than the others; trained ahead, they are full to the end."""
    schedule = arrivals(300, 4096, delays=persafl_delays(300, key=KEY), key=KEY)
    num_waves = {ahead: plan_arrivals(schedule, 32, ahead=ahead).num_waves for ahead in (True, False)}
    assert num_waves[True] < 1.05 * 4096 / 32 < num_waves[False]


@small
@given(schedule=schedules())
def test_waves_are_as_long_as_they_may_be(schedule):
    bounds = wave_bounds(schedule).tolist()
    for begin, end in itertools.pairwise(bounds[:-1]):
        is_later_download = schedule.started_at[end] > begin
        assert is_later_download or schedule.client[end] in schedule.client[begin:end]


@small
@given(schedule=schedules(), width=widths)
def test_slots_are_few(schedule, width):
    """At least the models in use; at most one for each client and the newest, or twice those in use."""
    plan = plan_arrivals(schedule, width)
    used = models_in_use(schedule, plan)
    assert len(set(plan.waves.read[plan.waves.valid].tolist())) == used
    assert used <= plan.num_slots <= schedule.num_clients + 1
    assert 2 * used > schedule.num_clients or plan.num_slots < 2 * used


@small
@given(schedule=schedules(), overhead=st.sampled_from([0.0, 0.5, 2.0, 64.0]), ahead=st.booleans())
def test_the_best_width_costs_least(schedule, overhead, ahead):
    cost = lambda width: plan_arrivals(schedule, width, ahead=ahead).num_waves * (width + overhead)
    best = best_width(schedule, overhead, ahead)
    few = [width for power in range(4) for width in (2**power, 3 * 2**power)]  # few shapes to compile
    assert best in few
    assert cost(best) == min(map(cost, few))
    capped = best_width(schedule, overhead, ahead, most=3)
    assert capped <= 3 and cost(capped) == min(map(cost, (1, 2, 3)))


@pytest.mark.parametrize("overhead", [0.0, 2.0, 64.0])
def test_the_default_width_is_the_best_one(overhead):
    schedule = uniform_arrivals(40, 300, 30, key=KEY)
    algorithm = personax.fedasync(lr=0.1, num_steps=1)
    plan = plan_waves(algorithm, [schedule], None, overhead, ahead=True, num_devices=1)
    assert plan.waves.valid.shape[2] == best_width(schedule, overhead, most=CPU_WAVE_WIDTH)


@small
@given(several=st.lists(schedules(), min_size=1, max_size=4), width=st.integers(1, 5))
def test_stacked_plans_are_the_plans_and_nothing_else(several, width):
    plans = [plan_arrivals(schedule, width) for schedule in several]
    stacked = stack(plans, num_clients=7)
    padded = stacked.waves.valid.shape[1]
    assert stacked.num_waves == max(plan.num_waves for plan in plans)
    half_full = max(-(-2 * schedule.num_events // width) for schedule in several)
    assert padded == next(p for p in (2**k for k in range(20)) if p >= max(stacked.num_waves, half_full))
    assert stacked.num_slots == max(plan.num_slots for plan in plans)
    for seed, (schedule, plan) in enumerate(zip(several, plans, strict=True)):
        own = stacked._replace(waves=Waves(*(array[seed] for array in stacked.waves)))
        assert members(own)[: plan.num_waves] == members(plan)
        assert replay(schedule, own)[0] == schedule.started_at.tolist()
        filler = Waves(*(array[plan.num_waves :] for array in own.waves))
        assert not filler.valid.any() and not filler.aggregated.any()
        assert np.all(filler.client == 7) and np.all(filler.save == stacked.num_slots) and np.all(filler.take < 0)


@pytest.mark.parametrize("num_rounds", [1, 5, 8])
def test_stacked_rounds_are_padded_to_a_power_of_two(num_rounds):
    plans = [plan_rounds(rounds(6, num_rounds, 2, key=jax.random.key(seed))) for seed in range(3)]
    stacked = stack(plans, num_clients=6)
    assert stacked.waves.valid.shape == (3, 2 ** int(np.ceil(np.log2(num_rounds))), 2)
    assert stacked.waves.valid.sum(axis=(1, 2)).tolist() == [2 * num_rounds] * 3 and stacked.num_slots == 0


def test_stacking_leaves_the_plans_alone():
    plans = [plan_arrivals(uniform_arrivals(4, num, 3, key=KEY), 2) for num in (9, 30)]
    before = [[array.copy() for array in plan.waves] for plan in plans]
    stack(plans, num_clients=4)
    for plan, arrays in zip(plans, before, strict=True):
        for now, then in zip(plan.waves, arrays, strict=True):
            np.testing.assert_array_equal(now, then)
