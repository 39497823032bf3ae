"""Per-FedAvg as an eager PyTorch loop: the peer that the simulator is timed against in the same run.

The setting is Fallah et al. (2020) on MNIST: 50 clients of 980 images, 10 a round, 10 local steps, batches of 40,
a 784-80-60-10 network with ELU. Images and labels are random, which is enough for timing. Equation numbers are
those of that paper.

    python benchmarks/torch_loop.py [--device cpu|cuda] [--rounds N]
    python benchmarks/torch_loop.py --check

The operations are small: where other processes use the same cores, PyTorch's threads wait for each other and a round
can take ten times as long. Set OMP_NUM_THREADS=1 there; on two idle cores the second thread gains little.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LAYER_SIZES = (784, 80, 60, 10)
ADAPT_STEP = 0.01  # alpha
LOCAL_STEP = 0.001  # beta
RADIUS = 1e-3  # delta, of the central difference

Params = list[Tensor]  # weight, bias, weight, bias, ...: leaves that require a gradient
Grads = tuple[Tensor, ...] | list[Tensor]
Batch = tuple[Tensor, Tensor]  # images, labels
Estimator = Callable[..., Grads]  # of the parameters and as many batches as the variant draws


def init_params(generator: torch.Generator, device: str, dtype: torch.dtype = torch.float32) -> Params:
    """Weights and biases uniform within 1 / sqrt(fan in), drawn on the host."""
    params = []
    for fan_in, fan_out in itertools.pairwise(LAYER_SIZES):
        bound = 1 / math.sqrt(fan_in)
        for shape in ((fan_out, fan_in), (fan_out,)):
            values = torch.empty(shape, dtype=dtype).uniform_(-bound, bound, generator=generator)
            params.append(values.to(device).requires_grad_())
    return params


def loss(params: Params, batch: Batch) -> Tensor:
    """f_i(w, D): mean cross entropy of the network on a batch."""
    images, labels = batch
    w1, b1, w2, b2, w3, b3 = params
    hidden = F.elu(F.linear(images, w1, b1))
    hidden = F.elu(F.linear(hidden, w2, b2))
    return F.cross_entropy(F.linear(hidden, w3, b3), labels)


def gradient(params: Params, batch: Batch) -> Grads:
    """The gradient of the loss: FedAvg's direction."""
    return torch.autograd.grad(loss(params, batch), params)


def add(tensors: Grads, direction: Grads, step: float) -> Grads:
    """Tensors + step * direction: the call PyTorch's own optimizers make, one kernel for the whole list on CUDA."""
    return torch._foreach_add(tensors, direction, alpha=step)  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def moved(params: Params, direction: Grads, step: float) -> Params:
    """New leaves at params + step * direction."""
    return [p.requires_grad_() for p in add(params, direction, step)]


def first_order(params: Params, adapt: Batch, outer: Batch) -> Grads:
    """(112): the gradient at the adapted parameters."""
    return gradient(moved(params, gradient(params, adapt), -ADAPT_STEP), outer)


def hessian_free(params: Params, adapt: Batch, outer: Batch, curvature: Batch) -> Grads:
    """(120): the Hessian-vector product as a central difference of gradients, (119) and (121)."""
    meta = first_order(params, adapt, outer)
    ahead = gradient(moved(params, meta, RADIUS), curvature)
    behind = gradient(moved(params, meta, -RADIUS), curvature)
    difference = add(ahead, behind, -1)
    return add(meta, difference, -ADAPT_STEP / (2 * RADIUS))


def exact(params: Params, adapt: Batch, outer: Batch, curvature: Batch) -> Grads:
    """(8): the Hessian-vector product by a second backward pass."""
    meta = first_order(params, adapt, outer)
    slope = torch.autograd.grad(loss(params, curvature), params, create_graph=True)
    product = torch.autograd.grad(slope, params, grad_outputs=meta)
    return add(meta, product, -ADAPT_STEP)


VARIANTS: dict[str, tuple[Estimator, int]] = {  # the estimator and how many batches it takes
    "fedavg": (gradient, 1),
    "first_order": (first_order, 2),
    "hessian_free": (hessian_free, 3),
    "exact": (exact, 3),
}


