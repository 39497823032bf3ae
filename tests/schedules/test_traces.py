"""Device traces: schedules against an event loop of single clients, files and their errors, generated devices."""

import heapq

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from personax.schedules import VisitWork, arrivals, rounds, traces
from personax.schedules.availability import AlwaysOnline, Availability
from personax.schedules.delays import Delays, Exponential, Gamma
from personax.schedules.traces import DeviceDelays, Devices

KEY = jax.random.key(5)
small = settings(max_examples=30, deadline=None)


@st.composite
def whole_delays(draw, num_clients=4, always=False):
    """Delays of devices in whole seconds, so that sums are exact, and ties happen."""
    times = lambda least: np.array(draw(st.lists(st.integers(least, 3), min_size=num_clients, max_size=num_clients)))
    offsets, starts, ends = [0], [], []
    for _ in range(num_clients):
        edges = sorted(draw(st.sets(st.integers(0, 12), min_size=2, max_size=6)))
        edges = edges[: len(edges) // 2 * 2]
        starts += edges[::2]
        ends += edges[1::2]
        offsets.append(len(starts))
    online = Availability(np.array(offsets), np.array(starts, float), np.array(ends, float), 12.0)
    parts = (times(0).astype(float), times(1).astype(float), times(0).astype(float))
    return DeviceDelays(np.arange(num_clients), *parts, AlwaysOnline() if always else online)


class Clock:
    """One device, second by second."""

    def __init__(self, delays, client):
        online, device = delays.online, delays.device[client]
        part = slice(online.offsets[device], online.offsets[device + 1])
        self.intervals = list(zip(online.start[part], online.end[part], strict=True))
        self.period = online.period

    def is_online(self, time):
        return any(start <= time % self.period < end for start, end in self.intervals)

    def after(self, time, seconds):
        """The time at which a device has worked for some whole seconds from a time on."""
        while seconds > 0:
            seconds -= self.is_online(time)
            time += 1
        return time

    def next_online(self, time):
        while not self.is_online(time):
            time += 1
        return time


def visit(delays, client, time):
    """The request, the receipt and the arrival of a visit, from a time on."""
    clock, requested = Clock(delays, client), None
    requested = clock.next_online(time)
    received = clock.after(requested, delays.download[client])
    return requested, received, clock.after(received, delays.compute[client] + delays.upload[client])


def replay(delays, num_events):
    """Arrivals as an event queue: by time, then updates, then requests before arrivals, then position."""
    queue = [(visit(delays, client, 0)[0], 0, 0, client) for client in range(len(delays.device))]
    heapq.heapify(queue)
    table, began, started = [], {}, {}
    while len(table) < num_events:
        time, update, is_arrival, client = heapq.heappop(queue)
        if not is_arrival:
            began[client], started[client] = visit(delays, client, time), len(table)
            heapq.heappush(queue, (began[client][2], update, 1, client))
        else:
            table.append((client, started[client], *began[client]))
            heapq.heappush(queue, (visit(delays, client, time)[0], update + 1, 0, client))
    return table


def rows(schedule):
    columns = (schedule.client, schedule.started_at, schedule.requested, schedule.received, schedule.time)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@small
@given(delays=whole_delays(), num_events=st.integers(1, 60))
def test_arrivals_with_availability_replay_an_event_queue(delays, num_events):
    assert rows(arrivals(4, num_events, delays=delays, key=KEY)) == replay(delays, num_events)


@small
@given(delays=whole_delays(num_clients=6), num_events=st.integers(1, 50), concurrency=st.integers(1, 6))
def test_limited_arrivals_keep_clients_busy_and_their_times(delays, num_events, concurrency):
    schedule = arrivals(6, num_events, delays=delays, key=KEY, concurrency=concurrency)
    at_work, freed = {}, 0.0
    for client, started_at, requested, received, time in rows(schedule):
        begun = [moment for moment in (0.0, *schedule.time.tolist()) if moment <= requested]
        assert any(visit(delays, client, moment) == (requested, received, time) for moment in begun)
        assert started_at == min(np.sum(schedule.time <= requested), len(at_work))
        assert time >= freed
        at_work[len(at_work)], freed = (requested, time), time
    intervals = np.array(list(at_work.values()))
    for moment in intervals[:, 0]:
        assert np.sum((intervals[:, 0] <= moment) & (moment < intervals[:, 1])) <= concurrency
    for client in range(6):
        own = schedule.client == client
        assert np.all(schedule.requested[own][1:] >= schedule.time[own][:-1])


@small
@given(delays=whole_delays(num_clients=5), size=st.integers(1, 5), deadline=st.none() | st.integers(1, 9))
def test_rounds_of_devices_take_the_times_of_their_members(delays, size, deadline):
    schedule = rounds(5, 6, size, key=KEY, delays=delays, deadline=deadline)
    begin = 0.0
    for at in range(6):
        part = slice(at * size, (at + 1) * size)
        expected = np.array([visit(delays, client, begin) for client in schedule.client[part]])
        end = expected[:, 2].max() if deadline is None else min(expected[:, 2].max(), begin + deadline)
        np.testing.assert_array_equal(schedule.requested[part], np.minimum(expected[:, 0], end))
        np.testing.assert_array_equal(schedule.time[part], np.minimum(expected[:, 2], end))
        np.testing.assert_array_equal(schedule.reported[part], expected[:, 2] <= end)
        np.testing.assert_array_equal(schedule.aggregated[part], expected[:, 2] <= end)
        online = [client for client in range(5) if Clock(delays, client).is_online(begin)]
        assert len(set(schedule.client[part]) & set(online)) == min(size, len(online))
        begin = end


def test_the_first_to_report_are_aggregated_and_end_the_round():
    delays = DeviceDelays(np.arange(4), np.zeros(4), np.array([4.0, 1.0, 3.0, 2.0]), np.zeros(4), AlwaysOnline())
    schedule = rounds(4, 3, 4, key=KEY, delays=delays, num_aggregated=2, aggregate="first")
    assert schedule.time.reshape(3, 4).max(axis=1).tolist() == [2.0, 4.0, 6.0]
    for cohort, kept in zip(schedule.client.reshape(3, 4), schedule.aggregated.reshape(3, 4), strict=True):
        assert sorted(cohort[kept]) == [1, 3]
    assert (schedule.reported == schedule.aggregated).all()
    late = rounds(4, 3, 4, key=KEY, delays=delays, num_aggregated=2, aggregate="first", deadline=1.5)
    assert late.time.reshape(3, 4).max(axis=1).tolist() == [1.5, 3.0, 4.5] and late.aggregated.sum() == 3
    nobody = rounds(4, 2, 4, key=KEY, delays=delays, deadline=0.5)
    assert not nobody.reported.any() and nobody.time.max() == 1.0


def fractional(num_clients, seed=0):
    """Delays of devices whose sums are rounded."""
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.uniform(0, 100.0, (num_clients, 6)), axis=1)
    online = Availability(np.arange(num_clients + 1) * 3, edges[:, ::2].ravel(), edges[:, 1::2].ravel(), 100.0)
    return DeviceDelays(np.arange(num_clients), *rng.uniform(0.01, 9.0, (3, num_clients)), online)


