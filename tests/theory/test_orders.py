"""Orders, measured and set beside the bounds'. `python -m tests.theory.orders` prints them (docs/theory.md)."""

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
}


@pytest.mark.parametrize("name", orders.MEASURED)
def test_orders(name):
    found, (measured, bound) = orders.MEASURED[name](), EXPECTED[name]
    # products of small errors show in mean squares of small batches
    assert found.measured == pytest.approx(measured, abs=0.15 if "mean square" in name else 0.05)
    assert found.bound == pytest.approx(bound, abs=0.05)


def test_an_outer_batch_adds_no_bias():
    """gMeta (23) has sigma_G / sqrt(D_nu)."""
    assert orders.bias_by_outer_size() < 1e-14
