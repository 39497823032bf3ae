"""Orders, measured and set beside the bounds'. `python -m tests.theory.orders` prints them (docs/theory.md)."""

import numpy as np
import pytest

from tests.theory import orders

EXPECTED = {
    "Hessian-free bias, radius, nu = 1": (2, 1),
    "Hessian-free bias, radius, nu = 2": (2, 1),
    "Hessian-free bias, radius, nu = 3": (2, 1),
    "Hessian-free mean square, radius to 0": (0, -2),
    "mean square of exact, batch sizes": (-1, -1),
    "mean square of first-order, batch sizes": (-1, -1),
    "mean square of Hessian-free, batch sizes": (-1, -1),
    "bias of exact, adaptation batch": (-1, -0.5),
    "bias of Moreau, batch": (-1, -0.5),
    "floor of first-order, adapt_lr": (2, 2),
    "floor of exact, adapt_lr": (4, 2),
    "excess stationarity, staleness": (1, 2),
    "floor of client sampling, local steps": (1, 1),
    "floor of Corollary 4.6, accuracy": (0.5, 0.5),
}


@pytest.mark.parametrize("name", orders.MEASURED)
def test_orders(name):
    found, (measured, bound) = orders.MEASURED[name](), EXPECTED[name]
    # products of small errors show in mean squares of small batches
    assert found.measured == pytest.approx(measured, abs=0.15 if "mean square" in name else 0.05)
    assert found.bound == pytest.approx(bound, abs=0.05)


LOOSENESS = {
    "gMeta, exact, nu = 1": (364.6, 52.48),
    "Fallah, exact, nu = 1": (105.5, 70.69),
    "gMeta, exact, nu = 2": (547.6, 1919.0),
    "gMeta, exact, nu = 3": (1224.0, 120300.0),
    "gMeta, first_order, nu = 1": (80.39, 117.4),
    "Fallah, first_order, nu = 1": (18.32, 15.34),
    "gMeta, first_order, nu = 2": (59.98, 213.4),
    "gMeta, first_order, nu = 3": (66.91, 229.0),
    "gMeta, hessian_free, nu = 1": (1455.0, 322.1),
    "Fallah, hessian_free, nu = 1": (185.3, 390.1),
    "gMeta, hessian_free, nu = 2": (1276.0, 4657.0),
    "gMeta, hessian_free, nu = 3": (1798.0, 33270.0),
    "gMeta Lemma 7, corrected, nu = 1": 2.535,
    "Fallah Lemma 4.4, nu = 1": 13.41,
    "PersA-FL Lemma 3, nu = 1": 5.866,
    "gMeta Lemma 7, corrected, nu = 2": 8.546,
    "gMeta Lemma 7, corrected, nu = 3": 29.72,
    "Fallah (111), corrected, gMeta's lemmas": 15760.0,
    "Fallah (111), corrected, Fallah's lemmas": 300300.0,
    "PersA-FL Theorem 1": 36.06,
    "PersA-FL Theorem 2": 49320.0,
    "PersA-FL Theorem 3, corrected": 175.7,
}


@pytest.mark.parametrize("table", [orders.looseness, orders.spread_looseness, orders.theorem_looseness])
def test_bounds_are_as_loose_as_measured(table):
    """The median of bound / truth over eight problems: a bound that is wrong by a factor leaves its range."""
    for name, found in table(8).items():
        np.testing.assert_allclose(found, LOOSENESS[name], rtol=0.02, err_msg=name)


def test_an_outer_batch_adds_no_bias():
    """gMeta (23) has sigma_G / sqrt(D_nu)."""
    assert orders.bias_by_outer_size() < 1e-14
