"""Schedules: closed forms, brute-force recounts of every column, measured distributions, random tables."""

import dataclasses
import heapq

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from personax.schedules import Delays, arrivals, persafl_delays, rounds, uniform_arrivals
from personax.schedules.delays import Exponential, Fixed, Gamma, Given, LogNormal, Uniform

KEY = jax.random.key(7)
COLUMNS = ("client", "started_at", "requested", "time", "aggregated", "round_ends")
SCHEDULES = {
    "rounds": lambda: rounds(6, 9, 4, key=KEY, delays=Delays(compute=Exponential(1.0))),
    "arrivals": lambda: arrivals(6, 150, delays=persafl_delays(6, key=KEY), key=KEY),
    "arrivals with pauses": lambda: arrivals(5, 90, delays=Delays(Gamma(1.0), pause=Exponential(2.0)), key=KEY),
    "uniform arrivals": lambda: uniform_arrivals(6, 150, 4, key=KEY),
}
each_schedule = pytest.mark.parametrize("schedule", [make() for make in SCHEDULES.values()], ids=list(SCHEDULES))
small = settings(max_examples=25, deadline=None)


def whole_times(rows, num_clients):
    """Strategies for delays that are whole numbers: ties happen, and sums are exact."""
    row = st.lists(st.integers(0, 3), min_size=num_clients, max_size=num_clients)
    return st.lists(row, min_size=rows, max_size=rows).map(lambda table: Given(np.asarray(table, float)))


def first_events(schedule, num):
    return {name: getattr(schedule, name)[:num].tolist() for name in COLUMNS}


def assert_uniform(counts, expected, spread=1.0):
    """Pearson's statistic stays within five standard deviations of its mean, the degrees of freedom.

    `spread` is the variance of a count over its mean: 1 for independent draws, less where they exclude each other.
    """
    counts = np.asarray(counts, float).ravel()
    freedom = counts.size - 1
    statistic = ((counts - expected) ** 2 / expected).sum() / spread
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), (statistic, freedom)


# closed forms


@pytest.mark.parametrize("wait", [0.0, 1.5])
def test_equal_delays_give_rounds_of_all_clients(wait):
    schedule = arrivals(4, 4 * 70, delays=Delays(compute=Fixed(wait)), key=KEY)
    turn = np.repeat(np.arange(70), 4)
    np.testing.assert_array_equal(schedule.client, np.tile(np.arange(4), 70))
    np.testing.assert_array_equal(schedule.started_at, 4 * turn)
    np.testing.assert_allclose(schedule.time, wait * (turn + 1), rtol=1e-12)
    np.testing.assert_allclose(schedule.requested, wait * turn, rtol=1e-12)


def test_a_client_twice_as_fast_reports_twice_as_often():
    schedule = arrivals(2, 300, delays=Delays(compute=Fixed((1.0, 2.0))), key=KEY)
    assert np.bincount(schedule.client).tolist() == [200, 100]
    own = schedule.client == 0
    np.testing.assert_array_equal(schedule.time[own], 1.0 + np.arange(200))
    np.testing.assert_array_equal(schedule.time[~own], 2.0 * (1 + np.arange(100)))


def test_pauses_delay_requests_and_not_arrivals():
    schedule = arrivals(1, 5, delays=Delays(Fixed(1.0), Fixed(2.0), Fixed(4.0), pause=Fixed(8.0)), key=KEY)
    turn = np.arange(5)
    np.testing.assert_array_equal(schedule.requested, turn * (1 + 2 + 4 + 8))
    np.testing.assert_array_equal(schedule.time, schedule.requested + 1 + 2 + 4)


