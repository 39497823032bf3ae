"""The networks of the papers.

A network is a `Model(init, apply)` of pure functions. By default, kernels are initialized Glorot-normal and biases to
zero; with `init="fan_in"`, both are uniform within +-1 / sqrt(inputs of a unit), PyTorch's default. Parameters have
JAX's default float type; `apply` computes in the dtype of its parameters, regardless of the dtype of `x`.
Equal arguments give the same `Model` object, because `jit` identifies functions by identity: a model that is built
twice compiles only once.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from personax.models.batch_norm import batch_norm, init_batch_norm
from personax.typing import Model, Params
from personax.values import MODELS, require, require_count, require_one_of, require_positive

Activation = Callable[[Array], Array]
Norm = Callable[[int, Array], Array]  # the normalization with this number


@jax.custom_jvp
def _elu(x: Array) -> Array:
    """Compute `jax.nn.elu` with its derivative from the output, so that the input need not be stored."""
    return jax.nn.elu(x)


@_elu.defjvp
def _elu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = _elu(*primals)
    return y, tangents[0] * jnp.where(y > 0, jnp.ones_like(y), y + 1)


# All of them are monotone, so pooling may come first.
_ACTIVATIONS: dict[str, Activation] = {"elu": _elu, "relu": jax.nn.relu, "tanh": jnp.tanh}
_LAYOUT = ("NHWC", "HWIO", "NHWC")
_PADDINGS = ("SAME", "VALID")
_POOLINGS = ("each", "last")
_INITS = ("glorot", "fan_in")
_NORMS = ("none", "batch")


@MODELS.register()
def mlp(
    widths: Sequence[int], num_outputs: int, activation: str = "elu", init: str = "glorot", norm: str = "none"
) -> Model:
    """Make a fully connected network with one hidden layer for each entry of `widths`; inputs are flattened.

    With `norm="batch"`, each hidden layer has batch normalization instead of a bias, named `norm_0`, `norm_1`, ...

    Fallah 2020 section 5 and gMeta 2025: `mlp((80, 60), 10)`; gMeta does not state its activation.
    APFL 2020 Table 2 and appendix B: `mlp((200, 200), 10, "relu")`.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> model = px.mlp((80, 60), num_outputs=10)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 784)))
    >>> model.apply(params, jnp.zeros((5, 784))).shape
    (5, 10)
    """
    require_one_of("activation", activation, tuple(_ACTIVATIONS))
    require_one_of("init", init, _INITS)
    require_one_of("norm", norm, _NORMS)
    return _mlp(_counts("widths", widths), _count("num_outputs", num_outputs), activation, init, norm == "batch")


@MODELS.register()
def logistic_regression(num_outputs: int, init: str = "glorot") -> Model:
    """Make a linear model, an `mlp` without hidden layers (APFL 2020 section 5, the strongly convex loss).

    It is initialized at random like the others, so seeds vary it too. The paper's parameter regularization belongs to
    the loss: `classification(model, l2=...)`.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> model = px.logistic_regression(num_outputs=3)
    >>> jax.tree.map(jnp.shape, model.init(jax.random.key(0), jnp.zeros((1, 4))))
    {'dense_0': {'bias': (3,), 'kernel': (4, 3)}}
    """
    return mlp((), num_outputs, init=init)


@MODELS.register()
def cnn(
    channels: Sequence[int],
    widths: Sequence[int],
    num_outputs: int,
    kernel_size: int = 5,
    padding: str = "SAME",
    activation: str = "relu",
    dropout: float = 0.0,
    init: str = "glorot",
    pooling: str = "each",
    norm: str = "none",
) -> Model:
    """Make a convolutional network for images `[batch, height, width, channel]` or `[batch, height, width]`.

    Each entry of `channels` is a convolution, the activation and 2x2 max pooling (an odd last row or column is dropped;
    with `pooling="last"`, only the last convolution is pooled). Each entry of `widths` is a hidden dense layer, the
    activation and dropout. The output layer follows. With `norm="batch"`, each layer except the last has batch
    normalization instead of a bias, named `norm_0`, `norm_1`, ..., starting with the convolutions.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> model = px.cnn((4, 8), (16,), num_outputs=10, kernel_size=3, dropout=0.2)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 8, 8)))
    >>> model.apply(params, jnp.zeros((5, 8, 8))).shape
    (5, 10)
    """
    require_one_of("padding", padding, _PADDINGS)
    require_one_of("activation", activation, tuple(_ACTIVATIONS))
    require_one_of("init", init, _INITS)
    require_one_of("pooling", pooling, _POOLINGS)
    require_one_of("norm", norm, _NORMS)
    require(lambda v: (v >= 0) & (v < 1), "dropout", dropout, "be in [0, 1)", "It is the share of units set to zero.")
    widths = _counts("widths", widths)
    if dropout:
        hint = "Dropout follows hidden dense layers: add one, or set `dropout` to 0."
        require(lambda v: v.size > 0, "widths", widths, "not be empty with dropout", hint)
    sizes = _counts("channels", channels), widths, _count("num_outputs", num_outputs)
    options = (padding, activation, float(dropout), init, pooling, norm == "batch")
    return _cnn(*sizes, _count("kernel_size", kernel_size), *options)


@MODELS.register()
def cnn2(num_outputs: int, dropout: float = 0.0, init: str = "glorot") -> Model:
    """Make a CNN with 2 convolutions and 2 dense layers, counting the output layer.

    APFL 2020 Table 1; PersA-FL 2023 on MNIST, l = 2.

    Departures from the papers: they do not state sizes; these are small enough to train on a CPU.

    >>> import jax, personax as px
    >>> images = jax.ShapeDtypeStruct((5, 28, 28), float)
    >>> outputs = lambda key, x: px.cnn2(10).apply(px.cnn2(10).init(key, x), x)
    >>> jax.eval_shape(outputs, jax.random.key(0), images).shape
    (5, 10)
    """
    return cnn((16, 32), (128,), num_outputs, kernel_size=5, dropout=dropout, init=init)


@MODELS.register()
def cnn3(num_outputs: int, dropout: float = 0.0, init: str = "glorot") -> Model:
    """Make a CNN with 3 convolutions and 3 dense layers, counting the output layer.

    PersA-FL 2023 appendix D on CIFAR-10, l = 3.

    Departures from the paper: it does not state sizes; these are small enough to train on a CPU.

    >>> import jax, personax as px
    >>> images = jax.ShapeDtypeStruct((5, 32, 32, 3), float)
    >>> outputs = lambda key, x: px.cnn3(10).apply(px.cnn3(10).init(key, x), x)
    >>> jax.eval_shape(outputs, jax.random.key(0), images).shape
    (5, 10)
    """
    return cnn((16, 32, 64), (128, 64), num_outputs, kernel_size=3, dropout=dropout, init=init)


def standardized(model: Model, mean: float | Sequence[float], deviation: float | Sequence[float]) -> Model:
    """Standardize a network's inputs, (x - mean) / deviation, with one number each or one per channel.

    Images in bytes are in [0, 1] here, so `mean` and `deviation` refer to that range.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> model = px.standardized(px.logistic_regression(2), mean=0.5, deviation=0.25)
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 3)))
    >>> model.apply(params, jnp.full((1, 3), 0.5)).tolist()  # inputs at the mean become zero
    [[0.0, 0.0]]
    """
    require_positive("deviation", deviation)
    shift, scale = (tuple(np.atleast_1d(given).tolist()) for given in (mean, deviation))
    return _standardized(model, shift, scale)


def _count(name: str, given: int) -> int:
    require_count(name, given)
    return operator.index(given)


def _counts(name: str, given: Sequence[int]) -> tuple[int, ...]:
    require(lambda v: v.ndim == 1, name, given, "be a tuple of layer sizes", "Write one layer of size 80 as (80,).")
    return tuple(_count(name, size) for size in given)


@functools.cache
def _standardized(model: Model, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Model:
    def inputs(x: Array) -> Array:
        if wrong := {len(mean), len(deviation)} - {1, x.shape[-1]}:
            raise ValueError(
                f"`mean` and `deviation` must have one number, or {x.shape[-1]}, one for each channel of `x` of shape "
                f"{x.shape}, got {wrong.pop()}."
            )
        of_channel = lambda given: jnp.reshape(jnp.asarray(given), (1,) * (x.ndim - 1) + (-1,))
        return (x - of_channel(mean)) / of_channel(deviation)

    train = model.train
    return Model(
        lambda key, x: model.init(key, inputs(x)),
        lambda params, x, key=None: model.apply(params, inputs(x), key),
        None if train is None else lambda params, x, weight, key: train(params, inputs(x), weight, key),
    )


@functools.cache
def _mlp(widths: tuple[int, ...], num_outputs: int, activation: str, start: str, normalizes: bool) -> Model:
    sizes = (*widths, num_outputs)
    act = _ACTIVATIONS[activation]

    def init(key: Array, x: Array) -> Params:
        dense = _init_dense(start, key, math.prod(x.shape[1:]), sizes)
        return _with_norms(dense, widths) if normalizes else dense

    def forward(params: Params, x: Array, key: Array | None, norm: Norm) -> Array:
        return _dense_layers(params, _flatten(x), len(sizes), act, norm=norm)

    return _model(init, forward, normalizes)


@functools.cache
def _cnn(
    channels: tuple[int, ...],
    widths: tuple[int, ...],
    num_outputs: int,
    kernel_size: int,
    padding: str,
    activation: str,
    dropout: float,
    start: str,
    pooling: str,
    normalizes: bool,
) -> Model:
    sizes = (*widths, num_outputs)
    act = _ACTIVATIONS[activation]
    pooled = [pooling == "each" or at == len(channels) - 1 for at in range(len(channels))]

    def init(key: Array, x: Array) -> Params:
        image = _image_shape(x)
        height, width = (_pooled_size(side, pooled, kernel_size, padding) for side in image[:2])
        depths = (image[2], *channels)
        dense_key, *keys = jax.random.split(key, 1 + len(channels))
        convs = {
            f"conv_{i}": _init_layer(start, keys[i], (kernel_size, kernel_size, depths[i], depths[i + 1]))
            for i in range(len(channels))
        }
        layers = convs | _init_dense(start, dense_key, height * width * depths[-1], sizes)
        return _with_norms(layers, (*channels, *widths)) if normalizes else layers

    def forward(params: Params, x: Array, key: Array | None, norm: Norm) -> Array:
        x = x.reshape(x.shape[0], *_image_shape(x)).astype(params["dense_0"]["kernel"].dtype)
        for i in range(len(channels)):
            layer = params[f"conv_{i}"]
            x = jax.lax.conv_general_dilated(x, layer["kernel"], (1, 1), padding, dimension_numbers=_LAYOUT)
            # Pooling comes first where everything after it is monotone, because that then costs a quarter.
            x = _max_pool(x) if pooled[i] and not normalizes else x
            x = act(norm(i, x) if normalizes else x + layer["bias"][None, None, None, :])
            x = _max_pool(x) if pooled[i] and normalizes else x
        return _dense_layers(params, _flatten(x), len(sizes), act, dropout, key, norm, len(channels))

    return _model(init, forward, normalizes)


def _model(
    init: Callable[[Array, Array], Params], forward: Callable[[Params, Array, Array | None, Norm], Array], norms: bool
) -> Model:
    """Make a network from a function of its normalizations, with or without them."""
    if not norms:
        return Model(init, lambda params, x, key=None: forward(params, x, key, _no_norm))

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        if key is not None:
            return train(params, x, jnp.ones(len(x)), key)[0]
        return forward(params, x, None, lambda i, x: batch_norm(params[f"norm_{i}"], x, None)[0])

    def train(params: Params, x: Array, weight: Array, key: Array) -> tuple[Array, Params]:
        statistics = jax.tree.map(lambda _: None, params)

        def norm(i: int, x: Array) -> Array:
            x, new = batch_norm(params[f"norm_{i}"], x, weight)
            statistics[f"norm_{i}"] |= new
            return x

        return forward(params, x, key, norm), statistics

    return Model(init, apply, train)


def _no_norm(index: int, x: Array) -> Array:
    return x


def _with_norms(layers: Params, sizes: Sequence[int]) -> Params:
    """Return layers with a normalization instead of a bias, except for the last layer."""
    *hidden, last = layers
    kernels = {name: {"kernel": layers[name]["kernel"]} for name in hidden}
    norms = {f"norm_{i}": init_batch_norm(size) for i, size in enumerate(sizes)}
    return {**kernels, last: layers[last], **norms}


def _max_pool(x: Array) -> Array:
    """Apply 2x2 max pooling."""
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _init_layer(start: str, key: Array, shape: tuple[int, ...]) -> Params:
    if start == "glorot":
        return {"kernel": jax.nn.initializers.glorot_normal()(key, shape), "bias": jnp.zeros(shape[-1])}
    bound, (kernel_key, bias_key) = math.prod(shape[:-1]) ** -0.5, jax.random.split(key)
    uniform = lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)
    return {"kernel": uniform(kernel_key, shape), "bias": uniform(bias_key, shape[-1:])}


def _init_dense(start: str, key: Array, num_inputs: int, sizes: tuple[int, ...]) -> Params:
    inputs = (num_inputs, *sizes)
    keys = jax.random.split(key, len(sizes))
    return {f"dense_{i}": _init_layer(start, keys[i], (inputs[i], sizes[i])) for i in range(len(sizes))}


def _dense_layers(
    params: Params,
    x: Array,
    num_layers: int,
    act: Activation,
    dropout: float = 0.0,
    key: Array | None = None,
    norm: Norm = _no_norm,
    num_before: int = 0,
) -> Array:
    """Apply dense layers with the activation and dropout between them. Without a key, dropout is off.

    A layer without a bias has a normalization instead; `num_before` normalizations precede these layers.
    """
    for i in range(num_layers):
        layer = params[f"dense_{i}"]
        x = x.astype(layer["kernel"].dtype) @ layer["kernel"]
        x = x + layer["bias"][None, :] if "bias" in layer else norm(num_before + i, x)
        if i < num_layers - 1:
            x = act(x)
            if dropout and key is not None:
                x = drop_units(x, dropout, jax.random.fold_in(key, i))
    return x


def drop_units(x: Array, rate: float, key: Array) -> Array:
    """Apply inverted dropout: kept units are scaled up, so that the expectation is `x`."""
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def _flatten(x: Array) -> Array:
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def _image_shape(x: Array) -> tuple[int, int, int]:
    """Return height, width and channels; a batch without a channel axis has one channel."""
    if x.ndim not in (3, 4):
        raise ValueError(
            f"`x` must have shape [batch, height, width] or [batch, height, width, channel], got {x.shape}. "
            "For flat inputs, use `mlp(...)`."
        )
    height, width, channel = (*x.shape[1:], 1)[:3]
    return height, width, channel


def _pooled_size(side: int, pooled: list[bool], kernel_size: int, padding: str) -> int:
    """Return one side of the image after convolutions, some of which are pooled."""
    size = side
    for halved in pooled:
        size = (size if padding == "SAME" else size - kernel_size + 1) // (1 + halved)
        if size < 1:
            raise ValueError(
                f"`x` must be large enough for {len(pooled)} convolutions ({padding}) and {sum(pooled)} poolings, got "
                f"a side of {side}. Use fewer `channels`, a smaller `kernel_size` or padding 'SAME'."
            )
    return size
