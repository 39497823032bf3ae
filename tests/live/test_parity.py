"""Live equals simulated: whatever order uploads come in, the simulator ends at the same parameters."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from personax import arrivals, rounds, simulate
from personax.experiment.config import Terms
from personax.live.journal import read_lines
from personax.live.limits import Limits
from personax.live.results import journal_schedule
from personax.schedules import persafl_delays
from personax.sharing import names_of
from tests.live.parts import (
    ADAPTERS,
    FEDERATION,
    NAMES,
    NORMALIZED,
    assert_same,
    clients_of,
    follow,
    recipe,
    recipe_over,
    serving,
    write_base,
)

pytestmark = pytest.mark.xdist_group("live")
KEY = jax.random.key(3)
DEFAULTS = Terms(num_clients=3, rate=1e5)  # all bounds on uploads; the rate only limits the pace


def table_of(num_events=9):
    return arrivals(3, num_events, delays=persafl_delays(3, key=KEY), key=KEY)


@pytest.mark.parametrize(
    "name",
    [
        "FedAsync",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("PersA-FL-MAML", "Ditto", "FedPer", "FedBABU", "ANIL")
        ),
        "PersA-FL-ME",
        "APFL",
        "FedBuff",
        "SCAFFOLD",
        "ARUBA",
        "FedRep",
        "PersA-FL-ME, personal biases",
    ],
)
def test_a_scripted_order_of_uploads_ends_where_the_simulator_does(name, tmp_path):
    told, schedule = led_as_simulated(recipe(name), tmp_path)
    assert told.client.tolist() == schedule.client.tolist()
    if name != "FedBuff":  # which has one model for several events
        assert told.started_at.tolist() == schedule.started_at.tolist()


def test_adapters_over_a_base_end_where_the_simulator_does(tmp_path):
    base = write_base(tmp_path / "base.safetensors")
    given = recipe_over(base, ADAPTERS)
    # Updates of A grow once B is no longer zero, beyond the default bound on outliers.
    led_as_simulated(given, tmp_path, replace(DEFAULTS, outlier_factor=0.0), limits=Limits(base=str(base)))
    assert [name.rpartition(".")[2] for name in names_of(given.params_shape)] == ["a"]


def led_as_simulated(given, folder, terms=DEFAULTS, **options):
    """Lead clients through a table of events, compare the end with the simulator's, and return both tables."""
    schedule = table_of()
    assert len(set(schedule.staleness().tolist())) > 1
    with serving(folder / "run", given, terms) as running, clients_of(running, folder, **options) as clients:
        for client in clients:
            client.enter()
        follow(clients, schedule)
    params = given.initial_params()
    simulated = simulate(given.algorithm, given.task, FEDERATION, schedule, key=KEY, params=params)
    assert_same(running.book.state.params, given.algorithm.sharing.shared(simulated.params))
    assert_same(running.book.state.shared, simulated.shared)
    assert running.book.version == int(simulated.snapshot.state.server.version)
    for i, client in enumerate(clients):
        assert_same(client.member.held.personal, jax.tree.map(lambda leaf, i=i: leaf[i], simulated.personal))
    return journal_schedule(read_lines(folder / "run"), list(NAMES)), schedule


@pytest.mark.parametrize(("name", "num_personal"), [("FedAsync", 0), ("FedBN", 4)])
def test_statistics_travel_or_stay_like_the_other_parameters(name, num_personal, tmp_path):
    given, schedule = recipe(name, model=NORMALIZED), table_of()
    with serving(tmp_path / "run", given, DEFAULTS) as running, clients_of(running, tmp_path) as clients:
        for client in clients:
            client.enter()
        follow(clients, schedule)
    simulated = simulate(given.algorithm, given.task, FEDERATION, schedule, key=KEY)
    assert_same(running.book.state.params, given.algorithm.sharing.shared(simulated.params))
    for i, client in enumerate(clients):
        own = jax.tree.leaves(client.member.held.personal)
        assert_same(own, [leaf[i] for leaf in jax.tree.leaves(simulated.personal)])
        assert len(own) == num_personal
    assert any(np.any(leaf) for leaf in jax.tree.leaves((simulated.params["norm_0"]["mean"], simulated.personal)))


def test_statistics_of_several_models_are_not_served():
    with pytest.raises(ValueError, match="computes gradients at several models"):
        recipe("PersA-FL-ME", model=NORMALIZED)


def test_synchronous_rounds_end_where_the_simulator_does(tmp_path):
    given, schedule = recipe("FedAvg", num_rounds=3), rounds(3, 3, key=KEY)
    with serving(tmp_path / "run", given, DEFAULTS) as running, clients_of(running, tmp_path) as clients:
        for client in clients:
            client.enter()
        for _ in range(3):
            for client in reversed(clients):
                client.receive(client.connection.fetch(client.newest.version, 5.0))
                assert client.newest.train
            for client in clients:
                client.send(client.train())
        assert running.book.finished and running.book.version == 3
    simulated = simulate(given.algorithm, given.task, FEDERATION, schedule, key=KEY)
    assert_same(running.book.state.params, simulated.params)


def test_the_wrong_update_count_would_be_noticed(tmp_path):
    given, schedule = recipe(), table_of()
    with serving(tmp_path / "run", given, DEFAULTS) as running, clients_of(running, tmp_path) as clients:
        for client in clients:
            client.enter()
            client.member.holding = replace(client.member.held, update=5)
        follow(clients, schedule)
    simulated = simulate(given.algorithm, given.task, FEDERATION, schedule, key=KEY)
    gap = jax.tree.map(lambda a, b: np.abs(a - b).max(), running.book.state.params, simulated.params)
    assert max(jax.tree.leaves(gap)) > 1e-4


def test_free_clients_leave_a_journal_that_the_simulator_repeats(tmp_path):
    """No script: three threads run as they like, and the journal alone tells the simulator what happened."""
    from threading import Thread

    given = recipe("APFL", num_rounds=4)
    with serving(tmp_path / "run", given, DEFAULTS) as running, clients_of(running, tmp_path) as clients:
        for client in clients:
            client.enter()

        def live(client):
            while client.advance():
                pass

        threads = [Thread(target=live, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert running.book.finished
    lines = read_lines(tmp_path / "run")
    schedule = journal_schedule(lines, list(NAMES))
    assert schedule.num_events == 12
    simulated = simulate(given.algorithm, given.task, FEDERATION, schedule, key=KEY)
    assert_same(running.book.state.params, simulated.params)