@pytest.mark.parametrize("concurrency", [1, 7, 40])
def test_a_limited_server_sends_the_model_after_the_arrival_that_caused_it(concurrency):
    schedule = arrivals(40, 4000, delays=fractional(40), key=KEY, concurrency=concurrency)
    causes = np.sort(np.r_[np.zeros(concurrency), schedule.time])
    visits = np.sort(np.r_[schedule.requested, np.full(concurrency, np.inf)])  # in flight after the last arrival
    assert np.all(visits[: len(schedule.time)] >= causes[: len(schedule.time)])
    np.testing.assert_array_equal(
        schedule.started_at, np.minimum((schedule.time <= schedule.requested[:, None]).sum(axis=1), np.arange(4000))
    )
    for client in range(40):
        own = np.flatnonzero(schedule.client == client)
        assert np.all(schedule.requested[own[1:]] >= schedule.time[own[:-1]])
        assert np.all(schedule.started_at[own[1:]] > own[:-1])  # not older than the client's own update


def test_no_client_starts_from_a_model_older_than_its_own_update():
    for seed in range(5):
        schedule = arrivals(40, 4000, delays=fractional(40, seed), key=KEY)
        for client in range(40):
            own = np.flatnonzero(schedule.client == client)
            assert np.all(schedule.requested[own[1:]] >= schedule.time[own[:-1]])
            assert np.all(schedule.started_at[own[1:]] > own[:-1])


