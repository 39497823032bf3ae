"""PersA-FL 2023, Algorithms 1 and 2. D, D', D'' of (9) are the roles outer, adapt, curvature."""

import numpy as np

from tests.reference.problem import N, events, grad, hvp


def option_a(w, batch, q):
    """Algorithm 2, line 7: FedAsync."""
    return grad(w, batch(q)), None


def option_b(alpha):
    """Algorithm 2, lines 8 and 9: PersA-FL-MAML, (9)."""

    def direction(w, batch, q):
        D, D1, D2 = (batch(q, role) for role in ("outer", "adapt", "curvature"))
        g = grad(w - alpha * grad(w, D1), D)
        return g - alpha * hvp(w, D2, g), None

    return direction


def option_c(strength, solve):
    """Algorithm 2, lines 10 to 12: PersA-FL-ME, (10); `solve` finds theta from the gradient of h, line 11."""

    def direction(w, batch, q):
        D = batch(q)
        h_gradient = lambda theta: grad(theta, D) + strength * (theta - w)  # 10
        theta = solve(h_gradient, w)  # 11
        return strength * (w - theta), theta  # 12, (10)

    return direction


def fixed_steps(lr, K):
    """Appendix D: a constant number K of gradient steps, here from w."""

    def solve(h_gradient, theta):
        for _ in range(K):
            theta = theta - lr * h_gradient(theta)
        return theta

    return solve


def up_to(lr, nu, counts):
    """Line 11: gradient steps from w until |grad h| <= nu; notes in `counts` how many it took."""

    def solve(h_gradient, theta):
        num = 0
        while np.linalg.norm(h_gradient(theta)) > nu:
            theta, num = theta - lr * h_gradient(theta), num + 1
        counts.append(num)
        return theta

    return solve


def client_update(w, batch, direction, eta, Q):
    """Algorithm 2, lines 3 to 15: Delta_i, and the last theta_i of Option C."""
    w_q = w  # 3, 4
    for q in range(Q):  # 5
        d, theta = direction(w_q, batch, q)
        w_q = w_q - eta * d  # 7, 9 or 12
    return w - w_q, theta  # 14, 15


def persafl(w, schedule, samples, direction, *, eta, beta, Q):
    """Algorithm 1: the server applies each update as it arrives; its client had read an older model."""
    models, thetas = [w], [w] * N
    for i, downloaded in events(schedule):  # 3
        delta, theta = client_update(models[downloaded], samples.visit(i), direction, eta, Q)
        models.append(models[-1] - beta * delta)  # 4, 5
        thetas[i] = theta
    return {"w": models[-1], "theta": thetas}
