"""Divided models in a live run: what travels is the shared parameters, and nothing else."""

import json
import re

import jax
import numpy as np
import pytest

from personax import simulate
from personax.experiment import checkpoint
from personax.live.acceptance import read_recipe
from personax.live.client import Habits, LiveClient
from personax.live.connection import Connection
from personax.live.limits import Limits, Refused
from personax.live.messages import Mismatch
from personax.live.results import open_run, write_results
from personax.schedules import arrivals, persafl_delays
from personax.sharing import names_of
from tests.live.parts import FEDERATION, NAMES, assert_same, clients_of, data_of, follow, make_book, recipe, serving
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
    with pytest.raises(Mismatch, match="parameters that are not sent"):
        read_recipe(other, given.layout_text(), Limits())


def test_steps_that_move_no_shared_parameter_do_not_hide_the_samples(tmp_path):
    given = recipe("FedRep", num_steps=1)
    with (
        serving(tmp_path / "run", given) as running,
        clients_of(running, tmp_path, names=NAMES[:1]) as (client,),
        pytest.raises(Refused, match="visits of 1 steps"),
    ):
        client.enter()


def left_by_newcomer(running, folder):
    """The farewell of a client that joins to take the finished model."""
    newcomer = LiveClient(running.connect("dora"), data_of(0), folder / "dora", Limits(), Habits(), print)
    newcomer.enter(newcomer=True)
    gone = newcomer.leave()
    newcomer.connection.close()
    return gone


def test_a_newcomer_trains_its_personal_part(tmp_path):
    given, schedule = recipe("FedPer"), arrivals(3, 6, delays=persafl_delays(3, key=KEY), key=KEY)
    with serving(tmp_path / "run", given) as running, clients_of(running, tmp_path) as clients:
        for client in clients:
            client.enter()
        follow(clients, schedule)
        member = clients[0].leave()
        gone = left_by_newcomer(running, tmp_path)
    simulated = simulate(given.algorithm, given.task, FEDERATION, schedule, key=KEY)
    assert_same(running.book.state.params, given.algorithm.sharing.shared(simulated.params))
    assert gone.numbers["shared_model"] == "untrained personal part"
    assert gone.numbers["personal"]["loss"] < gone.numbers["shared"]["loss"]
    words = [checkpoint.read_model(found.model)[1]["scoring"] for found in (member, gone)]
    assert words[0].startswith("the shared part with the client's own `*.bias` (at its initial value for")
    assert words[1].startswith("the shared part with the newcomer's `*.bias`, which starts at the common initial value")
    assert member.numbers["shared_model"] == "before finishing"


def test_the_head_of_fedbabu_is_tuned_for_clients_and_newcomers(tmp_path):
    given = recipe("FedBABU")
    with serving(tmp_path / "run", given) as running, clients_of(running, tmp_path, names=NAMES[:1]) as (client,):
        client.enter()
        client.send(client.train())
        found = client.leave(), left_by_newcomer(running, tmp_path)
    for one in found:
        params, about = checkpoint.read_model(one.model)
        assert np.all(params["dense_0"]["bias"] != given.unshared["dense_0"]["bias"])
        assert "after 2 gradient steps of all parameters of size 0.1" in about["scoring"]
        assert one.numbers["shared_model"] == "before fine-tuning"


def test_a_client_does_not_continue_over_other_frozen_parameters(tmp_path):
    given = recipe("FedBABU")
    with serving(tmp_path / "run", given) as running, clients_of(running, tmp_path, names=NAMES[:1]) as (client,):
        client.enter()
        client.send(client.train())
        client.member.restore()
        facts = vars(client.member.recipe)  # of which another version might compute another head
        facts.pop("unshared_fingerprint")
        facts["unshared"] = jax.tree.map(lambda leaf: leaf + 1, given.unshared)
        with pytest.raises(ValueError, match=r"different frozen or initial personal parameters .* Nothing was sent"):
            client.member.restore()


def test_results_describe_the_models_of_a_divided_run(tmp_path):
    given = recipe("FedPer")
    folder, _ = open_run(tmp_path, given, "live")
    book = make_book(tmp_path, given)
    book.join("anna", 0)
    numbers = {"numbers": {"FedPer": {"accuracy": 0.5}}, "version": 0, "samples": 5, "train_samples": 15}
    book.report("anna", numbers)
    book.journal.close()
    record = write_results(folder, book, 0.0, 0.0)
    assert record.algorithms[0].scores[0].words.startswith("the shared part with the client's own `*.bias`")
