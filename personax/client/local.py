"""Local training: a loop of optimizer steps along the gradient of a client's objective."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import optax

from personax.client.optimizers import Optimizer
from personax.client.sampling import ROLES, BatchSizes, ClientRows, Draw, Sampling, draw_rows, gather, widths
from personax.client.step_sizes import StepSize, require_step_size, step_size_at
from personax.data.federation import ClientData
from personax.fast.backends import reads_batches_together
from personax.fast.near import along
from personax.keys import MAX_DRAWS, MAX_STEPS
from personax.objectives import Objective, Visit
from personax.objectives.objective import Memory, only_batch, shrink_to
from personax.typing import Array, Batch, Batches, Clock, Extra, LossFn, Params, Personal, PyTree, Scalar, Shared, Task
from personax.values import Static, require, require_count, require_one_of, require_positive, value


@value
class Local:
    """A client's visit: `num_steps` steps, or `num_epochs` passes over its data, of an optax optimizer.

    The optimizer's state is reset at each visit. `batch_size` is one number or `BatchSizes` by role; `sampling`
    draws batches independently with replacement, or in shuffled epochs whose last batch may be short; `clip_norm`
    bounds the direction's norm; with a `query_share` that part of each client's training data, its last rows, serves
    the outer batches alone and the rest the others (APFL section 5 keeps 10 % for Per-FedAvg). The number of steps in
    an epoch counts all samples.
    """

    lr: StepSize | float
    num_steps: Static[int | None] = None
    num_epochs: Static[int | None] = None
    batch_size: Static[int | BatchSizes] = 40
    optimizer: Optimizer = Optimizer()
    clip_norm: float | None = None
    sampling: Static[Sampling] = "replacement"
    query_share: float | None = None

    def __post_init__(self) -> None:
        require_step_size("lr", self.lr)
        require_count("num_steps", self.num_steps)
        require_count("num_epochs", self.num_epochs)
        if (self.num_steps is None) == (self.num_epochs is None):
            raise ValueError(
                "Give either `num_steps` or `num_epochs`, "
                f"got num_steps={self.num_steps} and num_epochs={self.num_epochs}."
            )
        require(lambda num: num <= MAX_STEPS, "num_steps", self.num_steps, f"be at most {MAX_STEPS}")
        if not isinstance(self.batch_size, BatchSizes):
            require_count("batch_size", self.batch_size)
        require_positive("clip_norm", self.clip_norm, "For no clipping leave it out.")
        require_one_of("sampling", self.sampling, ("replacement", "shuffled"))
        require(lambda v: (v > 0) & (v < 1), "query_share", self.query_share, "lie strictly between 0 and 1")

    @property
    def sizes(self) -> BatchSizes:
        """The batch sizes by role."""
        return self.batch_size if isinstance(self.batch_size, BatchSizes) else BatchSizes(self.batch_size)

    def size_of(self, role: str) -> int:
        """The size of the batch of a role that draws one."""
        return self.sizes.of(role)

    def steps_of(self, count: Any) -> Any:
        """The number of steps of a client that holds `count` samples."""
        if self.num_steps is not None:
            return self.num_steps
        assert self.num_epochs is not None  # one of the two is given
        return self.num_epochs * -(-count // self.size_of("outer"))

    @property
    def descends(self) -> bool:
        """True if a step is the step size times the direction."""
        return self.optimizer.is_plain and self.clip_norm is None

    def draws(self, objective: Objective) -> tuple[Draw, ...]:
        """The batches of one local step."""
        counts = objective.roles().items()
        most = MAX_DRAWS // len(ROLES)
        require(lambda num: num <= most, "batches of one role", max(num for _, num in counts), f"be at most {most}")
        sizes = {role: self.sizes.each(role, num) for role, num in counts}
        return tuple(Draw(role, index, size) for role in sizes for index, size in enumerate(sizes[role]))


class LocalOptions(TypedDict, total=False):
    """The options of `Local` that recipes pass on: all of its fields except `lr`."""

    num_steps: int | None
    num_epochs: int | None
    batch_size: int | BatchSizes
    optimizer: Optimizer
    clip_norm: float | None
    sampling: Sampling
    query_share: float | None


class Update(NamedTuple):
    """The result of a visit: `delta` (start minus end) and `extra` to upload, `personal` to keep, a recorded path."""

    delta: Params
    end: Params
    extra: Extra
    personal: Personal
    path: PyTree


class Start(NamedTuple):
    """The start of a visit: what the client downloaded, and its own state."""

    anchor: Params
    shared: Shared
    personal: Personal
    round: Scalar  # the server's version


class _Carry(NamedTuple):
    iterate: Params
    memory: PyTree
    optimizer: PyTree
    lr_sum: Scalar


class _Course(NamedTuple):
    """Everything that the steps of a visit share."""

    objective: Objective
    local: Local
    loss: LossFn
    visit: Visit
    read: Callable[[PyTree], Batches]

    def at(self, index: Scalar, drawn: PyTree) -> tuple[Visit, Batches]:
        """The visit at one step, and the batches of that step."""
        kind = jnp.result_type(*jax.tree.leaves(self.visit.anchor))  # a step size never widens the parameters
        clock = self.visit.clock._replace(step=index)
        lr = jnp.asarray(step_size_at(self.local.lr, clock), kind)
        return self.visit._replace(clock=clock, lr=lr), self.read(drawn)

    def outer_batch(self, at: tuple[Array, PyTree]) -> Batch:
        """The shapes of the outer batch of a step."""
        return jax.eval_shape(
            lambda drawn: only_batch(self.read(jax.tree.map(lambda leaf: leaf[0], drawn)), "outer"), at[1]
        )


def local_update(
    objective: Objective,
    local: Local,
    task: Task,
    data: ClientData,
    max_count: int,
    client: ClientRows,
    begin: Start,
    stream: Array,
    is_recorded: bool = False,
) -> Update:
    """One client's visit, from what it downloaded to its update.

    `stream` is the run's, see `run_stream`. `max_count` is the largest number of samples of any client: it fixes the
    length of the scan where clients differ.
    If it is recorded, the path has the iterate and the memory after each step.
    """
    max_steps, anchor = local.steps_of(max_count), begin.anchor
    start, memory = objective.begin(anchor, begin.personal)
    visit = Visit(anchor, begin.shared, Clock(begin.round, 0, local.steps_of(client.num_samples)), 0.0)
    draws, indices = local.draws(objective), jnp.arange(max_steps)
    at = indices, draw_rows(stream, client, indices, draws, local.sampling, local.query_share)
    course = _Course(objective, local, task.loss, visit, partial(_read, data, draws))
    (end, memory, _, lr_sum), path = _take_steps(course, start, memory, at, is_recorded)
    visit = visit._replace(lr=lr_sum)
    full = lambda w: full_gradient(task.loss, w, data, client, local.size_of("outer"), max_count)
    kept, extra = objective.finish(end, memory, visit, full)
    # Without the barrier the start of all clients' models, one array each, is kept through the loop and copied for it.
    begun = jax.lax.optimization_barrier(start)
    delta = jax.tree.map(jnp.subtract, begun, end) if objective.federated else optax.tree.zeros_like(anchor)
    return Update(delta, end, extra, kept, path)


def _take_steps(
    course: _Course, start: Params, memory: Memory, at: tuple[Array, PyTree], is_recorded: bool
) -> tuple[_Carry, PyTree]:
    """Take a step for each entry of `at`; also the iterate and the memory after each, if they are recorded."""
    objective, local, loss = course.objective, course.local, course.loss
    descends = objective.is_plain and local.descends
    here = along(loss, start, course.outer_batch(at), len(at[0]), is_recorded or not descends)

    def step(carry: _Carry, index: Scalar, drawn: PyTree) -> tuple[_Carry, PyTree]:
        now, batches = course.at(index, drawn)
        if descends:
            kept, scale = (carry.memory, carry.optimizer), -now.lr
            change = here.gradient(carry.iterate, only_batch(batches, "outer"))
        else:
            direction, memory = objective.gradient(loss, carry.iterate, carry.memory, now, batches)
            if local.clip_norm is not None:
                direction = shrink_to(direction, local.clip_norm)
            change, state = local.optimizer.at(now.lr).update(direction, carry.optimizer, carry.iterate)
            kept, scale = (memory, state), 1.0
        new, is_active = _Carry(carry.iterate, *kept, carry.lr_sum + now.lr), True
        if local.num_epochs is not None:  # a client that has finished while others still train keeps its state
            is_active = now.clock.step < now.clock.num_steps
            new = jax.tree.map(lambda a, b: jnp.where(is_active, a, b), new, carry)
        new = new._replace(iterate=objective.project(here.step(carry.iterate, scale, change, is_active)))
        return new, (new.iterate, new.memory) if is_recorded else ()

    zero = jnp.zeros((), jnp.result_type(*jax.tree.leaves(course.visit.anchor)))
    first = _Carry(here.start(), memory, local.optimizer.at(0.0).init(start), zero)
    last, path = here.loop(step, first, *at)
    return last._replace(iterate=here.params(last.iterate)), path


def first_extra(objective: Objective, anchor: Params, personal: Personal) -> Extra:
    """The extra upload of a visit without steps: it has the shapes of any visit's and is quick to trace."""
    start, memory = objective.begin(anchor, personal)
    lr = jnp.zeros((), jnp.result_type(*jax.tree.leaves(anchor)))
    visit = Visit(anchor, objective.init_shared(anchor), Clock(jnp.zeros((), jnp.int32), 0, 1), lr)
    return objective.finish(start, memory, visit, optax.tree.zeros_like)[1]


