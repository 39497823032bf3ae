"""The shared parts of the PyTorch peers: the networks as functions of tensors, and a local step of each algorithm.

A gradient and a Hessian-vector product are given from outside: `torch.autograd` for the eager loop, `torch.func` for
the vmapped one. Equation numbers are those of Fallah et al. (2020), of APFL (2020) and of PersA-FL (2023).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peer import Setting, Work, error_of
from torch import Tensor
from torch_own import NETWORKS, SEQUENCES, from_flax

Params = list[Tensor]  # weight, bias, weight, bias, ...
Batch = tuple[Tensor, Tensor]  # images as floats, labels
Gradient = Callable[[Params, Batch], Sequence[Tensor]]
Product = Callable[[Params, Batch, Sequence[Tensor]], Sequence[Tensor]]  # the Hessian of the loss times a vector
NUM_CONVOLUTIONS = {"mlp": 0, "cnn": 2, "flax-cnn": 2}
NUM_DRAWS = {"fedavg": 1, "first_order": 2, "hessian_free": 3, "exact": 3, "apfl": 1, "moreau": 1}


def use_tf32(on: bool) -> None:
    """On a GPU, products in TF32 as ours are; off to compare results, where sums in another order end 5 % apart."""
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def shapes(setting: Setting) -> list[tuple[int, ...]]:
    """The shapes of the weights: convolutions 3x3 of 32 and 64 channels for a CNN, then the dense layers."""
    kernels: list[tuple[int, ...]] = []
    if NUM_CONVOLUTIONS[setting.network]:
        height, width, depth = setting.input_shape
        kernels = [(32, depth, 3, 3), (64, 32, 3, 3)]
        num_inputs = 64 * ((height - 4) // 2) * ((width - 4) // 2)
    else:
        num_inputs = math.prod(setting.input_shape)
    sizes = [num_inputs, *setting.widths, 10]
    return [*kernels, *((out, fan_in) for fan_in, out in itertools.pairwise(sizes))]


def init_params(setting: Setting, work: Work, device: str) -> Params:
    """Weights and biases uniform within 1 / sqrt(fan in); networks of other layers start as ours."""
    if setting.network in NETWORKS:
        return from_ours(setting, work.start, device)
    params = []
    for shape in shapes(setting):
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        params += [torch.empty(part).uniform_(-bound, bound).to(device) for part in (shape, shape[:1])]
    return params


def make_loss(setting: Setting) -> Callable[[Params, Batch], Tensor]:
    """f_i(w, D): mean cross entropy of the network on a batch."""
    if setting.network in NETWORKS:
        network = NETWORKS[setting.network]
        return lambda params, batch: F.cross_entropy(network(params, batch[0]), batch[1])
    activation = {"elu": F.elu, "relu": F.relu}[setting.activation]
    num_convolutions = NUM_CONVOLUTIONS[setting.network]

    def loss(params: Params, batch: Batch) -> Tensor:
        hidden, labels = batch
        layers = list(zip(params[::2], params[1::2], strict=True))
        for weight, bias in layers[:num_convolutions]:
            hidden = activation(F.conv2d(hidden, weight, bias))
        if num_convolutions:
            hidden = F.max_pool2d(hidden, 2)
        hidden = hidden.flatten(1)
        for weight, bias in layers[num_convolutions:-1]:
            hidden = activation(F.linear(hidden, weight, bias))
        return F.cross_entropy(F.linear(hidden, *layers[-1]), labels)

    return loss


def as_images(setting: Setting, images: np.ndarray, device: str) -> Tensor:
    """Bytes as floats in [0, 1], channels first for convolutions; tokens as integers."""
    if setting.network in SEQUENCES:
        return torch.from_numpy(images).to(device).long()
    moved = torch.from_numpy(images).to(device).float() / 255
    num_axes = len(setting.input_shape)
    return moved.movedim(-1, -num_axes).contiguous() if num_axes > 1 else moved


def from_ours(setting: Setting, arrays: list[np.ndarray], device: str) -> Params:
    """Our layers (kernel, bias, ...) of one model or two in PyTorch's layout: outputs first, channels first."""
    if setting.network in NETWORKS:
        return [torch.tensor(part, dtype=torch.float32, device=device) for part in from_flax(setting.network, arrays)]
    params = []
    for i, (shape, kernel) in enumerate(zip(itertools.cycle(shapes(setting)), arrays[::2], strict=False)):
        if len(shape) == 4:
            moved = kernel.transpose(3, 2, 0, 1)
        elif i == NUM_CONVOLUTIONS[setting.network] > 0:
            side = (setting.input_shape[0] - 4) // 2
            moved = kernel.reshape(side, side, 64, -1).transpose(3, 2, 0, 1).reshape(shape)
        else:
            moved = kernel.T
        params.append(moved)
    both = [part for pair in zip(params, arrays[1::2], strict=True) for part in pair]
    return [torch.tensor(np.ascontiguousarray(part), dtype=torch.float32, device=device) for part in both]


