"""The inputs and outputs of measurements and bounds: numbers with their error, location and region."""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from personax.values import require


class NotCovered(ValueError):
    """An assumption of a theorem does not hold, so the theorem does not cover the setting.

    >>> import personax as px
    >>> constants = px.theory.Constants(smoothness=2.0)
    >>> px.theory.fallah.meta_smoothness(constants, adapt_lr=1.0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    personax.theory.quantities.NotCovered: `adapt_lr` must be at most 1 / smoothness = 0.5, got 1.0. The lemmas ...
    """


class Measured(NamedTuple):
    """The largest value of a quantity over a region, its error, and where it was found.

    `error` is the standard error of a mean over examples, or the residual of an eigenvalue; 0 for exact arithmetic.
    `client` is a position, or None for a quantity of all clients together; `model` is a position in the region. A
    maximum over finitely many models is a lower estimate of the maximum over their surroundings.

    >>> import personax as px
    >>> print(px.theory.Measured(0.25, 0.01, client=3, model=0, region="one model"))
    0.25 ± 0.01 (client 3, model 0 of one model)
    """

    value: float
    error: float
    client: int | None
    model: int
    region: str

    def __str__(self) -> str:
        """Format the number with its error and region."""
        where = "" if self.client is None else f"client {self.client}, "
        return f"{self.value:.4g} ± {self.error:.2g} ({where}model {self.model} of {self.region})"


def largest(values: np.ndarray, errors: np.ndarray, region: str, *, over_clients: bool = True) -> Measured:
    """Return the largest entry of a table [models, clients], or [models] for quantities of all clients together."""
    table, error = np.asarray(values, float), np.asarray(errors, float)
    where = np.unravel_index(int(np.argmax(table)), table.shape)
    client = int(where[1]) if over_clients else None
    return Measured(float(table[where]), float(error[where]), client, int(where[0]), region)


@dataclass(frozen=True)
class Constants:
    """The constants of the papers' assumptions; those that a bound does not need may be 0.

    | field | symbol |
    |---|---|
    | `gradient_bound` | B in Fallah (9), gMeta (12); G in PersA-FL (20) |
    | `smoothness` | L in Fallah (9), gMeta (12), PersA-FL (12) |
    | `hessian_lipschitz` | rho in Fallah (10), gMeta (13), PersA-FL (17) |
    | `gradient_noise` | sigma_G in Fallah (11), gMeta (14), PersA-FL (14): of one example |
    | `hessian_noise` | sigma_H in Fallah (12), gMeta (15), PersA-FL (18): of one example, spectral norm |
    | `gradient_kurtosis`, `hessian_kurtosis` | kappa_G, kappa_H in gMeta (16), (17): fourth moments |
    | `gradient_spread`, `hessian_spread` | gamma_G, gamma_H in Fallah (13), gMeta (18), PersA-FL (16), (19) |

    >>> import personax as px
    >>> px.theory.fallah.largest_adapt_lr(px.theory.Constants(smoothness=2.0).smoothness)
    0.5
    """

    gradient_bound: float = 0.0
    smoothness: float = 0.0
    hessian_lipschitz: float = 0.0
    gradient_noise: float = 0.0
    hessian_noise: float = 0.0
    gradient_kurtosis: float = 0.0
    hessian_kurtosis: float = 0.0
    gradient_spread: float = 0.0
    hessian_spread: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            require(lambda v: v >= 0, field.name, getattr(self, field.name), "not be negative")


class EstimatorError(NamedTuple):
    """Bounds on a gradient estimator: on the norm of its bias and on its mean squared error.

    The papers call the second a variance; it is E|estimate - gradient|^2, which includes the bias.

    >>> import personax as px
    >>> constants = px.theory.Constants(gradient_bound=1.0, smoothness=1.0, gradient_noise=0.5)
    >>> error = px.theory.fallah.first_order_error(constants, adapt_lr=0.5, sizes=px.BatchSizes(10))
    >>> round(float(error.bias), 3)
    0.579
    """

    bias: float
    mean_square: float


def require_small_adapt_lr(adapt_lr: float, smoothness: float, hint: str) -> None:
    """Require adapt_lr in [0, 1/L]."""
    require(lambda v: v >= 0, "adapt_lr", adapt_lr, "not be negative")
    most = np.inf if smoothness == 0 else 1 / smoothness
    allowed = lambda v: v <= most * (1 + 1e-9)
    require(allowed, "adapt_lr", adapt_lr, f"be at most 1 / smoothness = {most:.6g}", hint, error=NotCovered)
