"""Which model is scored, on which data, after which adaptation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax
from tests import closed_forms
from tests.closed_forms import TASK

KEY = jax.random.key(0)
W = np.random.default_rng(3).normal(size=closed_forms.DIMENSION)
WHOLE = {"num_steps": 1, "batch_size": 16}


def losses(fed, models):
    """Each client's mean loss on its own test data."""
    data = [fed.client_test(i) for i in range(fed.num_clients)]
    return np.array([0.5 * np.mean((x @ model - y) ** 2) for (x, y), model in zip(data, models, strict=True)])


def setting(algorithm, seeds=None):
    """A short run of clients whose test data is not their training data."""
    train, test = closed_forms.clients(seed=0), closed_forms.clients(seed=1, sizes=(70, 3, 140, 64))
    fed = personax.Federation.from_clients(train, test=test)
    schedule = personax.rounds(4, 2, key=KEY)
    key = KEY if seeds is None else jax.random.split(KEY, seeds)
    return fed, personax.simulate(algorithm, TASK, fed, schedule, key=key, params={"w": jnp.asarray(W)})


LOCAL = {"num_steps": 2, "batch_size": 4}


def score(algorithm, fed, result, protocol):
    return personax.evaluate(algorithm, TASK, fed, result, protocol, key=jax.random.key(9)).metrics["loss"]


def test_the_global_model_is_scored_as_it_is():
    algorithm = personax.fedavg(0.1, **LOCAL)
    fed, result = setting(algorithm)
    found = score(algorithm, fed, result, personax.Protocol("global"))
    np.testing.assert_allclose(found, losses(fed, [result.params["w"]] * 4), rtol=1e-10)


def test_adaptation_uses_each_clients_own_training_data_and_never_what_is_scored():
    """The traps of CharlieDinh/pFedMe (test batches) and FedBABU (one client's data for all)."""
    algorithm = personax.per_fedavg(0.1, 0.1, **LOCAL)
    fed, result = setting(algorithm)
    problems = [closed_forms.quadratic(*fed.client(i)) for i in range(4)]
    found = score(algorithm, fed, result, personax.Protocol("adapted", lr=0.2, **WHOLE))
    adapted = [problem.descend(np.asarray(result.params["w"]), 0.2, 1) for problem in problems]
    np.testing.assert_allclose(found, losses(fed, adapted), rtol=1e-10)


def test_the_personal_model_of_pfedme_is_theta():
    """The trap of pFedMe and PFLlib: scoring w in place of theta, or parameters that never move."""
    algorithm = personax.pfedme(2.0, 0.1, 0.1, 50, **LOCAL)
    fed, result = setting(algorithm)
    stored = score(algorithm, fed, result, personax.Protocol("personal"))
    np.testing.assert_allclose(stored, losses(fed, result.personal["w"]), rtol=1e-10)
    problems = [closed_forms.quadratic(*fed.client(i)) for i in range(4)]
    recomputed = score(algorithm, fed, result, personax.Protocol("adapted", **WHOLE))
    thetas = [problem.prox(np.asarray(result.params["w"]), 2.0) for problem in problems]
    np.testing.assert_allclose(recomputed, losses(fed, thetas), rtol=1e-4)
    assert np.all(stored != losses(fed, [result.params["w"]] * 4))


def test_the_personal_model_of_apfl_is_the_mixture():
    algorithm = personax.apfl(0.1, 0.4, **LOCAL)
    fed, result = setting(algorithm)
    mix, v, w = result.personal.mix[:, None], result.personal.model["w"], np.asarray(result.params["w"])[None]
    found = score(algorithm, fed, result, personax.Protocol("personal"))
    np.testing.assert_allclose(found, losses(fed, mix * v + (1 - mix) * w), rtol=1e-10)


def test_seeds_are_scored_together():
    algorithm = personax.fedavg(0.1, **LOCAL)
    fed, result = setting(algorithm, seeds=3)
    found = score(algorithm, fed, result, personax.Protocol("global"))
    for seed in range(3):
        np.testing.assert_allclose(found[seed], losses(fed, [result.params["w"][seed]] * 4), rtol=1e-10)


def test_a_newcomer_gets_the_model_that_evaluation_scores():
    for algorithm in (personax.per_fedavg(0.1, 0.1, **LOCAL), personax.pfedme(2.0, 0.1, 0.1, 50, **LOCAL)):
        fed, result = setting(algorithm)
        protocol = personax.Protocol("adapted", lr=0.2, **WHOLE)
        newcomer = partial(personax.personalize, algorithm, TASK, result.params, protocol=protocol, key=KEY)
        models = [newcomer(fed.client(i))["w"] for i in range(4)]
        np.testing.assert_allclose(score(algorithm, fed, result, protocol), losses(fed, models), rtol=1e-9)


def test_a_personal_model_that_is_not_kept_cannot_be_scored():
    algorithm = personax.fedavg(0.1, **LOCAL)
    fed, result = setting(algorithm)
    with pytest.raises(ValueError, match="keeps no 'personal' model"):
        score(algorithm, fed, result, personax.Protocol("personal"))


def test_a_federation_without_test_data_says_so():
    algorithm = personax.fedavg(0.1, **LOCAL)
    _, result = setting(algorithm)
    bare = personax.Federation.from_clients(closed_forms.clients())
    with pytest.raises(ValueError, match="no test data"):
        score(algorithm, bare, result, personax.Protocol("global"))
