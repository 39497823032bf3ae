"""Attacks by one certified client on the model: which uploads are admitted, and how much they may count."""

import jax
import numpy as np
import pytest

from personax.experiment.config import Terms
from personax.live.admission import largest_weight
from personax.live.exchange import Arrived
from tests.live.parts import NAMES, make_book, recipe

pytestmark = [pytest.mark.xdist_group("live"), pytest.mark.attack]
LONG = 10**4


def upload(book, update, delta=0.01, extra=0.01, samples=1.0):
    fill = lambda shape, scale: jax.tree.map(lambda leaf: np.full(leaf.shape, scale, leaf.dtype), shape)
    tree = {"delta": fill(book.recipe.params_shape, delta), "extra": fill(book.recipe.extra_shape, extra)}
    return Arrived(f"id-{update}", update, book.version, samples, book.recipe.up.encode(tree))


def joined(folder, given, terms=None, names=(*NAMES, "mallory")):
    book = make_book(folder, given, terms)
    for name in names:
        book.join(name)
    return book


def params_of(book):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(book.state.params)])


def test_an_extra_far_beyond_the_model_is_refused_from_the_first_upload_on(tmp_path, attack):
    book = joined(tmp_path, recipe("SCAFFOLD", num_rounds=LONG))
    for update, extra in enumerate([1e15, 1e6, 1e3]):
        with attack("extra beyond the model's scale"):
            settled = book.settle("mallory", upload(book, update, extra=extra))
            assert settled.outcome == "refused" and "too large for the model" in settled.words
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(book.state.shared))


def test_an_extra_far_beyond_those_of_the_others_is_refused(tmp_path, attack):
    book = joined(tmp_path, recipe("SCAFFOLD", num_rounds=LONG))
    for name in NAMES:  # the first control variate is the largest
        assert book.settle(name, upload(book, 0, extra=0.02)).outcome == "applied"
        assert book.settle(name, upload(book, 1, extra=1e-4)).outcome == "applied"
    assert book.settle("mallory", upload(book, 0, extra=0.02)).outcome == "applied", "a late but honest first visit"
    with attack("extra beyond the other clients'"):
        settled = book.settle("mallory", upload(book, 1, extra=0.5))
        assert settled.outcome == "refused" and "`extra.dense_0`" in settled.words


def test_one_part_of_an_extra_cannot_hide_behind_another(tmp_path, attack):
    """ARUBA's squared distances are much smaller than its squared gradients."""
    book = joined(tmp_path, recipe("ARUBA", num_rounds=LONG))

    def sent(update, distances):
        tree = {"delta": book.recipe.params_shape, "extra": book.recipe.extra_shape}
        tree = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), tree)
        scaled = lambda part, scale: jax.tree.map(lambda leaf: leaf * scale, part)
        extra = tree["extra"]._replace(distances=scaled(tree["extra"].distances, distances))
        content = book.recipe.up.encode({"delta": scaled(tree["delta"], 0.01), "extra": extra})
        return Arrived(f"id-{update}", update, book.version, 1.0, content)

    for name in NAMES:
        assert book.settle(name, sent(0, 1e-4)).outcome == "applied"
    with attack("extra beyond the other clients'"):
        settled = book.settle("mallory", sent(0, 0.1))
        assert settled.outcome == "refused" and "`extra.distances`" in settled.words


@pytest.mark.parametrize("name", ["FedAsync", "PersA-FL-MAML", "FedAvg"])
@pytest.mark.parametrize("scale", [1e17, 1e6, 1e2])
def test_the_first_upload_cannot_destroy_the_model(name, scale, tmp_path, attack):
    book = joined(tmp_path, recipe(name, num_rounds=LONG), Terms(num_clients=4))
    before = params_of(book)
    with attack("first upload beyond the model's scale"):
        settled = book.settle("mallory", upload(book, 0, scale))
        assert settled.outcome == "refused" and "`live.model_factor`" in settled.words
    np.testing.assert_array_equal(before, params_of(book))


