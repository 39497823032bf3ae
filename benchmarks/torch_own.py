"""The networks of `personax/bench/own.py` in PyTorch, as functions of a list of tensors in PyTorch's layouts.

Ours come as the leaves of a Flax tree, in the order of their names; `from_flax` moves them to PyTorch's layouts.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Params = list[Tensor]
SEQUENCES = ("lstm", "transformer")
GATES = 4  # of a recurrent cell, by name: f, g, i, o; PyTorch's order is i, f, g, o


def resnet(params: Params, x: Tensor) -> Tensor:
    """Nine convolutions, then bias and weight of the dense layer, then bias and scale of seven norms."""
    convs, (bias, weight), norms = iter(params[:9]), params[9:11], iter(params[11:])
    conv = lambda x, stride=1: F.conv2d(x, kernel := next(convs), None, stride, kernel.shape[-1] // 2)

    def norm(x: Tensor) -> Tensor:
        shift, scale = next(norms), next(norms)
        return F.group_norm(x, 8, scale, shift, 1e-6)

    x = F.relu(norm(conv(x)))
    for stride in (1, 2, 2):
        # Flax pads a strided 3x3 convolution of an even image below and on the right alone.
        y = F.relu(norm(conv(x) if stride == 1 else F.conv2d(F.pad(x, (0, 1, 0, 1)), next(convs), None, 2)))
        y = norm(conv(y))
        x = F.relu(y + (x if stride == 1 else conv(x, stride)))
    return F.linear(x.mean((2, 3)), weight, bias)


def signal_cnn(params: Params, x: Tensor) -> Tensor:
    """Kernel and bias of two convolutions and of two dense layers."""
    first, second, hidden, last = (params[i : i + 2] for i in range(0, 8, 2))
    for kernel, bias in (first, second):
        x = F.max_pool1d(F.relu(F.conv1d(x, kernel, bias, padding=2)), 2)
    x = x.transpose(1, 2).flatten(1)  # time before channels, as ours
    return F.linear(F.relu(F.linear(x, *hidden)), *last)


def lstm(params: Params, x: Tensor) -> Tensor:
    """Bias and weight of the dense layer, the embedding, and of each cell its weights (inputs, carry) and biases."""
    bias, weight, table, *cells = params
    hidden = F.embedding(x, table)
    zeros = hidden.new_zeros(2, len(x), cells[1].shape[1])
    flat = [part for i in (0, 1) for part in (*cells[3 * i : 3 * i + 3], torch.zeros_like(cells[3 * i + 2]))]
    hidden = torch._VF.lstm(hidden, (zeros, zeros), flat, True, 2, 0.0, torch.is_grad_enabled(), False, True)[0]
    return F.linear(hidden[:, -1], weight, bias)


def transformer(params: Params, x: Tensor) -> Tensor:
    """The leaves of the Flax tree: dense layers, embedding, norms, attention (key, out, query, value), places."""
    dense = [params[i : i + 2] for i in range(0, 10, 2)]  # bias, weight
    table, norms = params[10], [params[i : i + 2] for i in range(11, 21, 2)]  # bias, scale
    attention = [[params[i : i + 2] for i in range(at, at + 8, 2)] for at in (21, 29)]
    norm = lambda x, i: F.layer_norm(x, x.shape[-1:], norms[i][1], norms[i][0], 1e-6)
    linear = lambda x, layer: F.linear(x, layer[1], layer[0])
    heads = lambda x, layer: linear(x, layer).unflatten(-1, (4, -1)).transpose(1, 2)
    x = F.embedding(x, table) + params[-1]
    for i in range(2):
        key, out, query, value = attention[i]
        y = norm(x, 2 * i)
        y = F.scaled_dot_product_attention(heads(y, query), heads(y, key), heads(y, value))
        x = x + linear(y.transpose(1, 2).flatten(2), out)
        x = x + linear(F.gelu(linear(norm(x, 2 * i + 1), dense[2 * i]), approximate="tanh"), dense[2 * i + 1])
    return linear(norm(x, 4).mean(1), dense[4])


NETWORKS: dict[str, Callable[[Params, Tensor], Tensor]] = {
    "resnet": resnet,
    "signal-cnn": signal_cnn,
    "lstm": lstm,
    "transformer": transformer,
}


def from_flax(network: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Our leaves in PyTorch's layouts: outputs first, channels first, gates of a cell together."""
    if network == "transformer":
        head = [_moved(array) for array in arrays[:21]]
        return [*head[:10], arrays[10], *head[11:], *map(_of_attention, arrays[21:37]), arrays[37]]
    if network == "lstm":
        bias, kernel, table, *cells = arrays
        half = len(cells) // 2
        return [bias, kernel.T, table, *_cell(cells[:half]), *_cell(cells[half:])]
    return [_moved(array) for array in arrays]


def _moved(array: np.ndarray) -> np.ndarray:
    """A kernel with outputs first, then inputs."""
    return np.ascontiguousarray(np.moveaxis(array, (-1, -2), (0, 1))) if array.ndim > 1 else array


def _of_attention(array: np.ndarray) -> np.ndarray:
    """A bias or a kernel of one projection of attention, its heads side by side."""
    if array.ndim < 3:
        return array.reshape(-1)
    width = max(array.shape)  # kernels are [width, head, unit], or [head, unit, width] for the output
    return np.ascontiguousarray(array.reshape(width, -1).T if array.shape[0] == width else array.reshape(-1, width).T)


def _cell(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The leaves of a cell: bias and kernel of the carry for f, g, i, o, then kernels of the inputs for f, g, i, o."""
    biases, carry, inputs = arrays[: 2 * GATES : 2], arrays[1 : 2 * GATES : 2], arrays[2 * GATES :]
    ordered = lambda parts: [parts[at] for at in (2, 0, 1, 3)]
    stack = lambda parts: np.ascontiguousarray(np.concatenate([part.T for part in ordered(parts)]))
    return [stack(inputs), stack(carry), np.concatenate(ordered(biases))]
