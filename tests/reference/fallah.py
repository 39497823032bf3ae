"""Fallah 2020, Per-FedAvg. D, D', D'' of (8) are the roles adapt, outer, curvature."""

import numpy as np

from tests.reference.problem import cohorts, grad, hvp, mean


def exact(w, alpha, D, D1, D2):
    """(8)."""
    g = grad(w - alpha * grad(w, D), D1)
    return g - alpha * hvp(w, D2, g)


def first_order(w, alpha, D, D1, D2):
    """(112)."""
    return grad(w - alpha * grad(w, D), D1)


def hessian_free(radius):
    """(120) and (121); `radius` gives the paper's delta for a vector (the paper: a constant)."""

    def estimate(w, alpha, D, D1, D2):
        v = grad(w - alpha * grad(w, D), D1)
        delta = radius(v)
        d = (grad(w + delta * v, D2) - grad(w - delta * v, D2)) / (2 * delta)  # (121), by (119)
        return v - alpha * d  # (120)

    return estimate


def as_printed(estimate):
    """Algorithm 1 and the text under (8): D' for the Hessian too."""
    return lambda w, alpha, D, D1, D2: estimate(w, alpha, D, D1, D1)


def constant(delta):
    return lambda v: delta


def relative(delta):
    """Ours: the difference is taken over a distance delta, whatever the length of the vector."""
    return lambda v: delta / np.linalg.norm(v)


def per_fedavg(w, schedule, samples, estimate, *, alpha, beta, tau):
    """Algorithm 1; `beta` is a function of the round k = 1, 2, ... (Remark G.1).

    Also Remark 4.7's candidates: the mean over A_k of the iterates of the last round, t = 0 ... tau.
    """
    for k, A_k in enumerate(cohorts(schedule)):  # for k: 0 to K - 1; the server chooses A_k
        paths = []
        for i in A_k:  # for all i in A_k
            batch = samples.visit(i)
            path = [w]  # w_{k+1,0}^i = w_k
            for t in range(1, tau + 1):  # for t: 1 to tau
                D, D1, D2 = (batch(t - 1, role) for role in ("adapt", "outer", "curvature"))
                path.append(path[-1] - beta(k + 1) * estimate(path[-1], alpha, D, D1, D2))  # (7)
            paths.append(path)  # agent i sends w_{k+1,tau}^i (Remark 4.7: and w_{k+1,t_k}^i) back
        means = [mean(iterates) for iterates in zip(*paths, strict=True)]
        w = means[tau]  # w_{k+1} = mean over A_k of w_{k+1,tau}^i
    return {"w": w, "means": means}
