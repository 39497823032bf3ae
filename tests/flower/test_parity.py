"""On Flower as in the simulator: runs end at the same parameters."""

import jax
import numpy as np
import pytest

from personax import rounds, simulate
from personax.experiment.checkpoint import load
from personax.live.results import journal_schedule
from tests.flower.deployment import FEDERATION, NAMES, Deployment, Run
from tests.live.parts import assert_same

SYNCHRONOUS = ("FedAvg", "Per-FedAvg (HF)", "APFL", "FedPer")
ASYNCHRONOUS = ("APFL, asynchronous", "PersA-FL-ME")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    made = Deployment(tmp_path_factory.mktemp("flower"))
    try:
        made.begin_link()
        for name in NAMES:
            made.begin_node(name)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def finished(deployment):
    """All runs at once: Flower takes messages of several runs one after another."""
    runs = {name: Run(deployment, name, 2, f"parity-{i}") for i, name in enumerate((*SYNCHRONOUS, *ASYNCHRONOUS))}
    for run in runs.values():
        run.begin()
    for run in runs.values():
        run.wait_for_end()
    return runs


def replayed(run, outcomes=("applied",)):
    """Replay a run's journal in the simulator."""
    lines = [{**line, "outcome": "applied"} for line in run.uploads if line["outcome"] in outcomes]
    schedule = journal_schedule(lines, list(NAMES))
    return simulate(run.recipe.algorithm, run.recipe.task, FEDERATION, schedule, key=run.recipe.key)


def personal_of(run, name):
    """A client's personal state, as its own disk has it."""
    recipe = run.recipe
    own = jax.eval_shape(recipe.algorithm.divided.init_personal, recipe.whole_shape)
    return load(run.personal(name), {"personal": own, "upload": recipe.up.vector_shapes}).tree["personal"]


def assert_same_personal(run, simulated):
    for i, name in enumerate(NAMES):
        assert_same(personal_of(run, name), jax.tree.map(lambda leaf, i=i: np.asarray(leaf[i]), simulated.personal))


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_synchronous_runs_end_at_the_simulators_parameters(finished, name):
    run = finished[name]
    schedule = rounds(3, run.num_rounds, key=run.recipe.key)
    simulated = simulate(run.recipe.algorithm, run.recipe.task, FEDERATION, schedule, key=run.recipe.key)
    assert_same(run.params(), jax.tree.map(np.asarray, simulated.params))
    assert_same_personal(run, simulated)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_runs_end_where_the_simulator_ends_from_their_journal(finished, name):
    run = finished[name]
    assert sum(line["outcome"] == "applied" for line in run.uploads) == 3 * run.num_rounds
    assert_same(run.params(), jax.tree.map(np.asarray, replayed(run).params))
    assert_same_personal(run, replayed(run, ("applied", "late")))


def test_every_client_has_a_model_of_its_own_and_its_state_is_private(finished, deployment):
    for run in finished.values():
        for name in NAMES:
            (model,) = (deployment.folder / "nodes" / name).glob(f"{run.run}/personal.safetensors")
            assert model.stat().st_mode & 0o077 == 0


def test_a_killed_node_and_a_killed_server_continue(deployment):
    """SCAFFOLD: a client's control variate, which it keeps to itself, is in everything that it uploads."""
    run = Run(deployment, "SCAFFOLD", 5, "faults")
    run.begin()
    run.wait_for(1, of="anna")
    deployment.kill("anna")
    deployment.begin_node("anna")
    run.wait_for(sum(line["client"] == "anna" for line in run.uploads) + 1, of="anna")
    run.kill_server()
    before = len(run.uploads)
    deployment.flwr("stop", run.id, "deployment")  # or nodes wait for it until Flower notices, after a minute
    run.begin()
    run.wait_for_end()
    uploads = run.uploads
    assert before < len(uploads) and sum(line["outcome"] == "applied" for line in uploads) == 15
    for name in NAMES:  # none of a client's updates is missing or done twice
        own = [line["update"] for line in uploads if line["client"] == name]
        assert own == list(range(len(own))), name
    assert_same(run.params(), jax.tree.map(np.asarray, replayed(run).params))
    assert_same_personal(run, replayed(run, ("applied", "late")))
