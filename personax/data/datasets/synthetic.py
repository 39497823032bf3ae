"""The synthetic(gamma, beta) federation, whose clients' models and inputs differ by a chosen amount."""

from typing import NamedTuple

import numpy as np

from personax.data.federation import Federation
from personax.keys import HostStream, host_generator
from personax.typing import Array
from personax.values import DATASETS, require, require_count, require_nonnegative

MAX_SAMPLES = 10_000


class SyntheticClient(NamedTuple):
    """A client's model W (m x c) and b (c), and its samples."""

    weight: np.ndarray
    bias: np.ndarray
    x: np.ndarray
    y: np.ndarray


@DATASETS.register(
    summary="linear classifiers", source="APFL 2020, appendix B.1, after Li 2020", citations=("deng2020", "li2020")
)
def synthetic(
    model_spread: float = 0.5,
    input_spread: float = 0.5,
    *,
    num_clients: int = 100,
    num_features: int = 60,
    num_classes: int = 10,
    num_samples: int | None = None,
    test_share: float = 0.2,
    key: Array,
) -> Federation:
    """Draw clients with a linear classifier each: "synthetic" of APFL appendix B.1.

    y = argmax softmax(W_i^T x + b_i), W_i ~ N(mu_i, 1), b_i ~ N(mu_i, 1), mu_i ~ N(0, gamma);
    x ~ N(nu_i, Sigma), nu_i ~ N(V_i, 1), V_i ~ N(0, beta), Sigma diagonal with Sigma_kk = k^-1.2.

    mu_i and V_i are one number per client, and nu_i has an entry for each feature. The second argument of N is a
    variance, like Sigma. With gamma = 0, each client still draws its own W_i: synthetic(0, 0) is not IID, although the
    appendix says so. The appendix follows Li 2018 (FedProx), which has m = 60 features, c = 10 classes, and 50 + n
    samples with log n ~ N(4, 2^2).

    Departures from the paper: no client has more than 10,000 samples.

    Client i depends only on the key and on i, so more clients extend a smaller federation.

    Args:
        model_spread: gamma, the variance of mu_i.
        input_spread: beta, the variance of V_i.
        num_clients: the number of clients.
        num_features: m.
        num_classes: c.
        num_samples: the number of training and test samples of every client; None draws it as above.
        test_share: the share of a client's samples that are used for tests; 0 for none.
        key: the random key.

    >>> import jax, personax as px
    >>> fed = px.datasets.synthetic(0.5, 0.5, num_clients=4, num_features=5, num_samples=20, key=jax.random.key(0))
    >>> fed.num_clients, fed.x.shape
    (4, (64, 5))
    """
    require_nonnegative("model_spread", model_spread)
    require_nonnegative("input_spread", input_spread)
    require_count("num_clients", num_clients)
    require_count("num_features", num_features)
    require_count("num_classes", num_classes, least=2)
    require(lambda v: (v >= 0) & (v < 1), "test_share", test_share, "be at least 0 and below 1")
    require_count(
        "num_samples", num_samples, 2 if test_share else 1, "A client needs samples for training and for tests."
    )
    train, test = [], []
    for i in range(num_clients):
        rng = host_generator(key, HostStream.SYNTHETIC, i)
        made = draw_client(rng, model_spread, input_spread, num_features, num_classes, num_samples)
        num_test = int(np.clip(np.rint(test_share * len(made.x)), 1, len(made.x) - 1)) if test_share else 0
        cut = len(made.x) - num_test
        train.append((made.x[:cut], made.y[:cut]))
        test.append((made.x[cut:], made.y[cut:]))
    origin = f"synthetic({model_spread:g}, {input_spread:g}), APFL appendix B.1."
    return Federation.from_clients(train, test if test_share else None, origin=origin)


def draw_client(
    rng: np.random.Generator,
    model_spread: float,
    input_spread: float,
    num_features: int,
    num_classes: int,
    num_samples: int | None,
) -> SyntheticClient:
    """Draw one client with its own generator; the spreads are variances."""
    model_mean, input_mean = rng.normal(0, np.sqrt(model_spread)), rng.normal(0, np.sqrt(input_spread))  # mu_i, V_i
    weight = rng.normal(model_mean, 1, (num_features, num_classes))
    bias = rng.normal(model_mean, 1, num_classes)
    center = rng.normal(input_mean, 1, num_features)  # nu_i
    extra = rng.lognormal(4, 2)
    num = min(50 + int(extra), MAX_SAMPLES) if num_samples is None else num_samples
    scale = np.arange(1, num_features + 1) ** -0.6  # the square root of Sigma's diagonal
    x = (center + scale * rng.normal(size=(num, num_features))).astype(np.float32)
    y = np.argmax(x @ weight + bias, axis=1).astype(np.int32)  # softmax preserves the order
    return SyntheticClient(weight, bias, x, y)