class TorchLoop:
    """Rounds of one variant, one client after another, all on one device.

    The data are float32 on the device from the start, one tensor of images and one of labels per client.
    On CUDA, float32 products run in TF32; that is a global setting of PyTorch.
    """

    def __init__(
        self,
        variant: str,
        device: str = "cpu",
        seed: int = 0,
        num_clients: int = 50,
        samples_per_client: int = 980,
        cohort_size: int = 10,
        num_local_steps: int = 10,
        batch_size: int = 40,
    ) -> None:
        self.estimate, self.num_batches = VARIANTS[variant]
        self.device = torch.device(device)
        self.cohort_size, self.num_local_steps, self.batch_size = cohort_size, num_local_steps, batch_size
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        self.host_generator = torch.Generator().manual_seed(seed)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.clients = [self._random_client(samples_per_client) for _ in range(num_clients)]
        self.params = init_params(self.host_generator, device)

    def _random_client(self, num_samples: int) -> Batch:
        """Random bytes as images, scaled to [0, 1], and random labels."""
        place = {"device": self.device, "generator": self.generator}
        images = torch.randint(256, (num_samples, LAYER_SIZES[0]), dtype=torch.uint8, **place)
        labels = torch.randint(LAYER_SIZES[-1], (num_samples,), **place)
        return images.float() / 255, labels

    def _draw(self, client: Batch) -> list[tuple[Batch, ...]]:
        """For each local step its independent batches, drawn with replacement; one draw serves the whole visit."""
        images, labels = client
        shape = (self.num_local_steps, self.num_batches, self.batch_size)
        index = torch.randint(len(labels), shape, device=self.device, generator=self.generator)
        steps = zip(images[index].unbind(), labels[index].unbind(), strict=True)
        return [tuple(zip(x.unbind(), y.unbind(), strict=True)) for x, y in steps]

    def _local_training(self, client: Batch) -> Params:
        """One client's parameters after its local steps, (7)."""
        params = self.params
        for batches in self._draw(client):
            params = moved(params, self.estimate(params, *batches), -LOCAL_STEP)
        return params

    def _round(self) -> None:
        """One round of Algorithm 1: a cohort without replacement, local training, the uniform average."""
        cohort = torch.randperm(len(self.clients), generator=self.host_generator)[: self.cohort_size].tolist()
        results = [self._local_training(self.clients[i]) for i in cohort]
        with torch.no_grad():
            self.params = [torch.stack(ps).mean(0).requires_grad_() for ps in zip(*results, strict=True)]

    def _synchronize(self) -> None:
        """Wait for the device to finish what was queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(self, num_rounds: int) -> float:
        """Run that many rounds, going on from where the last call stopped, and return the seconds they took."""
        self._synchronize()
        start = time.perf_counter()
        for _ in range(num_rounds):
            self._round()
        self._synchronize()
        return time.perf_counter() - start


def composed_gradient(params: Params, batch: Batch) -> Grads:
    """The gradient of f(w - alpha grad f(w)) by differentiating the composition itself."""
    slope = torch.autograd.grad(loss(params, batch), params, create_graph=True)
    adapted = [p - ADAPT_STEP * g for p, g in zip(params, slope, strict=True)]
    return torch.autograd.grad(loss(adapted, batch), params)


def relative_error(found: Grads, expected: Grads) -> float:
    """Distance over the norm of what is expected, over all tensors together."""
    found_flat, expected_flat = (torch.cat([g.flatten() for g in grads]) for grads in (found, expected))
    return float((found_flat - expected_flat).norm() / expected_flat.norm())


def check(seed: int = 0, tolerance: float = 1e-12) -> None:
    """On one batch for all three, in float64, `exact` is the gradient of the composition; `first_order` is not."""
    generator = torch.Generator().manual_seed(seed)
    params = init_params(generator, "cpu", torch.float64)
    images = torch.rand(40, LAYER_SIZES[0], dtype=torch.float64, generator=generator)
    batch = images, torch.randint(LAYER_SIZES[-1], (40,), generator=generator)
    expected = composed_gradient(params, batch)
    error = relative_error(exact(params, batch, batch, batch), expected)
    first_order_error = relative_error(first_order(params, batch, batch), expected)
    print(f"relative error: exact {error:.1e}, first_order {first_order_error:.1e}")
    if not error < tolerance < first_order_error:
        raise SystemExit("the exact meta-gradient does not match the composed function")


def time_variants(device: str, num_rounds: int, repeats: int = 3) -> None:
    """Print each variant's milliseconds per round: the fastest of some runs, since other work slows a run at random."""
    print(f"torch {torch.__version__} on {device}, {torch.get_num_threads()} CPU threads, fastest of {repeats} runs")
    for variant in VARIANTS:
        loop = TorchLoop(variant, device)
        loop.run(2)  # warm up
        seconds = min(loop.run(num_rounds) for _ in range(repeats))
        print(f"{variant:>12} {1000 * seconds / num_rounds:8.1f} ms per round")


def main() -> None:
    """Time the variants, or run the self-check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--check", action="store_true", help="run the self-check instead of the timing")
    args = parser.parse_args()
    if args.check:
        check()
    else:
        time_variants(args.device, args.rounds)


if __name__ == "__main__":
    main()