def test_a_round_lasts_as_long_as_its_slowest_member():
    times = np.array([[1.0, 5.0, 2.0], [4.0, 0.0, 3.0]])
    schedule = rounds(3, 4, key=KEY, delays=Delays(compute=Given(times)))
    members, asked, arrived = (getattr(schedule, n).reshape(4, 3) for n in ("client", "requested", "time"))
    own = np.take_along_axis(times[np.arange(4) % 2], members, axis=1)
    begins = np.r_[0.0, np.cumsum(own.max(axis=1))[:-1]]
    np.testing.assert_array_equal(asked, np.repeat(begins[:, None], 3, axis=1))
    np.testing.assert_array_equal(arrived, begins[:, None] + own)
    np.testing.assert_array_equal(asked[1:, 0], arrived[:-1].max(axis=1))


def test_without_delays_rounds_take_no_time_and_updates_are_fresh():
    schedule = rounds(5, 3, 2, key=KEY)
    assert schedule.time.tolist() == schedule.requested.tolist() == [0.0] * 6
    assert schedule.started_at.tolist() == [0, 0, 2, 2, 4, 4]
    assert schedule.round_ends.tolist() == [False, True] * 3
    assert schedule.staleness().tolist() == [0] * 6 and schedule.aggregated.all()


def test_a_cohort_of_all_clients_is_the_default():
    schedule = rounds(5, 4, key=KEY)
    assert all(sorted(cohort) == [0, 1, 2, 3, 4] for cohort in schedule.client.reshape(4, 5).tolist())


def test_given_and_fixed_times_are_those_given():
    clients, updates = np.array([[0, 1], [1, 0]]), np.array([[0, 0], [5, 4]])
    table, rng = np.arange(6.0).reshape(3, 2), np.random.default_rng(0)
    np.testing.assert_array_equal(Given(table).sample(rng, clients, updates), table[updates % 3, clients])
    np.testing.assert_array_equal(Fixed((3.0, 4.0)).sample(rng, clients, updates), [[3.0, 4.0], [4.0, 3.0]])
    np.testing.assert_array_equal(Fixed(2.0).sample(rng, clients, updates), np.full((2, 2), 2.0))


@pytest.mark.parametrize("num_clients", [1, 30])
def test_persafl_uploads_take_four_to_six_times_as_long_as_downloads(num_clients):
    delays = persafl_delays(num_clients, download_mean=0.5, key=KEY)
    ratio = np.asarray(delays.upload.mean) / delays.download.mean
    assert ratio.shape == (num_clients,) and ratio.min() >= 4 and ratio.max() <= 6
    assert delays.compute == Fixed(0.0) and delays.pause == Fixed(0.0)


# identities: recounts


@each_schedule
def test_updates_count_earlier_events_of_the_same_client(schedule):
    clients = schedule.client.tolist()
    assert schedule.updates().tolist() == [clients[:event].count(who) for event, who in enumerate(clients)]


@pytest.mark.parametrize("buffer_size", [1, 2, 7])
@pytest.mark.parametrize("name", ["arrivals", "arrivals with pauses", "uniform arrivals"])
def test_staleness_counts_server_steps(name, buffer_size):
    schedule = SCHEDULES[name]()
    version, versions = 0, [0]  # of the model after each event
    for event in range(schedule.num_events):
        version += (event + 1) % buffer_size == 0
        versions.append(version)
    expected = [versions[event] - versions[s] for event, s in enumerate(schedule.started_at)]
    assert schedule.staleness(buffer_size).tolist() == expected


@each_schedule
def test_active_share_counts_clients_in_flight(schedule):
    times = np.r_[0.0, np.linspace(0, schedule.time.max(), 40), schedule.time[::7], schedule.requested[::7]]
    received, time = np.r_[schedule.received, schedule.pending], np.r_[schedule.time, np.inf + schedule.pending]
    in_flight = (received[:, None] <= times) & (times < time[:, None])
    np.testing.assert_allclose(schedule.active_share(times), in_flight.sum(axis=0) / schedule.num_clients)


