"""One client's mathematics, compiled once: a visit, its numbers and its personal model, as the simulator has them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.client.local import Start, local_update
from personax.client.sampling import ClientRows
from personax.data.federation import ClientData, Federation
from personax.evaluation.evaluate import evaluate, personalize
from personax.evaluation.scoring import Scoring
from personax.experiment.summaries import newcomer_scoring
from personax.keys import run_stream
from personax.live.messages import Layout
from personax.live.recipe import Recipe
from personax.schedules import Schedule
from personax.server import ServerState
from personax.simulation.results import NO_EVENT, Faults, Snapshot, State
from personax.typing import Params, Personal, Shared, Task

Visit = Callable[[Params, Shared, Personal, int, int], tuple[list[Any], Personal, Any]]


def make_visit(recipe: Recipe, federation: Federation) -> Visit:
    """`visit(params, shared, personal, version, update)` of the one client of a federation; compiles at its first call.

    Gives the upload, as the vectors of its layout, the new personal state, and whether all of it is finite.
    """
    most, stream = int(federation.counts.max()), run_stream(recipe.key)
    program = VisitProgram(recipe.task, most, recipe.up, recipe.uploads)
    visit = partial(compiled_visit, program, recipe.algorithm, federation.train, stream)

    def one(params: Params, shared: Shared, personal: Personal, version: int, update: int) -> Any:
        begin = Start(params, shared, personal, np.int32(version))  # pyright: ignore[reportArgumentType]
        return visit(begin, np.int32(update))

    return one


class VisitProgram(NamedTuple):
    """What is compiled into a visit: the task, the most samples, and what is uploaded in which layout."""

    task: Task
    max_count: int
    up: Layout
    uploads: str


@partial(jax.jit, static_argnums=0)
def compiled_visit(
    program: VisitProgram, algorithm: Algorithm, data: ClientData, stream: Any, start: Start, update: Any
) -> tuple[list[Any], Personal, Any]:
    """One visit of a client; one program for all its visits."""
    task, max_count, up, uploads = program
    where = ClientRows(data.start[0], data.num_samples[0], data.ids[0], update)
    done = local_update(algorithm.objective, algorithm.local, task, data, max_count, where, start, stream)
    sums = [leaf.sum(dtype=float) for leaf in jax.tree.leaves((done.delta, done.personal, done.extra))]
    sent = up.flatten({uploads: getattr(done, uploads), "extra": done.extra})
    return sent, done.personal, jnp.isfinite(sum(sums, jnp.zeros(())))


def score(
    recipe: Recipe,
    federation: Federation,
    params: Params,
    shared: Shared,
    personal: Personal,
    version: int,
    visits: int,
) -> dict[str, dict[str, float]]:
    """The client's numbers under each scoring of the recipe, by score and metric."""
    snapshot = _snapshot(federation, params, shared, personal, version, visits)
    found = {}
    for name, scoring in recipe.training.scorings.items():
        if scoring.clients != "held_out":
            own = replace(scoring, clients="all")
            scored = evaluate(recipe.algorithm, recipe.task, federation, snapshot, own, key=recipe.key)
            found[name] = {metric: float(values[0]) for metric, values in scored.metrics.items()}
    return found


def score_one(recipe: Recipe, federation: Federation, params: Params) -> dict[str, float]:
    """The metrics of one model on the client's test data."""
    objective = recipe.algorithm.objective
    own = (objective.init_shared(params), objective.init_personal(params))
    snapshot = _snapshot(federation, params, *own, 0, 0)
    plain = Scoring("global")
    scored = evaluate(recipe.algorithm, recipe.task, federation, snapshot, plain, key=recipe.key)
    return {metric: float(values[0]) for metric, values in scored.metrics.items()}


def personal_model(
    recipe: Recipe, federation: Federation, params: Params, shared: Shared, personal: Personal | None, visits: int
) -> tuple[Params, str]:
    """The client's own model from the shared one, and how it was made; a newcomer has no personal state."""
    scorings = recipe.training.scorings.values()
    chosen = next((p for p in scorings if p.model not in ("global", "localized")), None)
    objective = recipe.algorithm.objective
    if chosen is not None and chosen.is_kept and personal is not None:
        return objective.models(params, personal)[chosen.model], chosen.describe()
    how = chosen and newcomer_scoring(recipe.algorithm, chosen)
    if how is None:
        lr = recipe.algorithm.local.lr
        how = Scoring("adapted", 5, 0.01 if callable(lr) else float(lr), recipe.algorithm.local.size_of("outer"))
    own, key = federation.client(0), recipe.key

    def adapt(params: Params, shared: Shared, personal: Personal | None) -> Params:
        given = {"personal": personal, "shared": shared, "id": int(federation.ids[0]), "key": key}
        return personalize(recipe.algorithm, recipe.task, params, own, how, **given)

    made = jax.jit(adapt)(params, shared, personal)  # one program, not one for each operation
    return jax.tree.map(np.asarray, made), how.describe()


def _snapshot(
    federation: Federation, params: Params, shared: Shared, personal: Personal, version: int, visits: int
) -> Snapshot:
    """A run of this client alone, as `evaluate` reads it."""
    zero, none = jnp.zeros((), jnp.int32), jnp.full((), NO_EVENT, jnp.int32)
    shown = [jax.tree.map(jnp.asarray, tree) for tree in (params, shared)]
    server = ServerState(
        params=shown[0],
        shared=shown[1],
        optimizer=(),
        version=jnp.asarray(version, jnp.int32),
        pending=(),
        pending_extra=(),
        pending_weight=jnp.zeros(()),
        num_pending=zero,
        num_dropped=zero,
    )
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], personal)
    num = max(visits, 1)
    empty = np.zeros(num)
    none_ends = np.zeros(num, bool)
    schedule = Schedule(1, np.zeros(num, np.int32), np.zeros(num, int), empty, empty, empty, ~none_ends, none_ends)
    state = State(server, one, (), (), (), Faults(zero, none, none))
    return Snapshot(state, 0, visits, 0.0, (schedule,), federation.ids)