def test_with_all_clients_active_a_limited_server_is_an_unlimited_one():
    delays = fractional(12)
    limited, plain = (arrivals(12, 500, delays=delays, key=KEY, concurrency=limit) for limit in (12, None))
    np.testing.assert_array_equal(limited.client, plain.client)
    np.testing.assert_array_equal(limited.started_at, plain.started_at)
    np.testing.assert_allclose(limited.time, plain.time, rtol=1e-12)
    many = arrivals(20_000, 20_000, delays=fractional(20_000), key=KEY, concurrency=20_000)  # in linear time
    assert many.num_events == 20_000


def test_a_limited_server_draws_uniformly_among_idle_clients():
    delays = DeviceDelays(np.arange(5), np.zeros(5), np.ones(5), np.zeros(5), AlwaysOnline())
    schedule = arrivals(5, 20_000, delays=delays, key=KEY, concurrency=1)
    np.testing.assert_allclose(np.bincount(schedule.client) / 20_000, 0.2, atol=0.015)
    pairs = np.bincount(5 * schedule.client[:-1] + schedule.client[1:], minlength=25) / 19_999
    np.testing.assert_allclose(pairs, 0.04, atol=0.008)


def test_cohorts_can_be_replaced():
    for delays in (fractional(9), Delays(Exponential(1.0), Gamma(tuple(range(1, 10))))):
        schedule = rounds(9, 70, 3, key=KEY, delays=delays, deadline=20.0)
        cohorts = np.array([[8, 1, 0], [2, 3, 4]])
        changed = schedule.with_cohorts(0, cohorts)
        assert changed.client.reshape(70, 3)[:2].tolist() == cohorts.tolist()
        given = rounds(9, 70, 3, key=KEY, delays=delays, deadline=20.0, cohorts=cohorts)
        again = changed.with_cohorts(2, [None] * 68)
        assert again.begins_with(given) and given.begins_with(again)
        late = schedule.with_cohorts(66, [cohorts[0]])
        assert late.client.reshape(70, 3)[66].tolist() == [8, 1, 0]
        for name in ("client", "requested", "time", "reported", "aggregated"):
            np.testing.assert_array_equal(getattr(late, name)[: 3 * 66], getattr(schedule, name)[: 3 * 66])
        same = schedule.with_cohorts(0, schedule.client.reshape(70, 3)[:4])
        assert same.begins_with(schedule) and schedule.begins_with(same)
        np.testing.assert_array_equal(late.updates(3 * 60, 3 * 68), late.updates()[3 * 60 : 3 * 68])


def test_a_download_that_has_not_begun_is_not_counted():
    online = Availability(np.arange(4), np.array([0.0, 5.0, 2.0]), np.array([50.0, 50.0, 50.0]), 50.0)
    delays = DeviceDelays(np.arange(3), np.ones(3), np.ones(3), np.ones(3), online)
    schedule = rounds(3, 1, 3, key=KEY, delays=delays, deadline=4.0)
    of = dict(zip(schedule.client.tolist(), zip(schedule.reported, schedule.downloaded, strict=True), strict=True))
    assert of == {0: (True, True), 1: (False, False), 2: (False, True)}


def test_a_million_seconds_keep_their_precision():
    """The vectorized clock, the scalar one and a sum of intervals agree far from the beginning."""
    rng = np.random.default_rng(0)
    online = traces.generate(50, key=KEY).online
    scalars, device = online.scalars(), rng.integers(50, size=400)
    time = rng.uniform(0, 1e6, 400)
    worked = online.worked(device, time)
    for name, given_ in (("worked", time), ("online_from", time), ("ends", worked)):
        own = [getattr(scalars, name)(int(d), float(t)) for d, t in zip(device, given_, strict=True)]
        np.testing.assert_array_equal(getattr(online, name)(device, given_), own)
    for d, t, w in zip(device[:50], time, worked, strict=False):
        part = slice(online.offsets[d], online.offsets[d + 1])
        turns = np.arange(12)[:, None] * online.period
        inside = np.clip(np.minimum(turns + online.end[part], t) - (turns + online.start[part]), 0, None)
        assert w == pytest.approx(inside.sum(), abs=1e-6)
    begins = online.online_from(device, time)
    np.testing.assert_allclose(begins, np.maximum(time, online.begins(device, worked)), rtol=1e-12)
    assert np.all(begins >= time) and np.array_equal(online.online_from(device, begins), begins)


