"""PyTorch, the cohort under `torch.func.vmap` and the local step compiled: a peer of `personax bench` (see peer.py).

On CUDA the local steps of a round are captured as one CUDA graph, and float32 products run in TF32.
"""

from typing import Any

import torch
from peer import Ready, Setting, Work, random_clients, read_work, serve
from torch import Tensor
from torch.func import grad, vjp
from torch_loop import fastest_threads
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


class Cohorts:
    """Rounds of one setting, the cohort side by side."""

    def __init__(self, setting: Setting, params: Params, data: tuple[Tensor, Tensor], compiled: bool = True) -> None:
        self.setting, self.params, (self.images, self.labels) = setting, params, data
        self.device, loss = params[0].device, make_loss(setting)
        gradient = grad(loss)

        def product(params: Params, batch: Batch, vector: Any) -> Any:
            return vjp(lambda w: gradient(w, batch), params)[1](list(vector))[0]

        one = make_step(setting, gradient, product)
        num_draws = NUM_DRAWS[setting.algorithm]

        def step(w: Params, own: Any, x: Tensor, y: Tensor) -> tuple[Params, Any]:
            return one(w, own, [(x[i], y[i]) for i in range(num_draws)])

        self.step = torch.compile(torch.vmap(step)) if compiled else torch.vmap(step)
        self.own: Any = ()  # of all clients
        if setting.algorithm == "apfl":
            num, mix = setting.num_clients, torch.full((), setting.mix, device=self.device)
            self.own = ([p.expand(num, *p.shape).clone() for p in params], mix.expand(num).clone())

    def draw(self, cohort: Tensor) -> tuple[Tensor, Tensor]:
        """All batches of a round, `[step, client, draw, batch, ...]`."""
        now, num_draws = self.setting, NUM_DRAWS[self.setting.algorithm]
        shape = (now.cohort_size, now.num_steps, num_draws, now.batch_size)
        if now.sampling == "shuffled":
            order = torch.rand(now.cohort_size, now.num_samples, device=self.device).argsort(1)
            index = order[:, : now.num_steps * now.batch_size].reshape(shape)
        else:
            index = torch.randint(now.num_samples, shape, device=self.device)
        at = cohort[:, None, None, None]
        return self.images[at, index].transpose(0, 1), self.labels[at, index].transpose(0, 1)

    def train(self, w: Params, own: Any, x: Tensor, y: Tensor) -> tuple[Params, Any]:
        """The local steps of a cohort from the shared model, and the mean."""
        w = [p.expand(x.shape[1], *p.shape).contiguous() for p in w]
        for images, labels in zip(x.unbind(), y.unbind(), strict=True):
            w, own = self.step(w, own, images, labels)
        return [p.mean(0) for p in w], own

    def round(self, cohort: Tensor, x: Tensor, y: Tensor) -> None:
        keep = lambda states: torch.utils._pytree.tree_map(lambda leaf: leaf[cohort], states)
        self.params, own = self.train(self.params, keep(self.own), x, y)
        self.store(cohort, own)

    def store(self, cohort: Tensor, own: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves
        for kept, new in zip(leaves(self.own), leaves(own), strict=True):
            kept[cohort] = new

    @torch.no_grad()
    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            everyone = torch.rand(self.setting.num_clients, device=self.device)
            cohort = everyone.argsort()[: self.setting.cohort_size]
            self.round(cohort, *self.draw(cohort))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def capture(self) -> None:
        """Let `train` replay a CUDA graph of itself."""
        cohort = torch.arange(self.setting.cohort_size, device=self.device)
        leaves, unflatten = torch.utils._pytree.tree_flatten, torch.utils._pytree.tree_unflatten
        given = (self.params, torch.utils._pytree.tree_map(lambda leaf: leaf[cohort], self.own), *self.draw(cohort))
        inputs, shape = leaves(given)
        inputs = [leaf.clone() for leaf in inputs]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self.train(*unflatten(inputs, shape))
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.train(*unflatten(inputs, shape))

        def replay(*now: Any) -> tuple[Params, Any]:
            for held, new in zip(inputs, leaves(now)[0], strict=True):
                held.copy_(new)
            graph.replay()
            return outputs

        self.train = replay


def agreement(work: Work, device: str) -> float:
    """The distance from ours after one round from the same start on the same batches; compiling it costs a minute."""
    setting = work.setting
    images, labels = as_images(setting, work.x, device), torch.from_numpy(work.y).long().to(device)
    start = from_ours(setting, work.start, device)
    if setting.algorithm == "apfl":  # the personal models follow
        start = start[: len(start) // 2]
    cohorts = Cohorts(setting, start, (images, labels), compiled=False)
    with torch.no_grad():
        cohorts.round(torch.arange(len(images), device=device), images.transpose(0, 1), labels.transpose(0, 1))
    own = [v.mean(0) for v in cohorts.own[0]] if cohorts.own else []
    return distance(setting, [*cohorts.params, *own], work)


def prepare(setting: Setting, device: str, check: str) -> Ready:
    use_tf32(False)
    work = read_work(check)
    error = agreement(work, device)
    use_tf32(device == "cuda")
    images, labels = random_clients(setting)
    data = as_images(setting, images, device), torch.from_numpy(labels).to(device)
    cohorts = Cohorts(setting, init_params(setting, work, device), data)
    if device == "cpu":
        threads = fastest_threads(cohorts.run)
        torch.set_num_threads(threads)
        note = f"{threads} threads"
    else:
        cohorts.run(2)
        cohorts.capture()
        note = "one CUDA graph a round"
    cohorts.run(2)
    return cohorts.run, {"version": f"torch {torch.__version__}", "error": error, "note": note}


if __name__ == "__main__":
    serve(prepare)