@each_schedule
def test_a_client_never_has_two_updates_in_flight(schedule):
    for client in range(schedule.num_clients):
        events = np.flatnonzero(schedule.client == client)
        assert np.all(schedule.started_at[events] <= events)
        assert np.all(schedule.started_at[events[1:]] > events[:-1])
        assert np.all(schedule.requested[events] <= schedule.time[events])
        assert np.all(schedule.requested[events[1:]] >= schedule.time[events[:-1]])


@pytest.mark.parametrize("name", ["arrivals", "arrivals with pauses", "uniform arrivals"])
def test_arrivals_come_in_the_order_of_time_and_have_no_rounds(name):
    schedule = SCHEDULES[name]()
    assert np.all(np.diff(schedule.time) >= 0)
    assert schedule.aggregated.all() and not schedule.round_ends.any() and not schedule.has_rounds


@pytest.mark.parametrize("name", ["arrivals", "arrivals with pauses", "uniform arrivals"])
def test_started_at_counts_the_arrivals_before_the_request(name):
    schedule = SCHEDULES[name]()
    expected = [int(np.sum(schedule.time <= asked)) for asked in schedule.requested]
    assert schedule.started_at.tolist() == expected


LENGTHS = {  # name: (schedule of a length, events for each unit of length)
    "arrivals": (lambda n: arrivals(5, n, delays=persafl_delays(5, key=KEY), key=KEY), 1),
    "cohorts": (lambda n: rounds(9, n, 4, key=KEY, num_aggregated=2), 4),
    "rounds with one random delay": (lambda n: rounds(9, n, 4, key=KEY, delays=Delays(Exponential(1.0))), 4),
    "rounds with two random delays": (lambda n: rounds(9, n, 4, key=KEY, delays=persafl_delays(9, key=KEY)), 4),
    "uniform arrivals": (lambda n: uniform_arrivals(5, n, 6, key=KEY), 1),
}


@pytest.mark.parametrize(
    "name",
    [
        "arrivals",
        "cohorts",
        "rounds with one random delay",
        "rounds with two random delays",
        "uniform arrivals",
    ],
)
def test_a_longer_schedule_begins_like_a_shorter_one(name):
    make, each = LENGTHS[name]
    for num in (3, 40, 130):
        assert first_events(make(330), num * each) == first_events(make(num), num * each)


def test_another_key_gives_another_schedule():
    delays = Delays(Exponential(1.0))
    for make in (
        lambda key: arrivals(5, 50, delays=delays, key=key),
        lambda key: rounds(5, 25, 2, delays=delays, key=key),
    ):
        one, same, other = (make(jax.random.key(seed)) for seed in (0, 0, 1))
        assert first_events(one, 50) == first_events(same, 50)
        assert one.client.tolist() != other.client.tolist() and not np.any(one.time == other.time)


@pytest.mark.parametrize("pause", [Fixed(0.1), Exponential(1.0)])
def test_an_update_never_starts_from_a_model_after_it(pause):
    schedule = arrivals(3, 400, delays=Delays(pause=pause), key=KEY)
    assert np.all(schedule.requested <= schedule.time)
    assert np.all(schedule.started_at <= np.arange(400))


def test_active_share_at_the_end_of_a_schedule_is_that_of_a_longer_one():
    make = LENGTHS["arrivals"][0]
    times = np.linspace(0, make(100).time[-1], 30)
    np.testing.assert_allclose(make(100).active_share(times), make(300).active_share(times))


# measured properties