def test_the_bound_of_the_model_follows_its_scale(tmp_path):
    book = joined(tmp_path, recipe(num_rounds=LONG), Terms(model_factor=2.0))
    norm = max(np.linalg.norm(params_of(book)), 1.0)
    entry = 2 * norm / np.sqrt(len(params_of(book)))
    assert book.settle("mallory", upload(book, 0, 1.01 * entry)).outcome == "refused"
    assert book.settle("mallory", upload(book, 1, 0.99 * entry)).outcome == "applied"


def test_uploads_just_below_the_bound_spend_a_budget(tmp_path, attack):
    given = recipe(num_rounds=LONG)
    book, update = joined(tmp_path, given), 0
    for name in NAMES:
        assert book.settle(name, upload(book, 0)).outcome == "applied"
    outcomes = []
    for update in range(12):
        with attack("uploads just below the outlier bound"):
            settled = book.settle("mallory", upload(book, update, 0.01 * 19))
            outcomes.append(settled.outcome)
            assert update < 4 or settled.outcome == "refused"
    assert outcomes == ["applied"] * 4 + ["refused"] * 8 and "`live.loud_budget`" in settled.words
    book.journal.close()
    book = make_book(tmp_path, given)  # the budget survives a restart
    assert book.settle("mallory", upload(book, 12, 0.01 * 19)).outcome == "refused"
    assert book.settle("mallory", upload(book, 13, 0.01)).outcome == "applied"
    for update in range(14, 18):  # quiet uploads earn it back
        assert book.settle("mallory", upload(book, update, 0.01)).outcome == "applied"
    assert book.settle("mallory", upload(book, 18, 0.01 * 19)).outcome == "applied"


def test_a_client_that_is_four_times_as_loud_as_the_others_is_never_refused(tmp_path):
    book = joined(tmp_path, recipe(num_rounds=LONG))
    for update in range(60):
        for name in NAMES:
            assert book.settle(name, upload(book, update)).outcome == "applied"
        assert book.settle("mallory", upload(book, update, 0.04)).outcome == "applied"


MANY = tuple(f"client-{i}" for i in range(9))
WEIGHTED = {"kind": "synchronous", "weighting": "samples"}


@pytest.mark.parametrize("lie", [1e3, 1e9])
def test_a_lie_about_the_number_of_samples_does_not_control_a_round(lie, tmp_path, attack):
    book = make_book(tmp_path, recipe("FedAvg", num_rounds=LONG, server=WEIGHTED), Terms(num_clients=10))
    for name in MANY:
        book.join(name, num_samples=10.0)
    book.join("mallory", num_samples=lie)
    before = params_of(book)
    for name in MANY:
        assert book.settle(name, upload(book, 0, 0.01, samples=10.0)).outcome == "applied"
    with attack("lie about the number of samples"):
        assert book.settle("mallory", upload(book, 0, 0.05, samples=lie)).outcome == "applied"
        assert book.version == 1
        np.testing.assert_allclose(before - params_of(book), 0.7 * 0.01 + 0.3 * 0.05)  # three uniform shares


def test_the_operator_declares_the_numbers_of_samples(tmp_path, attack):
    declared = {"mallory": 10.0, **{name: 10.0 for name in MANY}}
    terms = Terms(num_clients=10, samples=declared)
    book = make_book(tmp_path, recipe("FedAvg", num_rounds=LONG, server=WEIGHTED), terms)
    for name in (*MANY, "mallory"):
        book.join(name, num_samples=10.0)
    before = params_of(book)
    for name in MANY:
        book.settle(name, upload(book, 0, 0.01, samples=10.0))
    with attack("lie about the number of samples"):
        book.settle("mallory", upload(book, 0, 0.05, samples=1e6))
        np.testing.assert_allclose(before - params_of(book), 0.9 * 0.01 + 0.1 * 0.05)


@pytest.mark.parametrize("liars", [1, 2, 3, 5])
def test_liars_together_have_at_most_their_shares(liars):
    counts = [1e12 * (i + 1) for i in range(liars)] + [1.0 + i for i in range(20 - liars)]
    cap = largest_weight(counts, 3.0)
    weights = np.minimum(counts, cap)
    assert weights.max() / weights.sum() <= 0.15 + 1e-12
    assert largest_weight([5.0, 6.0, 7.0], 3.0) == 18.0  # of three clients one may have all
    assert largest_weight(counts, 0.0) == np.inf
