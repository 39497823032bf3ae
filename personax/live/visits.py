"""The computation of one client, compiled once and equal to the simulator's: visits, numbers and personal model."""

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
from personax.evaluation.evaluate import evaluate_client, personalize
from personax.evaluation.scoring import Scoring
from personax.experiment.summaries import newcomer_scoring
from personax.fast.passes import optimized
from personax.keys import run_stream
from personax.live.messages import Layout
from personax.live.recipe import Recipe
from personax.sharing import Sharing, join
from personax.typing import Params, Personal, Shared, Task

Visit = Callable[[Start, int], tuple[list[Any], Personal, Any]]


def start_of(recipe: Recipe, params: Params, shared: Shared, personal: Personal, version: int) -> Start:
    """The start of a visit. Its version has the same type as in the simulator."""
    frozen = recipe.algorithm.sharing.base(recipe.unshared)
    return Start(params, shared, personal, np.int32(version), frozen)  # pyright: ignore[reportArgumentType]


def client_params(recipe: Recipe, params: Params, personal: Personal | None) -> Params:
    """A client's whole model with these shared parameters. A newcomer's personal part has its initial values."""
    whole = join(params, recipe.unshared)
    return whole if personal is None else recipe.algorithm.divided.whole(whole, personal)


def make_visit(recipe: Recipe, data: Federation) -> Visit:
    """Make the function `visit(start, update)` of the client with this data; it compiles on its first call.

    The function returns the upload as the vectors of its layout, the new personal state, and True if both are finite.
    """
    most, stream = int(data.counts.max()), run_stream(recipe.key)
    program = VisitProgram(recipe.task, most, recipe.up, recipe.uploads)
    visit = partial(compiled_visit, program, recipe.algorithm, data.train, stream)
    return lambda start, update: visit(start, np.int32(update))


class VisitProgram(NamedTuple):
    """The constants compiled into a visit: the task, the number of samples, and the content and layout of uploads."""

    task: Task
    max_count: int
    up: Layout
    uploads: str


@partial(jax.jit, static_argnums=0)
def compiled_visit(
    program: VisitProgram, algorithm: Algorithm, data: ClientData, stream: Any, start: Start, update: Any
) -> tuple[list[Any], Personal, Any]:
    """Run one visit of a client; all its visits share one program."""
    task, max_count, up, uploads = program
    where = ClientRows(data.start[0], data.num_samples[0], data.ids[0], update)
    done = local_update(algorithm.objective, algorithm.local, optimized(task), data, max_count, where, start, stream)
    sums = [leaf.sum(dtype=float) for leaf in jax.tree.leaves((done.delta, done.personal, done.extra))]
    sent = up.flatten({uploads: getattr(done, uploads), "extra": done.extra})
    return sent, done.personal, jnp.isfinite(sum(sums, jnp.zeros(())))


def score(recipe: Recipe, data: Federation, start: Start, update: int) -> dict[str, dict[str, float]]:
    """The client's numbers under each scoring of the recipe, by score and metric. Skip scorings of held-out clients."""
    given = {"update": update, "key": recipe.key}
    return {
        name: evaluate_client(recipe.algorithm, recipe.task, data, start, scoring, **given)
        for name, scoring in recipe.training.scorings.items()
        if scoring.clients != "held_out"
    }


def score_one(recipe: Recipe, data: Federation, params: Params) -> dict[str, float]:
    """The metrics of one whole model on the client's test data."""
    algorithm = replace(recipe.algorithm, sharing=Sharing())
    objective = algorithm.objective
    start = Start(params, objective.init_shared(params), objective.init_personal(params), np.int32(0))  # pyright: ignore[reportArgumentType]
    return evaluate_client(algorithm, recipe.task, data, start, Scoring("global"), update=0, key=recipe.key)


def personal_model(
    recipe: Recipe, data: Federation, params: Params, shared: Shared, personal: Personal | None
) -> tuple[Params, str]:
    """The client's personal model and a description of how it was made. A newcomer passes no personal state."""
    params, divided = join(params, recipe.unshared), recipe.algorithm.divided
    scorings = recipe.training.scorings.values()
    chosen = next((p for p in scorings if p.model not in ("global", "localized")), None)
    if chosen is not None and chosen.is_kept and personal is not None:
        return divided.models(params, personal)[chosen.model], chosen.describe(divided)
    how = newcomer_scoring(recipe.algorithm, next(iter(scorings)) if chosen is None else chosen)
    if how is None:
        lr = recipe.algorithm.local.lr
        how = Scoring("adapted", 5, 0.01 if callable(lr) else float(lr), recipe.algorithm.local.size_of("outer"))
    own, key = data.client(0), recipe.key

    def adapt(params: Params, shared: Shared, personal: Personal | None) -> Params:
        given = {"personal": personal, "shared": shared, "id": int(data.ids[0]), "key": key}
        return personalize(recipe.algorithm, recipe.task, params, own, how, **given)

    made = jax.jit(adapt)(params, shared, personal)  # one program rather than one per operation
    whose = how if personal is None else replace(how, clients="all")
    return jax.tree.map(np.asarray, made), whose.describe(divided)
