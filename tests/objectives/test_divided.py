"""Test the rejections of divisions and phases with objectives from outside the library."""

import jax
import jax.numpy as jnp
import optax
import pytest

import personax as px
from personax.objectives.divided import Divided

HEAD, FROZEN = px.Sharing("dense_1"), px.Sharing(frozen="dense_1")
PARAMS = px.mlp((4,), 3).init(jax.random.key(0), jnp.zeros((1, 5)))
SERVER = px.synchronous()
IN_PHASES = px.Local(0.1, phases=(px.Phase("dense_1", num_steps=1), px.Phase("dense_0", num_steps=1)))


class _Facts:
    """The answers that the objectives below share."""

    federated, is_plain, is_at_iterate, kept_model = True, False, True, "none"
    default_scoring = px.objective.score_global
    newcomer_model = px.objective.newcomer_personalizes
    gradients_per_step = px.objective.one_gradient
    tracked = px.objective.no_single_function
    theorem = px.objective.no_theorem
    personal_number = px.objective.no_number
    citations = px.objective.no_citations
    roles = px.objective.outer_only
    init_personal = px.objective.nothing_kept
    init_shared = px.objective.nothing_kept
    begin = px.objective.from_anchor
    project = px.objective.unconstrained
    finish = px.objective.keep_memory
    absorb = px.objective.nothing_absorbed
    models = px.objective.only_global
    personalize = px.objective.fine_tune
    gradient = px.objective.loss_gradient


@px.value
class Signs(_Facts):
    """Upload the sign of each change."""

    def finish(self, end, memory, visit, full_gradient):
        return (), jax.tree.map(lambda a, w: jnp.sign(a - w), visit.anchor, end)


@px.value
class Norm(_Facts):
    """Upload one number: the length of the change."""

    def finish(self, end, memory, visit, full_gradient):
        return (), optax.tree.norm(optax.tree.sub(visit.anchor, end))


@px.value
class Momentum(_Facts):
    """Keep the mean direction of the client from visit to visit."""

    def init_personal(self, params):
        return optax.tree.zeros_like(params)

    def gradient(self, loss, iterate, memory, visit, batches):
        slope = jax.grad(loss)(iterate, px.objective.only_batch(batches, "outer"))
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, memory, slope)
        return mean, mean


@px.value
class Twin(_Facts):
    """Train a second model beside the shared one, and state a function for the stationarity of the first."""

    kept_model = "trained"

    def tracked(self):
        return px.Erm()

    def init_personal(self, params):
        return params

    def gradient(self, loss, iterate, memory, visit, batches):
        slope = jax.grad(loss)(memory, px.objective.only_batch(batches, "outer"))
        return slope, px.objective.descent_step(memory, slope, visit.lr)

    def models(self, params, personal):
        return {"global": params, "personal": personal}


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Signs(), "uploads values for every trained parameter, including the personal dense_1.bias"),
        (Twin(), "already keeps a personal copy of every parameter"),
        (Norm(), None),
        (Momentum(), None),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, _Facts) else "",
)
def test_personal_parameters_suit_what_is_uploaded_and_kept(objective, message):
    Divided(objective, FROZEN).require_division(PARAMS)
    if message is None:
        Divided(objective, HEAD).require_division(PARAMS)
        return
    with pytest.raises(ValueError, match=message):
        Divided(objective, HEAD).require_division(PARAMS)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Signs(), "requires that each step trains all of them"),
        (Twin(), "updates values for every parameter at each step"),
        (Momentum(), "updates values for every parameter at each step"),
        (Norm(), None),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, _Facts) else "",
)
def test_phases_suit_what_the_steps_update(objective, message):
    algorithm = px.Algorithm(objective, IN_PHASES, SERVER)
    if message is None:
        algorithm.require_model(PARAMS)
        return
    with pytest.raises(ValueError, match=message):
        algorithm.require_model(PARAMS)


def test_an_objective_states_which_model_its_clients_keep():
    @px.value
    class Unclear(_Facts):
        kept_model = "some"

    with pytest.raises(ValueError, match="`kept_model` must be one of 'none', 'latest', 'trained', got 'some'"):
        px.Algorithm(Unclear(), px.Local(0.1, num_steps=1), SERVER)