# devices


def test_delays_follow_from_the_device_the_samples_and_the_bytes():
    phones = Devices(np.array([10.0, 40.0]), np.array([1e3, 1e4]), np.array([5e3, 2e4]))
    delays = phones.delays(VisitWork(np.array([20.0, 60.0]), 2e3, 1e4), key=KEY, assign="in_order")
    assert delays.compute.tolist() == [2.0, 1.5]
    assert delays.upload.tolist() == [2.0, 0.2] and delays.download.tolist() == [2.0, 0.5]


def test_a_client_keeps_its_device_whoever_else_is_there():
    phones = traces.generate(40, key=KEY)
    everyone = phones.delays(VisitWork(np.ones(30), 1.0, 1.0), key=KEY)
    some = np.array([3, 17, 29])
    few = phones.delays(VisitWork(np.ones(3), 1.0, 1.0, ids=some), key=KEY)
    np.testing.assert_array_equal(few.device, everyone.device[some])
    assert len(set(everyone.device.tolist())) > 10
    other = phones.delays(VisitWork(np.ones(30), 1.0, 1.0), key=jax.random.key(6))
    assert other.device.tolist() != everyone.device.tolist()


def test_generated_devices_have_their_distributions():
    made = traces.generate(20_000, mean_speed=8.0, speed_spread=0.7, key=KEY)
    logs = np.log(made.samples_per_second)
    assert abs(made.samples_per_second.mean() - 8.0) < 0.2 and abs(logs.std() - 0.7) < 0.02
    assert abs(made.download.mean() / 2.5e6 - 1) < 0.02 and abs(made.download.std() / 1.25e6 - 1) < 0.05
    ratio = made.download / made.upload
    assert ratio.min() >= 4 and ratio.max() <= 6 and abs(ratio.mean() - 5) < 0.02
    hours = 3600.0 * np.arange(24) + 1
    share = [np.mean(made.online.online_from(np.arange(20_000), np.full(20_000, hour)) == hour) for hour in hours]
    rate = np.mean([s / (0.4 * np.sin(2 * np.pi * h / 24) + 0.5) for h, s in enumerate(share)])
    np.testing.assert_allclose(share, rate * (0.4 * np.sin(2 * np.pi * np.arange(24) / 24) + 0.5), atol=0.02)
    assert np.mean(share) == pytest.approx(made.online.share, abs=1e-9)
    assert traces.generate(5, unavailability=None, key=KEY).online == AlwaysOnline()


# files

DEVICES = "device,samples_per_second,upload,download\na,10,1000,5000\nb,40,1e4,2e4\n"
INTERVALS = "device,start,end\nb,0,10\na,20,30\na,0,5\n"


def write(folder, devices=DEVICES, intervals=INTERVALS):
    (folder / "devices.csv").write_text(devices)
    (folder / "online.csv").write_text(intervals)
    return folder / "devices.csv", folder / "online.csv"


def test_files_are_read(tmp_path):
    devices, intervals = write(tmp_path)
    found = traces.read(devices, intervals, period=40.0)
    assert found.names == ("a", "b") and found.samples_per_second.tolist() == [10.0, 40.0]
    assert found.upload.tolist() == [1000.0, 1e4] and found.download.tolist() == [5000.0, 2e4]
    online = found.online
    assert online.offsets.tolist() == [0, 2, 3] and online.start.tolist() == [0.0, 20.0, 0.0]
    assert online.end.tolist() == [5.0, 30.0, 10.0] and online.period == 40.0
    assert traces.read(devices, intervals).online.period == 30.0
    assert traces.read(devices).online == AlwaysOnline()