def _read(
    data: ClientData,
    draws: tuple[Draw, ...],
    drawn: tuple[Array, Array, Array],
) -> Batches:
    """The batches of a step, by role, which follow each other.

    A CPU reads all of them at once; an accelerator would wait for kernels that tell them apart.
    """
    rows, weight, keys = drawn
    at_once = reads_batches_together()
    # Without the barriers XLA repeats the gather inside each matrix product that reads it.
    stored = jax.lax.optimization_barrier((data.x[rows], data.y[rows])) if at_once else ()
    batches: dict[str, Batch] = {}
    row = first = 0
    num_batches = Counter(draw.role for draw in draws)
    for role, size in widths(draws).items():
        num = num_batches[role]
        here = slice(row, row + num * size)
        if at_once:
            x, y = (leaf[here] for leaf in stored)
        else:
            x, y = jax.lax.optimization_barrier((data.x[rows[here]], data.y[rows[here]]))
        x, y, own_weight = (leaf.reshape(num, size, *leaf.shape[1:]) for leaf in (x, y, weight[here]))
        batches[role] = Batch(x, y, own_weight, keys[first : first + num])
        row, first = row + num * size, first + num
    return batches


def full_gradient(
    loss: LossFn, params: Params, data: ClientData, client: ClientRows, size: int, max_count: int
) -> Params:
    """The gradient of a client's mean loss over all its data, in slices of `size` rows; one dropout mask for all."""
    key = jax.random.key(0)

    def add(total: Params, begin: Array) -> tuple[Params, None]:
        places = begin + jnp.arange(size, dtype=client.start.dtype)
        weight = (places < client.num_samples).astype(jnp.result_type(float))
        batch = gather(data, client.start + jnp.minimum(places, client.num_samples - 1), weight, key)
        share = weight.sum() / client.num_samples
        gradient = jax.grad(loss)(params, batch)
        # A slice of nothing but filler may have no finite loss of its own.
        return jax.tree.map(lambda t, g: t + jnp.where(share > 0, share * g, 0).astype(t.dtype), total, gradient), None

    begins = jnp.arange(0, max_count, size, dtype=jnp.int32)
    return jax.lax.scan(add, optax.tree.zeros_like(params), begins)[0]
