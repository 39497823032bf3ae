"""A tidy eager PyTorch loop, one client after another: a peer of `personax bench` (see peer.py).

The data are floats on the device from the start. On CUDA, float32 products run in TF32. On a CPU the operations are
small: where other processes use the same cores, PyTorch's threads wait for each other, so the faster of one thread and
all is taken.
"""

import time
from typing import Any

import torch
from peer import Ready, Setting, Work, random_clients, read_work, serve
from torch import Tensor
from torch_parts import (
    NUM_DRAWS,
    Batch,
    Params,
    as_images,
    distance,
    from_ours,
    init_params,
    make_loss,
    make_step,
    use_tf32,
)


def foreach_add(tensors: Any, direction: Any, step: Any) -> Params:
    """Tensors + step * direction: the calls PyTorch's own optimizers make, one kernel for the whole list on CUDA."""
    if isinstance(step, Tensor):
        return list(torch._foreach_add(tensors, torch._foreach_mul(direction, step)))
    return list(torch._foreach_add(tensors, direction, alpha=step))


class Loop:
    """Rounds, or arrivals in sequence, of one setting."""

    def __init__(self, setting: Setting, params: Params, data: tuple[Tensor, Tensor]) -> None:
        self.setting, self.params, (self.images, self.labels) = setting, params, data
        self.loss, self.device = make_loss(setting), params[0].device
        self.step = make_step(setting, self.gradient, self.product, foreach_add)
        self.own = {}  # states of clients that have been visited
        self.generator = torch.Generator().manual_seed(0)

    def gradient(self, params: Params, batch: Batch) -> tuple[Tensor, ...]:
        leaves = [p.detach().requires_grad_() for p in params]
        return torch.autograd.grad(self.loss(leaves, batch), leaves)

    def product(self, params: Params, batch: Batch, vector: Any) -> tuple[Tensor, ...]:
        """By a second backward pass."""
        leaves = [p.detach().requires_grad_() for p in params]
        slope = torch.autograd.grad(self.loss(leaves, batch), leaves, create_graph=True)
        return torch.autograd.grad(slope, leaves, grad_outputs=vector)

    def draw(self, client: int) -> list[list[Batch]]:
        """For each local step its batches; one draw of rows serves the whole visit."""
        now, num_draws = self.setting, NUM_DRAWS[self.setting.algorithm]
        shape = (now.num_steps, num_draws, now.batch_size)
        if now.sampling == "shuffled":
            index = torch.randperm(now.num_samples, device=self.device)[: now.num_steps * now.batch_size].reshape(shape)
        else:
            index = torch.randint(now.num_samples, shape, device=self.device)
        return batches_of(self.images[client][index], self.labels[client][index])

    def visit(self, client: int, batches: list[list[Batch]]) -> Params:
        params = self.params
        mix = torch.full((), self.setting.mix, device=self.device)
        own = self.own.get(client, (self.params, mix) if self.setting.algorithm == "apfl" else ())
        for of_step in batches:
            params, own = self.step(params, own, of_step)
        if self.setting.algorithm == "apfl":
            self.own[client] = own
        return params

    @torch.no_grad()
    def average(self, ends: list[Params]) -> None:
        self.params = [torch.stack(parts).mean(0) for parts in zip(*ends, strict=True)]

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            cohort = torch.randperm(self.setting.num_clients, generator=self.generator)[: self.setting.cohort_size]
            self.average([self.visit(client, self.draw(client)) for client in cohort.tolist()])
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def batches_of(images: Tensor, labels: Tensor) -> list[list[Batch]]:
    """`[step, draw, batch, ...]` as lists."""
    steps = zip(images.unbind(), labels.unbind(), strict=True)
    return [list(zip(x.unbind(), y.unbind(), strict=True)) for x, y in steps]


def agreement(work: Work, device: str) -> float:
    """The distance from ours after one round from the same start on the same batches."""
    setting = work.setting
    images, labels = as_images(setting, work.x, device), torch.from_numpy(work.y).long().to(device)
    start = from_ours(setting, work.start, device)
    if setting.algorithm == "apfl":  # the personal models follow
        start = start[: len(start) // 2]
    loop = Loop(setting, start, (images, labels))
    loop.average([loop.visit(i, batches_of(images[i], labels[i])) for i in range(len(images))])
    own = [torch.stack(parts).mean(0) for parts in zip(*(v for v, _ in loop.own.values()), strict=True)]
    return distance(setting, [*loop.params, *own], work)


def fastest_threads(run: Any) -> int:
    """The faster of one thread and all, the better of two rounds each."""

    def seconds(num_threads: int) -> float:
        torch.set_num_threads(num_threads)
        begin = time.perf_counter()
        run(1)
        return time.perf_counter() - begin

    counts = sorted({1, torch.get_num_threads()})
    run(1)
    return min(counts, key=lambda count: min(seconds(count) for _ in range(2)))


def prepare(setting: Setting, device: str, check: str) -> Ready:
    use_tf32(False)
    work = read_work(check)
    error = agreement(work, device)
    use_tf32(device == "cuda")
    images, labels = random_clients(setting)
    data = as_images(setting, images, device), torch.from_numpy(labels).to(device)
    loop = Loop(setting, init_params(setting, work, device), data)
    threads = fastest_threads(loop.run) if device == "cpu" else 1
    torch.set_num_threads(threads)
    return loop.run, {"version": f"torch {torch.__version__}", "error": error, "note": f"{threads} threads"}


if __name__ == "__main__":
    serve(prepare)
