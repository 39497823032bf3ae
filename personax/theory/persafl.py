"""Bounds of PersA-FL 2023 (asynchronous: FedAsync, PersA-FL-MAML, PersA-FL-ME) as functions of its constants.

All batches have at least `batch_size` samples, b in the paper. The theorems set the server step to 1 and the local step
to 1 / (Q sqrt(L T)), with Q local steps per visit, T server updates and L the smoothness of the objective.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from personax.client.sampling import BatchSizes
from personax.theory import gmeta
from personax.theory.quantities import Constants, EstimatorError, NotCovered
from personax.values import require, require_count, require_nonnegative, require_positive


def meta_smoothness(constants: Constants, adapt_lr: float) -> float:
    """`L_b = L (1 + alpha L)^2 + alpha rho G`: Lemma 1.

    >>> import personax as px
    >>> px.theory.persafl.meta_smoothness(px.theory.Constants(gradient_bound=1.0, smoothness=2.0), adapt_lr=0.1)
    2.88
    """
    return gmeta.meta_smoothness(constants, adapt_lr, 1)


def meta_error(constants: Constants, adapt_lr: float, batch_size: int) -> EstimatorError:
    """The error of (9) for any adapt_lr: Lemma 2, (22)-(23).

        bias         alpha L (1 + alpha L) sigma_g / sqrt(b)
        mean square  3 (1 + alpha L)^2 sigma_g^2 s + 3 alpha^2 G^2 sigma_h^2 / b + 3 alpha^2 sigma_g^2 sigma_h^2 s / b,
                     s = (1 + alpha^2 L^2) / b

    where b is the batch size.
    """
    require_nonnegative("adapt_lr", adapt_lr)
    c, b = constants, BatchSizes(batch_size).outer
    steps = adapt_lr * c.smoothness
    gradient = c.gradient_noise**2 * (1 + steps**2) / b
    hessian = (adapt_lr * c.hessian_noise) ** 2 / b
    mean_square = 3 * ((1 + steps) ** 2 * gradient + c.gradient_bound**2 * hessian + gradient * hessian)
    return EstimatorError(steps * (1 + steps) * c.gradient_noise / np.sqrt(b), mean_square)


def meta_spread(constants: Constants, adapt_lr: float) -> float:
    """`gamma_b` with gamma_b^2 = 12 (1 + alpha L)^2 (1 + alpha^2 L^2) gamma_g^2 + 12 alpha^2 G^2 gamma_h^2: Lemma 3.

    Loose: `gmeta.meta_spread` has (1 + alpha L)^2 gamma_g + alpha G gamma_h.
    """
    require_nonnegative("adapt_lr", adapt_lr)
    c, steps = constants, adapt_lr * constants.smoothness
    gradients = (1 + steps) ** 2 * (1 + steps**2) * c.gradient_spread**2
    return float(np.sqrt(12 * (gradients + (adapt_lr * c.gradient_bound * c.hessian_spread) ** 2)))


def meta_gradient_bound(constants: Constants, adapt_lr: float) -> float:
    """`G_b = (1 + alpha L) G`: Lemma 4."""
    require_nonnegative("adapt_lr", adapt_lr)
    return (1 + adapt_lr * constants.smoothness) * constants.gradient_bound


def moreau_smoothness(constants: Constants, strength: float) -> float:
    """`lambda L / (lambda - L)`, (C13), for lambda > L.

    Lemma 5 states the larger lambda / (kappa - 1) for lambda >= kappa L; they agree for kappa = lambda / L.
    """
    _check_strength(strength, constants.smoothness)
    return strength * constants.smoothness / (strength - constants.smoothness)


def moreau_error(constants: Constants, strength: float, tolerance: float, batch_size: int) -> EstimatorError:
    """The error of (10) with the inner problem solved to a gradient norm nu = `tolerance`: Lemma 6, corrected.

        bias         lambda / (lambda - L) (nu + sigma_g / sqrt(b))
        mean square  2 lambda^2 / (lambda - L)^2 (nu^2 + sigma_g^2 / b)

    L must be the smoothness of the loss of every batch, where Assumption 2 has only that of f_i: if a batch's loss has
    negative curvature beyond lambda, its inner problem has no solution.

    Departures from the paper: (26) has the bias without sigma_g / sqrt(b). (C21) replaces the batch's gradient at theta
    by the mean one, but theta was computed from that batch; and (C23) bounds the norm of a mean of gradient differences
    by that of differences of points. Counterexample, with bounded variance: one client, batches of one of
    two equally likely losses with the gradients c(w) + 1 and 3 c(w) - 3, where c clips w to [-1, 1]; lambda = 21 and
    nu = 0. At w = 7/15 the mean estimate is 0 and the gradient -7/115, whereas (26) claims that there is no bias. Hence
    Theorem 3 depends on the batch size, as pFedMe's rate does. Loose in b: measured, the bias falls as 1/b, whereas the
    bound falls as 1/sqrt(b).

    Proof: the inner problem is (lambda - L)-strongly convex, and its gradient at the exact theta is that batch's noise
    there, which is independent of theta; at the approximate theta it is at most nu. So the two are at most
    (nu + noise) / (lambda - L) apart, and lambda times that is the error.
    """
    _check_strength(strength, constants.smoothness)
    require_nonnegative("tolerance", tolerance)
    factor = strength / (strength - constants.smoothness)
    noise = constants.gradient_noise**2 / BatchSizes(batch_size).outer
    return EstimatorError(factor * (tolerance + np.sqrt(noise)), 2 * factor**2 * (tolerance**2 + noise))


def num_prox_steps(constants: Constants, strength: float, tolerance: float, initial_norm: float) -> int:
    """Return the number of steps of size `1 / (lambda + L)` that reduce the inner gradient norm to nu: section 3.

        log(g / nu) / log((lambda + L) / (2 L)), rounded up

    with nu = `tolerance` and g = `initial_norm`, the norm of the batch's gradient at w. The paper states
    O((lambda + L) / (lambda - L) log(1 / nu)).
    Each step multiplies the gradient by I minus its size times a Hessian between lambda - L and lambda + L, hence its
    norm by at most 2 L / (lambda + L), which is attained at a curvature of -L.
    """
    _check_strength(strength, constants.smoothness)
    require_positive("tolerance", tolerance)
    require_positive("initial_norm", initial_norm)
    if initial_norm <= tolerance:
        return 0
    if constants.smoothness == 0:
        return 1
    per_step = np.log((strength + constants.smoothness) / (2 * constants.smoothness))
    return int(np.ceil(np.log(initial_norm / tolerance) / per_step))


def moreau_spread(constants: Constants, strength: float) -> float:
    """`gamma_c` with gamma_c^2 = 16 lambda^2 gamma_g^2 / (lambda^2 - 48 L^2), lambda >= 7 L: Lemma 7, (28).

    Loose: `sharp_moreau_spread`. The paper claims that it converges to gamma_g^2 as lambda grows; the limit is 16
    gamma_g^2.
    """
    least = 7 * constants.smoothness
    enough = lambda v: v >= least * (1 - 1e-9)
    hint = "For any strength above the smoothness use `sharp_moreau_spread(...)`."
    require(enough, "strength", strength, f"be at least 7 times the smoothness, {least:.4g}", hint, error=NotCovered)
    share = 16 / (1 - 48 * (constants.smoothness / strength) ** 2)
    return float(np.sqrt(share)) * constants.gradient_spread


def sharp_moreau_spread(constants: Constants, strength: float) -> float:
    """`lambda / (lambda - L) gamma_g`, for any lambda > L: not in the paper, and 4 to 24 times below its (28).

    Proof: let theta be the inner solution of the mean loss f at w. The inner problem of f_i is
    (lambda - L)-strongly convex and has the gradient g = grad f_i(theta) - grad f(theta) there, so theta_i is at most
    |g| / (lambda - L) away, and grad F_i(w) = lambda (w - theta_i) at most lambda |g| / (lambda - L) from the fixed
    lambda (w - theta). A variance is at most the mean square distance from any fixed vector.
    """
    _check_strength(strength, constants.smoothness)
    return strength / (strength - constants.smoothness) * constants.gradient_spread


@dataclass(frozen=True)
class ArrivalTraining:
    """A run of Algorithms 1 and 2: T is `num_updates` of the server, Q `num_local_steps`, tau `staleness`, at most."""

    num_updates: int
    num_local_steps: int
    staleness: int

    def __post_init__(self) -> None:
        require_count("num_updates", self.num_updates)
        require_count("num_local_steps", self.num_local_steps)
        require_count("staleness", self.staleness, least=0)


def local_lr(training: ArrivalTraining, smoothness: float) -> float:
    """`eta = 1 / (Q sqrt(L T))`, the step size of Theorems 1 to 3; L is that of the objective: L, L_b or L_c."""
    require_positive("smoothness", smoothness)
    return 1 / (training.num_local_steps * np.sqrt(smoothness * training.num_updates))


def least_num_updates(smoothness: float, num_local_steps: int, staleness: int) -> float:
    """Return `160 L (Q + 7) (tau + 1)^3`, the least number of server updates for which Theorem 1 holds."""
    return 160 * smoothness * (num_local_steps + 7) * (staleness + 1) ** 3


def largest_staleness(smoothness: float, num_local_steps: int, num_updates: int) -> int:
    """Return the largest staleness for which Theorem 1 covers a run with this many server updates, or -1."""
    require_positive("smoothness", smoothness)
    ratio = num_updates / least_num_updates(smoothness, num_local_steps, 0)
    return int(np.floor(np.cbrt(ratio) + 1e-12)) - 1


def fedasync_bound(training: ArrivalTraining, initial_gap: float, constants: Constants, batch_size: int) -> float:
    """Bound the mean over server updates of E|grad f(w^t)|^2: Theorem 1, with s = sigma_g^2 / b + gamma_g^2:

        4 sqrt(L) (f(w^0) - f*) / sqrt(T) + 8 sqrt(L) s / sqrt(T) + 80 L (1 + Q) (tau^2 + 1) s / T

    for T >= 160 L (Q + 7) (tau + 1)^3. f* is the smallest minimum of any client's loss.
    """
    level = constants.smoothness
    noise = constants.gradient_noise**2 / BatchSizes(batch_size).outer + constants.gradient_spread**2
    _check_num_updates(training, least_num_updates(level, training.num_local_steps, training.staleness))
    factor = 80 * (1 + training.num_local_steps)
    return _first_terms(training, initial_gap, level, noise) + _staleness_term(training, level, factor, noise)


def persafl_meta_bound(
    training: ArrivalTraining, initial_gap: float, constants: Constants, adapt_lr: float, batch_size: int
) -> float:
    """Bound the mean over server updates of E|grad F^(b)(w^t)|^2: Theorem 2, for T >= 64 L_b:

        4 sqrt(L_b) (F(w^0) - f*) / sqrt(T) + 8 sqrt(L_b) (sigma_b^2 + gamma_b^2) / sqrt(T)
        + 20 Q L_b (G_b^2 + sigma_b^2) (tau^2 + 1) / T + 4 Q mu_b^2

    where mu_b is the bias (22), so the last term is 4 Q alpha^2 L^2 (1 + alpha L)^2 sigma_g^2 / b.
    """
    level = meta_smoothness(constants, adapt_lr)
    error, spread = meta_error(constants, adapt_lr, batch_size), meta_spread(constants, adapt_lr)
    _check_num_updates(training, 64 * level)
    steps = training.num_local_steps
    moved = meta_gradient_bound(constants, adapt_lr) ** 2 + error.mean_square
    first = _first_terms(training, initial_gap, level, error.mean_square + spread**2)
    return first + _staleness_term(training, level, 20 * steps, moved) + 4 * steps * error.bias**2


def persafl_moreau_bound(
    training: ArrivalTraining,
    initial_gap: float,
    constants: Constants,
    strength: float,
    tolerance: float,
    batch_size: int,
) -> float:
    """Bound the mean over server updates of E|grad F^(c)(w^t)|^2: Theorem 3, corrected:

        4 sqrt(L_c) (F(w^0) - f*) / sqrt(T) + 8 sqrt(L_c) s / sqrt(T) + 144 L_c (1 + Q) (tau^2 + 1) s / T + 4 Q mu_c^2,
        s = sigma_c^2 + gamma_c^2, for T >= 288 L_c (Q + 7) (tau + 1)^3 and lambda >= 7 L.

    Departures from the paper: mu_c includes the noise that Lemma 6 omits (`moreau_error`). Counterexample: the client
    of `moreau_error` from w^0 = 7/15, Q = 1, no staleness: the printed bound goes to 0 as T grows, but the mean of w^t
    stays where the mean estimate vanishes, and E|grad F|^2 remains at least (7/115)^2. Moreover, the first term is
    printed with w^t instead of w^0, the third with gamma_g instead of the gamma_c of (C62), and the condition with (tau
    + 1)^2, for which the proof fails: (C61) needs tau (tau + 1)^2 to be small compared with T.
    """
    level = moreau_smoothness(constants, strength)
    error = moreau_error(constants, strength, tolerance, batch_size)
    noise = error.mean_square + moreau_spread(constants, strength) ** 2
    steps = training.num_local_steps
    _check_num_updates(training, _least_num_moreau_updates(level, steps, training.staleness))
    stale = _staleness_term(training, level, 144 * (1 + steps), noise)
    return _first_terms(training, initial_gap, level, noise) + stale + 4 * steps * error.bias**2


class Budget(NamedTuple):
    """A run that reaches an accuracy: server updates T, batch size b and the tolerance nu of the inner problem."""

    num_updates: int
    batch_size: int
    tolerance: float = 0.0


def meta_budget(
    accuracy: float, initial_gap: float, constants: Constants, adapt_lr: float, num_local_steps: int, staleness: int
) -> Budget:
    """Return T = O(epsilon^(-2)) and b = O(1 / epsilon), for which Theorem 2 is at most epsilon: Corollary 1.

    Half of epsilon is the bias, 4 Q mu_b^2. Departures from the paper: the constants, which it leaves open.
    """
    require_positive("accuracy", accuracy)
    level, bias = meta_smoothness(constants, adapt_lr), meta_error(constants, adapt_lr, 1).bias
    size = _at_least(8 * num_local_steps * bias**2 / accuracy)
    one = ArrivalTraining(1, num_local_steps, staleness)
    error = meta_error(constants, adapt_lr, size)
    first = _first_terms(one, initial_gap, level, error.mean_square + meta_spread(constants, adapt_lr) ** 2)
    moved = meta_gradient_bound(constants, adapt_lr) ** 2 + error.mean_square
    stale = _staleness_term(one, level, 20 * num_local_steps, moved)
    return Budget(_at_least(_num_updates(first, stale, accuracy / 2), 64 * level), size)


def moreau_budget(
    accuracy: float, initial_gap: float, constants: Constants, strength: float, num_local_steps: int, staleness: int
) -> Budget:
    """Return T = O(epsilon^(-2)), nu = O(epsilon^(1/2)) and b = O(1 / epsilon): Corollary 3, corrected.

    For these, the corrected Theorem 3 is at most epsilon, half of which is 4 Q mu_c^2; half of mu_c is due to nu.

    Departures from the paper: the batch size, on which the paper claims that the accuracy does not depend; the noise
    that Lemma 6 omits requires it, as in pFedMe. Also the constants, which the paper leaves open.
    """
    require_positive("accuracy", accuracy)
    level, factor = moreau_smoothness(constants, strength), strength / (strength - constants.smoothness)
    tolerance = np.sqrt(accuracy / (8 * num_local_steps)) / (2 * factor)
    size = _at_least((constants.gradient_noise / tolerance) ** 2)
    one = ArrivalTraining(1, num_local_steps, staleness)
    noise = moreau_error(constants, strength, tolerance, size).mean_square + moreau_spread(constants, strength) ** 2
    first = _first_terms(one, initial_gap, level, noise)
    stale = _staleness_term(one, level, 144 * (1 + num_local_steps), noise)
    least = _least_num_moreau_updates(level, num_local_steps, staleness)
    return Budget(_at_least(_num_updates(first, stale, accuracy / 2), least), size, float(tolerance))


def _num_updates(first: float, stale: float, most: float) -> float:
    """Solve `first / sqrt(T) + stale / T = most` for T."""
    root = (first + np.sqrt(first**2 + 4 * stale * most)) / (2 * most)
    return float(root**2)


def _at_least(*numbers: float) -> int:
    return max(1, *(int(np.ceil(number)) for number in numbers))


def _least_num_moreau_updates(level: float, num_local_steps: int, staleness: int) -> float:
    return 288 * level * (num_local_steps + 7) * (staleness + 1) ** 3


def _first_terms(training: ArrivalTraining, initial_gap: float, smoothness: float, noise: float) -> float:
    require_nonnegative("initial_gap", initial_gap)
    return float(np.sqrt(smoothness / training.num_updates)) * (4 * initial_gap + 8 * noise)


def _staleness_term(training: ArrivalTraining, smoothness: float, factor: float, noise: float) -> float:
    return factor * smoothness * (training.staleness**2 + 1) * noise / training.num_updates


def _check_num_updates(training: ArrivalTraining, least: float) -> None:
    enough = lambda v: v >= least * (1 - 1e-9)
    hint = "The bound holds only for long runs: use more updates, fewer local steps or less staleness."
    require(enough, "num_updates", training.num_updates, f"be at least {least:.6g}", hint, error=NotCovered)


def _check_strength(strength: float, smoothness: float) -> None:
    above = lambda v: v > smoothness
    hint = "Below it, the inner problem of the envelope may have no unique solution."
    require(above, "strength", strength, f"be above the smoothness, {smoothness:.4g}", hint, error=NotCovered)
