"""gMeta 2025, whose l and l' are j here.

D_0 ... D_{nu-1} are the adapt batches, D_nu the outer one, D'_0 ... D'_{nu-1} the curvature batches.
"""

from tests.reference.problem import cohorts, grad, hvp, mean


def local_update(w_in, alpha, beta, nu, D, D_prime):
    """Algorithm 2, exact."""
    w = [w_in]  # 1
    for j in range(1, nu + 1):  # 2
        w.append(w[j - 1] - alpha * grad(w[j - 1], D[j - 1]))  # 3, 4
    d = grad(w[nu], D[nu])  # 6
    for j in range(1, nu + 1):  # 7
        d = d - alpha * hvp(w[nu - j], D_prime[nu - j], d)  # 8, 9
    return w_in - beta * d  # 11


def local_update_fo(w_in, alpha, beta, nu, D, D_prime):
    """Algorithm 3, first-order."""
    w = w_in  # 1
    for j in range(1, nu + 1):  # 2
        w = w - alpha * grad(w, D[j - 1])  # 3
    return w_in - beta * grad(w, D[nu])  # 5


def local_update_hf(delta):
    """Algorithm 4, Hessian-free."""

    def update(w_in, alpha, beta, nu, D, D_prime):
        w = [w_in]  # 1
        for j in range(1, nu + 1):  # 2
            w.append(w[j - 1] - alpha * grad(w[j - 1], D[j - 1]))  # 3, 4
        d = grad(w[nu], D[nu])  # 6
        for j in range(1, nu + 1):  # 7
            g_plus = grad(w[nu - j] + delta * d, D_prime[nu - j])  # 8
            g_minus = grad(w[nu - j] - delta * d, D_prime[nu - j])  # 9
            d = d - alpha / (2 * delta) * (g_plus - g_minus)  # 10
        return w_in - beta * d  # 12

    return update


def on_outer(update):
    """Every Hessian on D_nu: for nu = 1 Fallah's Algorithm 1 as printed."""
    return lambda w, alpha, beta, nu, D, D_prime: update(w, alpha, beta, nu, D, [D[nu]] * nu)


def generalized_meta(w, schedule, samples, update, *, alpha, beta, tau, nu):
    """Algorithm 1, with `update` in line 7."""
    for A_k in cohorts(schedule):  # 1, 2
        received = []
        for i in A_k:  # 4
            batch = samples.visit(i)
            w_i = w  # 3, 5
            for t in range(tau):  # 6
                D = [batch(t, "adapt", j) for j in range(nu)] + [batch(t, "outer")]
                D_prime = [batch(t, "curvature", j) for j in range(nu)]
                w_i = update(w_i, alpha, beta, nu, D, D_prime)  # 7
            received.append(w_i)  # 9
        w = mean(received)  # 11
    return {"w": w}
