"""The methods that the papers compare with, each from its own paper; a step's batch is the role outer."""

import numpy as np

from tests.reference.problem import COUNTS, N, cohorts, data, events, grad, mean


def steps(num):
    """A fixed number of local steps for every client."""
    return lambda i: num


def epochs(num, batch_size):
    """The steps of `num` passes over a client's data."""
    return lambda i: num * -(-COUNTS[i] // batch_size)


def descend(w, batch, lr, num_steps):
    """SGD on the client's own loss."""
    for k in range(num_steps):
        w = w - lr * grad(w, batch(k))
    return w


def fedavg(w, schedule, samples, *, lr, num_steps, weights=lambda i: 1):
    """McMahan 2017, Algorithm 1; with `weights` n_k its mean by samples."""
    for S_t in cohorts(schedule):
        received = {k: descend(w, samples.visit(k), lr, num_steps(k)) for k in S_t}
        w = sum(weights(k) * w_k for k, w_k in received.items()) / sum(map(weights, S_t))
    return {"w": w}


def proximal_descent(w, batch, lr, num_steps, mu):
    """SGD on h(y) = f_i(y) + mu/2 |y - w|^2."""
    y = w
    for k in range(num_steps):
        y = y - lr * (grad(y, batch(k)) + mu * (y - w))
    return y


def fedprox(w, schedule, samples, *, lr, num_steps, mu):
    """Li 2020, Algorithm 2, with the subproblem solved by `num_steps` of SGD."""
    for S_t in cohorts(schedule):
        w = mean([proximal_descent(w, samples.visit(k), lr, num_steps(k), mu) for k in S_t])
    return {"w": w}


def scaffold(x, schedule, samples, *, lr, global_lr, num_steps, option):
    """Karimireddy 2020, Algorithm 1; `lr` may be a function of the round and the local step, both from 0."""
    eta = lr if callable(lr) else lambda r, k: lr
    c, c_i = np.zeros_like(x), [np.zeros_like(x) for _ in range(N)]
    for r, S in enumerate(cohorts(schedule)):  # 3, 4, 5
        delta_y, delta_c = [], []
        for i in S:  # 6
            batch, K = samples.visit(i), num_steps(i)
            y = x  # 7
            for k in range(K):  # 8
                y = y - eta(r, k) * (grad(y, batch(k)) - c_i[i] + c)  # 9, 10
            total = sum(eta(r, k) for k in range(K))  # K eta, if it is constant
            plus = grad(x, data(i)) if option == 1 else c_i[i] - c + (x - y) / total  # 12
            delta_y.append(y - x)  # 13
            delta_c.append(plus - c_i[i])  # 13
            c_i[i] = plus  # 14
        x = x + global_lr * mean(delta_y)  # 16, 17
        c = c + len(S) / N * mean(delta_c)  # 16, 17
    return {"w": x, "c": c, "c_i": np.stack(c_i)}


def pfedme(w, schedule, samples, *, strength, lr, prox_lr, num_prox_steps, beta, R):
    """Dinh 2020, Algorithm 1, with line 7's subproblem solved by gradient steps from w_{i,r}."""
    theta, aggregated = [w] * N, np.split(schedule.aggregated, np.flatnonzero(schedule.round_ends) + 1)
    for everyone, sampled in zip(cohorts(schedule), aggregated, strict=False):  # 2
        assert sorted(everyone) == list(range(N))  # 3, 4: all clients train
        sent = []
        for i, is_sampled in zip(everyone, sampled, strict=True):
            batch, w_i = samples.visit(i), w  # 5
            for r in range(R):  # 6
                theta[i] = w_i
                for _ in range(num_prox_steps):  # 7
                    theta[i] = theta[i] - prox_lr * (grad(theta[i], batch(r)) + strength * (theta[i] - w_i))
                w_i = w_i - lr * strength * (w_i - theta[i])  # 8
            sent += [w_i] if is_sampled else []  # 9
        w = (1 - beta) * w + beta * mean(sent)  # 10
    return {"w": w, "theta": np.stack(theta)}


def polynomial(a):
    """Xie 2019: s(staleness)."""
    return lambda staleness: (staleness + 1) ** -a


def hinge(a, b):
    """Xie 2019: s(staleness)."""
    return lambda staleness: 1 if staleness <= b else 1 / (a * (staleness - b) + 1)


def fedasync(x, schedule, samples, *, lr, num_steps, rho, alpha, s, max_staleness=np.inf):
    """Xie 2019, Algorithm 1. Time stamps count the updates in a model, so that a fresh update has staleness 0."""
    models, num_dropped = [(x, 0)], 0
    for i, downloaded in events(schedule):
        (x_tau, tau), (x, t) = models[downloaded], models[-1]
        x_new = proximal_descent(x_tau, samples.visit(i), lr, num_steps(i), rho)
        if t - tau > max_staleness:
            models.append((x, t))
            num_dropped += 1
            continue
        alpha_t = alpha * s(t - tau)
        models.append(((1 - alpha_t) * x + alpha_t * x_new, t + 1))
    return {"w": models[-1][0], "num_dropped": num_dropped}


def fedbuff(w, schedule, samples, *, lr, num_steps, global_lr, K):
    """Nguyen 2022, Algorithms 1 and 2, updates weighted by 1 / sqrt(1 + staleness)."""
    models, t, buffer = [(w, 0)], 0, 0.0
    for event, (i, downloaded) in enumerate(events(schedule), start=1):
        y_0, version = models[downloaded]
        delta = y_0 - descend(y_0, samples.visit(i), lr, num_steps(i))
        buffer = buffer + delta / np.sqrt(1 + t - version)
        if event % K == 0:
            w, t, buffer = w - global_lr * buffer / K, t + 1, 0.0
        models.append((w, t))
    return {"w": w}


def aruba(phi, schedule, samples, *, num_steps, epsilon, zeta, p):
    """Khodak 2019, Algorithm 2, around FedAvg: the tasks of a round share phi and eta."""
    b, g, t = np.full_like(phi, epsilon**2), np.full_like(phi, zeta**2), 0
    for S in cohorts(schedule):
        eta, ends = np.sqrt(b / g), []
        for i in S:
            t += 1
            batch, theta = samples.visit(i), phi
            squares = np.zeros_like(phi)
            for k in range(num_steps(i)):
                gradient = grad(theta, batch(k))
                theta = theta - eta * gradient
                squares = squares + gradient**2
            b = b + epsilon**2 / (t + 1) ** p + (phi - theta) ** 2 / 2
            g = g + zeta**2 / (t + 1) ** p + squares
            ends.append(theta)
        phi = mean(ends)
    return {"w": phi, "b": b, "g": g, "t": t + 1}


def local_only(w, schedule, samples, *, lr, num_steps):
    """Every client from its own model, for ever."""
    v = [w] * N
    for S in cohorts(schedule):
        for i in S:
            v[i] = descend(v[i], samples.visit(i), lr, num_steps(i))
    return {"w": w, "v": np.stack(v)}