def add(tensors: Any, direction: Any, step: Any) -> Params:
    """Tensors + step * direction, tensor by tensor."""
    return [t + step * d for t, d in zip(tensors, direction, strict=True)]


def norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([t.square().sum() for t in tensors]).sum().sqrt()


def make_step(setting: Setting, gradient: Gradient, product: Product, add: Callable[..., Params] = add) -> Callable:
    """One local step: `(w, own state, batches) -> (w, own state)`."""
    lr, adapt_lr = setting.lr, setting.adapt_lr

    def first_order(w: Params, batches: Sequence[Batch]) -> Sequence[Tensor]:
        """(112): the gradient at the adapted parameters."""
        return gradient(add(w, gradient(w, batches[0]), -adapt_lr), batches[1])

    def hessian_free(w: Params, batches: Sequence[Batch]) -> Sequence[Tensor]:
        """(120): the product as a central difference, (119) and (121), over a distance of `radius`."""
        meta = first_order(w, batches)
        radius = setting.radius / norm(meta)
        ahead, behind = (gradient(add(w, meta, sign * radius), batches[2]) for sign in (1, -1))
        return add(meta, add(ahead, behind, -1), -adapt_lr / (2 * radius))

    def exact(w: Params, batches: Sequence[Batch]) -> Sequence[Tensor]:
        """(8)."""
        meta = first_order(w, batches)
        return add(meta, product(w, batches[2], meta), -adapt_lr)

    def moreau(w: Params, batches: Sequence[Batch]) -> Sequence[Tensor]:
        """PersA-FL (8), (10): strength times w less the solution of the inner problem."""
        theta = w
        for _ in range(setting.num_prox_steps):
            slope = add(gradient(theta, batches[0]), add(theta, w, -1), setting.strength)
            theta = add(theta, slope, -setting.prox_lr)
        return [setting.strength * part for part in add(w, theta, -1)]

    def apfl(w: Params, own: Any, batches: Sequence[Batch]) -> tuple[Params, Any]:
        """APFL (5), and (6) at each step."""
        v, mix = own
        apart = add(v, w, -1)
        slope = gradient(add(w, apart, mix), batches[0])
        moved = sum((part * d).sum() for part, d in zip(slope, apart, strict=True))
        new = (add(v, slope, -lr * mix), torch.clamp(mix - lr * moved, 0, 1))
        return add(w, gradient(w, batches[0]), -lr), new

    if setting.algorithm == "apfl":
        return apfl
    erm = lambda w, batches: gradient(w, batches[0])
    directions = {"fedavg": erm, "first_order": first_order, "hessian_free": hessian_free}
    direction = {**directions, "exact": exact, "moreau": moreau}[setting.algorithm]
    return lambda w, own, batches: (add(w, direction(w, batches), -lr), own)


class Network(torch.nn.Module):
    """The same network as a module, for frameworks that want one."""

    def __init__(self, setting: Setting, params: Params) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(p.clone()) for p in params])
        self.of_batch = make_loss(setting)

    def loss(self, images: Tensor, labels: Tensor, eval: bool = False) -> Tensor:
        return self.of_batch(list(self.weights), (images, labels))

    def metrics(self, images: Tensor, labels: Tensor, eval: bool = True) -> dict[str, Any]:
        return {}


def distance(setting: Setting, found: Sequence[Tensor], work: Work) -> float:
    """Return the distance of parameters in PyTorch's layout from ours, relative to the change of ours."""
    moved = lambda arrays: [p.numpy() for p in from_ours(setting, arrays, "cpu")]
    theirs = [p.detach().cpu().numpy() for p in found]
    return error_of(theirs, work._replace(start=moved(work.start), end=moved(work.end)))