@pytest.mark.parametrize(
    ("delay", "mean", "deviation"),
    [
        (Exponential(2.0), 2.0, 2.0),
        (Exponential((2.0, 7.0)), np.array([2.0, 7.0]), np.array([2.0, 7.0])),
        (LogNormal(3.0, 0.5), 3.0, 3.0 * np.sqrt(np.expm1(0.5**2))),
        (LogNormal((3.0, 1.0), 0.8), np.array([3.0, 1.0]), np.array([3.0, 1.0]) * np.sqrt(np.expm1(0.8**2))),
        (Gamma(5.0, 4.0), 5.0, 5.0 / np.sqrt(4.0)),
        (Gamma((5.0, 0.1)), np.array([5.0, 0.1]), np.array([5.0, 0.1]) / np.sqrt(2.0)),
    ],
    ids=str,
)
def test_delays_have_their_mean_and_spread(delay, mean, deviation):
    num = 40_000
    clients = np.broadcast_to(np.arange(2), (num, 2))
    times = delay.sample(np.random.default_rng(5), clients, np.zeros_like(clients))
    assert np.all(times > 0)
    assert np.all(np.abs(times.mean(axis=0) - mean) < 5 * deviation / np.sqrt(num))
    np.testing.assert_allclose(times.std(axis=0), np.broadcast_to(deviation, 2), rtol=0.08)


def test_the_log_of_a_log_normal_delay_has_the_given_spread():
    clients = np.zeros(40_000, int)
    logs = np.log(LogNormal(3.0, 0.5).sample(np.random.default_rng(1), clients, clients))
    assert abs(logs.std() - 0.5) < 5 * 0.5 / np.sqrt(2 * len(logs))


def test_persafl_factors_are_uniform():
    factors = np.asarray(persafl_delays(4000, key=KEY).upload.mean)
    assert_uniform(np.histogram(factors, bins=10, range=(4, 6))[0], 400)


def test_cohorts_and_aggregated_members_are_uniform():
    n, size, chosen, num = 12, 5, 2, 2000
    schedule = rounds(n, num, size, key=KEY, num_aggregated=chosen)
    # A client is in a cohort with probability p = size / n: variance p (1 - p), and counts that sum to a constant.
    for mask, per_round in ((np.ones(schedule.num_events, bool), size), (schedule.aggregated, chosen)):
        counts = np.bincount(schedule.client[mask], minlength=n)
        assert_uniform(counts, num * per_round / n, spread=(1 - per_round / n) * n / (n - 1))
    places = schedule.aggregated.reshape(num, size).sum(axis=0)
    assert_uniform(places, num * chosen / size, spread=(1 - chosen / size) * size / (size - 1))


def test_uniform_arrivals_satisfy_assumption_1():
    n, num, bound = 8, 8000, 5
    schedule = uniform_arrivals(n, num, bound, key=KEY)
    assert_uniform(np.bincount(schedule.client, minlength=n), num / n)
    assert schedule.staleness().max() == bound and schedule.staleness().min() == 0
    # Where the client's last update is older than the bound, all ages are equally likely.
    previous, free = {}, []
    for event, who in enumerate(schedule.client.tolist()):
        if event - previous.get(who, -1) > bound:
            free.append(event)
        previous[who] = event
    assert_uniform(np.bincount(schedule.staleness()[free], minlength=bound + 1), len(free) / (bound + 1))


def test_about_80_percent_are_active_in_the_setting_of_persafl():
    """Section 5: with uploads 4 to 6 times as long as downloads a client works or uploads 4/5 to 6/7 of the time."""
    schedule = arrivals(100, 20_000, delays=persafl_delays(100, key=KEY), key=KEY)
    share = schedule.active_share(np.linspace(0.1, 1, 200) * schedule.time[-1])
    assert 4 / 5 - 0.02 < share.mean() < 6 / 7 + 0.02


def test_a_model_at_receipt_is_that_of_the_end_of_the_download():
    """PersA-FL's Omega(t): the arrivals before the receipt are counted, where the request counts fewer."""
    asked, received = (
        arrivals(30, 3000, delays=persafl_delays(30, key=KEY), key=KEY, model_at=at) for at in ("request", "receipt")
    )
    for name in ("client", "requested", "received", "time"):
        np.testing.assert_array_equal(getattr(asked, name), getattr(received, name))
    np.testing.assert_array_equal(asked.started_at, np.searchsorted(asked.time, asked.requested, side="right"))
    np.testing.assert_array_equal(received.started_at, np.searchsorted(received.time, received.received, side="right"))
    assert asked.staleness()[1000:].mean() == pytest.approx(29.0, abs=0.5)  # all others, if no client pauses
    assert received.staleness()[1000:].mean() == pytest.approx(29.0 * 5 / 6, abs=1.0)  # without the download's share


