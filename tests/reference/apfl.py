"""APFL 2020: (5), (6) and Theorem 2. The batch of an iteration is the role outer."""

import numpy as np

from tests.reference.problem import N, cohorts, grad, mean


def ball(radius):
    """The projection onto the ball around 0, the domain W of (5)."""
    return lambda w: w * min(1.0, radius / np.linalg.norm(w))


def everywhere(w):
    return w


def apfl(w, schedule, samples, *, alpha, eta, tau, adapts=lambda t, tau: False, project=everywhere, a=0.0):
    """Section 3, Local Descent APFL, from v_i = w for all i. `eta` is a function of the iteration t = 1, 2, ...

    `adapts` says in which iterations (6) moves alpha. Also the average iterate of Theorem 2, whose a is `a`.
    """
    alpha, v = [alpha] * N, [w] * N
    t, S, total = 0, 0.0, [0.0] * N
    for U in cohorts(schedule):  # the server selects U_t and broadcasts w
        batches = {i: samples.visit(i) for i in U}
        w_local = {i: w for i in U}
        for step in range(tau):
            t += 1
            for i in U:  # the others keep v_i and alpha_i
                xi = batches[i](step)
                v_bar = alpha[i] * v[i] + (1 - alpha[i]) * w_local[i]
                g, g_bar = grad(w_local[i], xi), grad(v_bar, xi)
                slope = np.dot(v[i] - w_local[i], g_bar)  # (6): the derivative in alpha
                w_local[i] = project(w_local[i] - eta(t) * g)  # (5)
                v[i] = project(v[i] - eta(t) * alpha[i] * g_bar)  # (5): v_bar moves by alpha where v moves by 1
                if adapts(t, tau):
                    alpha[i] = min(max(alpha[i] - eta(t) * slope, 0.0), 1.0)  # (6), for alpha in [0, 1]
            p = (t + a) ** 2
            w_mean = mean(list(w_local.values()))
            total = [total[i] + p * (alpha[i] * v[i] + (1 - alpha[i]) * w_mean) for i in range(N)]
            S += p
        w = w_mean  # the average over U_t
    v_hat = np.stack(total) / S
    return {"w": w, "v": np.stack(v), "alpha": np.array(alpha), "v_hat": v_hat}