@pytest.mark.parametrize(
    "devices, intervals, match",
    [
        ("device,upload,download\na,1,1\n", INTERVALS, r"devices.csv has no column `samples_per_second`. It needs"),
        ("device,samples_per_second,upload,download\n", INTERVALS, "devices.csv has no rows below its header"),
        (DEVICES + "c,1,fast,1\n", INTERVALS, r"devices.csv, row 4, column `upload`: must be a number, got 'fast'"),
        (DEVICES + "c,1,,1\n", INTERVALS, r"row 4, column `upload`: must be a number, got ''"),
        (DEVICES + "c,nan,1,1\n", INTERVALS, r"row 4, column `samples_per_second`: must be a number, got 'nan'"),
        (DEVICES + "c,1,0,1\n", INTERVALS, r"row 4, column `upload`: must be positive, got 0"),
        (DEVICES + "c,1,1\n", INTERVALS, r"row 4: must have 4 entries, got 3"),
        (DEVICES + ",1,1,1\n", INTERVALS, r"row 4, column `device`: missing value"),
        (DEVICES + "a,1,1,1\n", INTERVALS, r"row 4, column `device`: 'a' is also in row 2"),
        (DEVICES + "c,1,1,1\n", INTERVALS, r"online.csv: device 'c' has no interval"),
        (DEVICES, INTERVALS + "c,1,2\n", r"online.csv, row 5, column `device`: 'c' is not in the file of devices"),
        (DEVICES, INTERVALS + "b,12,11\n", r"online.csv, row 5, column `end`: must be after the start 12, got 11"),
        (DEVICES, INTERVALS + "b,-1,11\n", r"online.csv, row 5, column `start`: must not be negative"),
        (DEVICES, INTERVALS + "b,9,11\n", r"online.csv, row 5, column `start`: overlaps row 2 of device 'b'"),
    ],
)
def test_errors_of_files_name_the_place(devices, intervals, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        traces.read(*write(tmp_path, devices, intervals))


def test_a_pickle_is_not_a_trace(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_bytes(b"\x80\x04\x95\x8d\xff\x00")
    with pytest.raises(ValueError, match="not a CSV file in UTF-8"):
        traces.read(path)
    with pytest.raises(FileNotFoundError, match="File not found"):
        traces.read(tmp_path / "none.csv")


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: Availability(np.array([0, 1]), np.array([1.0]), np.array([1.0]), 5.0), "sorted, disjoint"),
        (lambda: Availability(np.array([0, 0, 1]), np.array([1.0]), np.array([2.0]), 5.0), "at least one interval"),
        (lambda: Availability(np.array([0, 1]), np.array([1.0]), np.array([9.0]), 5.0), "between 0 and the period"),
        (lambda: VisitWork(np.ones(2), 1.0, 1.0, ids=np.arange(3)), "one entry for each of the 2 clients"),
        (lambda: traces.generate(3, unavailability=1.0, key=KEY), "strictly between 0 and 1"),
        (lambda: traces.generate(0, key=KEY), "`num_devices`"),
        (
            lambda: traces.generate(3, key=KEY).delays(VisitWork(np.ones(5), 1.0, 1.0), key=KEY, assign="in_order"),
            "The trace has 3 devices, and a client has the id 4",
        ),
        (lambda: traces.generate(3, key=KEY).delays(VisitWork(np.ones(5), 1.0, 1.0), key=KEY, assign="x"), "`assign`"),
        (
            lambda: arrivals(
                4, 9, delays=traces.generate(3, key=KEY).delays(VisitWork(np.ones(5), 1.0, 1.0), key=KEY), key=KEY
            ),
            "The delays are for 5 clients, but the schedule has 4",
        ),
        (lambda: rounds(4, 2, 2, key=KEY, cohorts=[[1, 1]]), "different clients in 0..3"),
        (lambda: rounds(4, 2, 2, key=KEY, cohorts=[[1, 2, 3]]), r"must be \[at most 2 rounds, 2 clients\]"),
        (lambda: rounds(4, 2, 2, key=KEY, cohorts=[[1, -1]]), "different clients in 0..3"),
        (lambda: rounds(4, 2, 2, key=KEY, deadline=0.0), "`deadline` must be positive"),
        (lambda: rounds(4, 2, 2, key=KEY, aggregate="last"), "`aggregate`"),
    ],
)
def test_errors_name_the_remedy(make, match):
    with pytest.raises(ValueError, match=match):
        make()