def test_uniform_times_keep_their_bounds_and_their_mean():
    times = Uniform((1.0, 10.0), spread=0.5).sample(np.random.default_rng(0), np.tile([0, 1], (5000, 1)), np.zeros(1))
    assert times.min(axis=0) == pytest.approx([0.5, 5.0], rel=0.01) and (times >= [0.5, 5.0]).all()
    assert times.max(axis=0) == pytest.approx([1.5, 15.0], rel=0.01) and (times <= [1.5, 15.0]).all()
    np.testing.assert_allclose(times.mean(axis=0), [1.0, 10.0], rtol=0.02)


def test_equal_delays_keep_every_client_in_flight():
    """At the end of a schedule too, where only part of those that arrive together are in the table."""
    schedule = arrivals(4, 10, delays=Delays(upload=Fixed(1.0)), key=KEY)
    np.testing.assert_array_equal(schedule.active_share(np.array([0.0, 0.5, 1.0, 2.5])), 1)
    assert np.all(schedule.active_share(np.linspace(0, 3, 31)) <= 1)


def test_given_times_are_read_round_by_round():
    times = np.arange(1.0, 101.0)[:, None] * np.ones((1, 3))
    schedule = rounds(3, 150, 2, key=KEY, delays=Delays(upload=Given(times)))
    lasted = np.diff(schedule.time[1::2], prepend=0.0)
    np.testing.assert_allclose(lasted, np.r_[np.arange(1, 101), np.arange(1, 51)])


# errors


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: rounds(3, 1, key=jax.random.split(KEY, 2)), "take a single key"),
        (
            lambda: dataclasses.replace(rounds(3, 2, key=KEY), num_clients=2),
            r"`client` must lie in 0\.\.1, got up to 2",
        ),
        (lambda: dataclasses.replace(rounds(3, 2, key=KEY), time=np.zeros(5)), "one entry for each of its 6 events"),
        (lambda: dataclasses.replace(rounds(3, 2, key=KEY), started_at=np.arange(1, 7)), "not be later than the event"),
        (lambda: dataclasses.replace(rounds(3, 2, key=KEY), round_ends=np.arange(6) % 4 == 1), "have equal length"),
        (lambda: rounds(0, 1, key=KEY), "`num_clients` must be a whole number of at least 1, got 0"),
        (lambda: rounds(3, 0, key=KEY), "`num_rounds` must be a whole number of at least 1, got 0"),
        (lambda: rounds(3, 1, 4, key=KEY), "`cohort_size` must be at most the 3 clients of the federation, got 4"),
        (lambda: rounds(3, 1, 2.5, key=KEY), "`cohort_size` must be a whole number of at least 1, got 2.5"),
        (lambda: rounds(3, 1, 2, key=KEY, num_aggregated=3), "`num_aggregated` must be at most the 2 members"),
        (lambda: rounds(3, 1, 2, key=KEY, num_aggregated=0), "`num_aggregated` must be a whole number of at least 1"),
        (lambda: arrivals(0, 1, delays=Delays(), key=KEY), "`num_clients`"),
        (lambda: arrivals(1, 0, delays=Delays(), key=KEY), "`num_events`"),
        (lambda: arrivals(1, 1, delays=Delays(), key=KEY, model_at="arrival"), "`model_at`"),
        (lambda: Uniform(1.0, spread=2.0), "`spread` must lie in"),
        (lambda: uniform_arrivals(2, 3, -1, key=KEY), "`max_staleness` must be a whole number of at least 0, got -1"),
        (lambda: persafl_delays(0, key=KEY), "`num_clients`"),
        (lambda: persafl_delays(2, download_mean=0.0, key=KEY), "`download_mean` must be positive, got 0.0"),
        (lambda: Exponential(0.0), "`mean` must be positive, got 0.0. For no delay, omit it"),
        (lambda: Gamma((1.0, -1.0)), r"`mean` must be positive, got \(1.0, -1.0\)"),
        (lambda: Gamma(1.0, 0.0), "`shape` must be positive"),
        (lambda: LogNormal(1.0, -0.5), "`spread` must be positive, got -0.5"),
        (lambda: Fixed(-1.0), "`mean` must not be negative, got -1.0"),
        (lambda: Fixed(np.inf), "`mean` must not be negative, got inf"),
        (lambda: Given(np.ones(3)), r"`times` must be an array \[updates, clients\], got shape \(3,\)"),
        (lambda: Given(-np.ones((1, 3))), "`times` must not be negative"),
    ],
)
def test_errors_name_the_problem(make, match):
    with pytest.raises(ValueError, match=match):
        make()


