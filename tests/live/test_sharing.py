"""Divided models in a live run: what travels is the shared parameters, and nothing else."""

import json
import re

import jax
import numpy as np
import pytest

from personax import simulate
from personax.live.acceptance import read_recipe
from personax.live.client import Habits, LiveClient
from personax.live.connection import Connection
from personax.live.limits import Limits, Refused
from personax.live.messages import Mismatch
from personax.schedules import arrivals, persafl_delays
from personax.sharing import names_of
from tests.live.parts import FEDERATION, NAMES, assert_same, clients_of, data_of, follow, recipe, serving
from tests.live.proxy import Relay

pytestmark = pytest.mark.xdist_group("live")
KEY = jax.random.key(3)


def names_on_the_wire(recorded):
    """The names in every safetensors header of a recorded stream."""
    headers = re.findall(rb'\{(?:"__metadata__"|"[\w.]+":\{"dtype").*?\}\}', bytes(recorded))
    return [set(json.loads(header)) - {"__metadata__"} for header in headers]


@pytest.mark.parametrize("name", ["FedPer", "FedBABU"])
def test_uploads_have_exactly_the_shared_parameters(name, tmp_path):
    given = recipe(name)
    shared = {f"delta.{leaf}" for leaf in names_of(given.params_shape)}
    assert shared == {"delta.dense_0.kernel"}
    with serving(tmp_path / "run", given) as running, Relay(running.port) as relay:
        connection = Connection(f"127.0.0.1:{relay.port}", None, name="anna", role="client", patience=5.0)
        quiet = lambda text: None
        client = LiveClient(connection, data_of(0), tmp_path / "anna", Limits(), Habits(), quiet)
        client.enter()
        for _ in range(2):
            client.send(client.train())
        connection.close()
    found = names_on_the_wire(relay.recorded)
    assert len(found) == 2 and all(names == shared for names in found)
    whole = jax.tree.leaves((client.member.held.personal, given.unshared))
    assert whole and not any(np.asarray(leaf).tobytes() in relay.recorded for leaf in whole if np.any(leaf))


def test_a_client_with_another_frozen_part_is_refused():
    given = recipe("FedBABU")
    text = json.loads(given.to_text())
    assert read_recipe(given.to_text(), given.layout_text(), Limits()).params_shape
    other = json.dumps({**text, "unshared": "0" * 64})
    with pytest.raises(Mismatch, match="parameters that do not travel"):
        read_recipe(other, given.layout_text(), Limits())


def test_steps_that_move_no_shared_parameter_do_not_hide_the_samples(tmp_path):
    given = recipe("FedRep", num_steps=1)
    with (
        serving(tmp_path / "run", given) as running,
        clients_of(running, tmp_path, names=NAMES[:1]) as (client,),
        pytest.raises(Refused, match="visits of 1 steps"),
    ):
        client.enter()


def test_a_newcomer_trains_its_personal_part(tmp_path):
    given, schedule = recipe("FedPer"), arrivals(3, 6, delays=persafl_delays(3, key=KEY), key=KEY)
    with serving(tmp_path / "run", given) as running, clients_of(running, tmp_path) as clients:
        for client in clients:
            client.enter()
        follow(clients, schedule)
        newcomer = LiveClient(running.connect("dora"), data_of(0), tmp_path / "dora", Limits(), Habits(), print)
        newcomer.enter(newcomer=True)
        gone = newcomer.leave()
        newcomer.connection.close()
    simulated = simulate(given.algorithm, given.task, FEDERATION, schedule, key=KEY)
    assert_same(running.book.state.params, given.algorithm.sharing.shared(simulated.params))
    assert gone.numbers["shared_model"] == "untrained personal part"
    assert gone.numbers["personal"]["loss"] < gone.numbers["shared"]["loss"]