# random tables


def replay(num_clients, num_events, flight, pause):
    """The rule of `arrivals` as an event queue: by time, then updates, then requests before arrivals, then position."""
    queue = [(0.0, 0, 0, client) for client in range(num_clients)]
    heapq.heapify(queue)
    table, asked, started = [], {}, {}
    while len(table) < num_events:
        time, update, is_arrival, client = heapq.heappop(queue)
        if not is_arrival:
            asked[client], started[client] = time, len(table)
            heapq.heappush(queue, (time + flight[update % len(flight)][client], update, 1, client))
        else:
            table.append((client, started[client], asked[client], time))
            heapq.heappush(queue, (time + pause[update % len(pause)][client], update + 1, 0, client))
    return table


@small
@given(flight=whole_times(3, 3), pause=whole_times(2, 3), num_events=st.integers(1, 260))
def test_arrivals_replay_an_event_queue(flight, pause, num_events):
    schedule = arrivals(3, num_events, delays=Delays(compute=flight, pause=pause), key=KEY)
    columns = (schedule.client, schedule.started_at, schedule.requested, schedule.time)
    table = list(zip(*(column.tolist() for column in columns), strict=True))
    assert table == replay(3, num_events, flight.times, pause.times)


@small
@given(data=st.data(), num_clients=st.integers(1, 12), num_rounds=st.integers(1, 6), seed=st.integers(0, 2**31 - 1))
def test_cohorts_are_distinct_and_aggregate_an_exact_number(data, num_clients, num_rounds, seed):
    size = data.draw(st.integers(1, num_clients))
    chosen = data.draw(st.none() | st.integers(1, size))
    schedule = rounds(num_clients, num_rounds, size, key=jax.random.key(seed), num_aggregated=chosen)
    cohorts = schedule.client.reshape(num_rounds, size)
    assert all(len(set(cohort)) == size and set(cohort) <= set(range(num_clients)) for cohort in cohorts.tolist())
    assert schedule.aggregated.reshape(num_rounds, size).sum(axis=1).tolist() == [chosen or size] * num_rounds
    assert np.flatnonzero(schedule.round_ends).tolist() == [size * (r + 1) - 1 for r in range(num_rounds)]


@small
@given(
    num_clients=st.integers(1, 6),
    num_events=st.integers(1, 60),
    bound=st.integers(0, 9),
    seed=st.integers(0, 2**31 - 1),
)
def test_uniform_arrivals_keep_their_bound(num_clients, num_events, bound, seed):
    schedule = uniform_arrivals(num_clients, num_events, bound, key=jax.random.key(seed))
    assert schedule.staleness().min() >= 0 and schedule.staleness().max() <= bound
    for client in range(num_clients):
        events = np.flatnonzero(schedule.client == client)
        assert np.all(schedule.started_at[events[1:]] > events[:-1])
