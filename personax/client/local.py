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
from personax.objectives.divided import split, with_part
from personax.objectives.objective import Memory, only_batch, shrink_to
from personax.objectives.statistics import statistics_of, updated, without_statistics
from personax.sharing import Patterns, as_patterns, join, like, names_of, only, over, require_patterns
from personax.typing import Array, Batch, Batches, Clock, Extra, LossFn, Params, Personal, PyTree, Scalar, Shared, Task
from personax.values import Static, require, require_count, require_one_of, require_positive, short_repr, value

USUAL_BATCHES = 10  # in an epoch of a client whose data is not known


@value
class Phase:
    """A part of a visit in which only some of the parameters are trained.

    Args:
        trains: patterns of the parameters that are trained, see `Sharing`. The others do not change.
        num_steps: the number of steps. Give either this or `num_epochs`.
        num_epochs: the number of passes over the client's data.
        lr: the step size; by default that of `Local`.

    >>> Phase("dense_1", num_steps=5)
    Phase(trains=('dense_1',), num_steps=5)
    """

    trains: Static[Patterns]
    num_steps: Static[int | None] = None
    num_epochs: Static[int | None] = None
    lr: StepSize | float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "trains", as_patterns(self.trains, "trains"))
        _require_length(self.num_steps, self.num_epochs)
        if self.lr is not None:
            require_step_size("lr", self.lr)

    def __repr__(self) -> str:
        return short_repr(self)


@value
class Local:
    """Local training on one client: `num_steps` steps, or `num_epochs` passes over its data, of an optax optimizer.

    The optimizer's state is reset at each visit.

    Args:
        lr: the step size, a number or a schedule such as `Decay`.
        num_steps: the number of steps per visit. Give either this or `num_epochs`.
        num_epochs: the number of passes over the client's data per visit. An epoch's number of steps counts all of the
            client's samples.
        batch_size: one number, or `BatchSizes` by role.
        optimizer: an optax optimizer; by default plain SGD.
        clip_norm: the largest norm of a direction.
        sampling: `"replacement"` draws batches independently with replacement; `"shuffled"` runs through shuffled
            epochs, whose last batch may be smaller.
        query_share: the share of each client's training data (its last rows) that is reserved for the outer batches;
            the other roles draw from the rest. APFL section 5 reserves 10 % for Per-FedAvg.
        phases: several `Phase`s in place of `num_steps` and `num_epochs`. A visit runs through them in order; each
            begins with a fresh optimizer state, and steps are numbered through all of them.
    """

    lr: StepSize | float
    num_steps: Static[int | None] = None
    num_epochs: Static[int | None] = None
    batch_size: Static[int | BatchSizes] = 40
    optimizer: Optimizer = Optimizer()
    clip_norm: float | None = None
    sampling: Static[Sampling] = "replacement"
    query_share: float | None = None
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        require_step_size("lr", self.lr)
        if not self.phases:
            _require_length(self.num_steps, self.num_epochs)
        elif self.num_steps is not None or self.num_epochs is not None:
            raise ValueError("The steps of a visit are those of its `phases`. Leave out `num_steps` and `num_epochs`.")
        most = sum(phase.num_steps or 0 for phase in self.phases) or self.num_steps
        require(lambda num: num <= MAX_STEPS, "num_steps", most, f"be at most {MAX_STEPS}")
        if not isinstance(self.batch_size, BatchSizes):
            require_count("batch_size", self.batch_size)
        require_positive("clip_norm", self.clip_norm, "To disable clipping, omit it.")
        require_one_of("sampling", self.sampling, ("replacement", "shuffled"))
        require(lambda v: (v > 0) & (v < 1), "query_share", self.query_share, "lie strictly between 0 and 1")

    @property
    def sizes(self) -> BatchSizes:
        """The batch sizes by role."""
        return self.batch_size if isinstance(self.batch_size, BatchSizes) else BatchSizes(self.batch_size)

    def size_of(self, role: str) -> int:
        """Return the batch size of a role that draws one batch."""
        return self.sizes.of(role)

    def steps_of(self, count: Any) -> Any:
        """Return the number of steps of a client with `count` samples."""
        first, *others = self._steps_of_each(count)
        return sum(others, first)

    def _steps_of_each(self, count: Any) -> list[Any]:
        """The number of steps of each phase, or of the only one."""
        per_epoch = -(-count // self.size_of("outer"))
        of = lambda part: part.num_epochs * per_epoch if part.num_steps is None else part.num_steps
        return [of(part) for part in self.phases or (self,)]

    def usual_steps(self, trains: Patterns = ()) -> tuple[int, float]:
        """Return the number and first size of the steps of the phase that trains these parameters, or of the first one.

        The client's number of samples is not known here: an epoch counts as `USUAL_BATCHES` steps.
        """
        stages = self.stages(USUAL_BATCHES * self.size_of("outer"), 1)
        stage = next((stage for stage in stages if stage.trains == trains), stages[0])
        return stage.end - stage.first, float(step_size_at(stage.lr, Clock(0, 0, 1)))

    def samples_of(self, count: Any) -> Any:
        """Return the number of samples in the outer batches of a visit of a client with `count` samples."""
        is_exact = self.sampling == "shuffled"  # the last batch of an epoch is smaller
        steps = zip(self.phases or (self,), self._steps_of_each(count), strict=True)
        size = self.size_of("outer")
        each = [part.num_epochs * count if is_exact and part.num_epochs else num * size for part, num in steps]
        return sum(each[1:], each[0])

    @property
    def is_ragged(self) -> bool:
        """True if the number of steps depends on the number of samples."""
        return any(part.num_epochs is not None for part in self.phases or (self,))

    def stages(self, count: Any, max_count: int) -> "list[Stage]":
        """Return the phases of a visit of a client with `count` samples, when no client has more than `max_count`."""
        lengths, first, stages = self._steps_of_each(max_count), 0, []
        for phase, num, longest in zip(self.phases or (None,), self._steps_of_each(count), lengths, strict=True):
            trains, lr = ((), None) if phase is None else (phase.trains, phase.lr)
            stages.append(Stage(trains, self.lr if lr is None else lr, first, first + num, longest))
            first = first + num
        return stages

    def require_parts(self, params: Params) -> None:
        """Raise unless each phase names trained parameters of the model."""
        for number, phase in enumerate(self.phases):
            require_patterns(phase.trains, names_of(params), f"phases.{number}.trains")

    @property
    def descends(self) -> bool:
        """True if a step is the step size times the direction."""
        return self.optimizer.is_plain and self.clip_norm is None

    def draws(self, objective: Objective) -> tuple[Draw, ...]:
        """Return the batches that one local step draws."""
        counts = objective.roles().items()
        most = MAX_DRAWS // len(ROLES)
        require(lambda num: num <= most, "batches of one role", max(num for _, num in counts), f"be at most {most}")
        sizes = {role: self.sizes.each(role, num) for role, num in counts}
        return tuple(Draw(role, index, size) for role in sizes for index, size in enumerate(sizes[role]))


def _require_length(num_steps: int | None, num_epochs: int | None) -> None:
    require_count("num_steps", num_steps)
    require_count("num_epochs", num_epochs)
    if (num_steps is None) == (num_epochs is None):
        raise ValueError(
            f"Give either `num_steps` or `num_epochs`, got num_steps={num_steps} and num_epochs={num_epochs}."
        )


class Stage(NamedTuple):
    """One client's steps of a phase: from step `first` up to `end`; no client takes more than `longest`."""

    trains: Patterns
    lr: StepSize | float
    first: Any
    end: Any
    longest: int

    def part(self, tree: PyTree) -> PyTree:
        """Return the part of a tree that is trained: all of it, unless the phase names a part."""
        return only(tree, self.trains) if self.trains else tree


class LocalOptions(TypedDict, total=False):
    """The options of `Local` that recipes accept: all of its fields except `lr`.

    >>> import personax as px
    >>> from typing import Unpack
    >>> def mine(*, lr: float, **local: Unpack[px.LocalOptions]) -> px.Algorithm:
    ...     return px.Algorithm(px.Erm(), px.Local(lr, **local), px.synchronous())
    >>> mine(lr=0.1, num_steps=5, batch_size=10).local.batch_size
    10
    """

    num_steps: int | None
    num_epochs: int | None
    batch_size: int | BatchSizes
    optimizer: Optimizer
    clip_norm: float | None
    sampling: Sampling
    query_share: float | None
    phases: tuple[Phase, ...]


class Update(NamedTuple):
    """The result of a visit: `delta` (start minus end) and `extra` to upload, `personal` to keep, a recorded path.

    `delta` and `end` have the shared parameters alone.
    """

    delta: Params
    end: Params
    extra: Extra
    personal: Personal
    path: PyTree


class Start(NamedTuple):
    """The start of a visit: the download and the client's own state."""

    anchor: Params  # the shared parameters
    shared: Shared
    personal: Personal
    round: Scalar  # the server's version
    frozen: Params = None  # the parameters that are not trained


class _Carry(NamedTuple):
    iterate: Params
    memory: PyTree
    optimizer: PyTree
    lr_sum: Scalar


class _Course(NamedTuple):
    """The values that all steps of a phase share."""

    objective: Objective
    local: Local
    task: Task
    visit: Visit
    read: Callable[[PyTree], Batches]
    stage: Stage

    @property
    def descends(self) -> bool:
        """True if a step is the step size times the gradient of the loss."""
        return self.objective.is_plain and self.local.descends

    def at(self, index: Scalar, drawn: PyTree) -> tuple[Visit, Batches]:
        """Return the visit and the batches at one step."""
        kind = jnp.result_type(*jax.tree.leaves(self.visit.anchor))  # a step size never widens the parameters' dtype
        clock = self.visit.clock._replace(step=index)
        lr = jnp.asarray(step_size_at(self.stage.lr, clock), kind)
        return self.visit._replace(clock=clock, lr=lr), self.read(drawn)

    def outer_batch(self, at: tuple[Array, PyTree]) -> Batch:
        """Return the shapes of a step's outer batch."""
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
    """Run one client's visit, from the download to its update.

    Args:
        objective: the function that the client minimizes.
        local: the settings of local training.
        task: the model and its loss.
        data: the federation's flat arrays.
        max_count: the largest number of samples of any client, which sets the length of the scan if clients differ.
        client: the client's rows and update count.
        begin: the download, the client's own state and the frozen parameters.
        stream: the run's key, see `run_stream`.
        is_recorded: record the iterate and the memory after each step as the path.
    """
    part, state = split(begin.personal)
    anchor, task = join(part, begin.anchor), over(task, begin.frozen)
    start, memory = objective.begin(anchor, state)
    visit = Visit(anchor, begin.shared, Clock(begin.round, 0, local.steps_of(client.num_samples)), 0.0)
    draws = local.draws(objective)
    lr_sum = jnp.zeros((), jnp.result_type(*jax.tree.leaves(anchor)))
    end, path = start, ()
    for stage in local.stages(client.num_samples, max_count):
        indices = stage.first + jnp.arange(stage.longest)
        at = indices, draw_rows(stream, client, indices, draws, local.sampling, local.query_share)
        course = _Course(objective, local, task, visit, partial(_read, data, draws), stage)
        (end, memory, lr_sum), path = _take_steps(course, _Carry(end, memory, (), lr_sum), at, is_recorded)
    visit = visit._replace(lr=lr_sum)
    full = lambda w: full_gradient(task.loss, w, data, client, local.size_of("outer"), max_count)
    state, extra = objective.finish(end, memory, visit, full)
    # Without the barrier, XLA keeps a copy of all clients' initial models through the loop.
    begun = jax.lax.optimization_barrier(start)
    delta = jax.tree.map(jnp.subtract, begun, end) if objective.federated else optax.tree.zeros_like(anchor)
    if part is None:
        return Update(delta, end, extra, state, path)
    shared = begin.anchor
    return Update(like(delta, shared), like(end, shared), extra, with_part(like(end, part), state), path)


def _take_steps(
    course: _Course, begin: _Carry, at: tuple[Array, PyTree], is_recorded: bool
) -> tuple[tuple[Params, Memory, Scalar], PyTree]:
    """Take one step for each entry of `at`, with a fresh optimizer state, along the part that this phase trains.

    Return the model, the memory and the sum of the step sizes; and, if they are recorded, the iterate and the memory
    after each step.
    """
    objective, local, task, stage = course.objective, course.local, course.task, course.stage
    start, descends, batch = begin.iterate, course.descends, course.outer_batch(at)
    fixed = statistics_of(task, start, batch)
    part = lambda tree: without_statistics(stage.part(tree), fixed)
    # The other parameters are constants of the loss, so their gradients are never computed. Objectives other than the
    # plain loss need the whole model; XLA removes unused gradients.
    along_part = (lambda w, batch: task.loss(join(w, start), batch)) if stage.trains else task.loss
    moving = stage.part(start) if descends else start
    here = along(along_part, moving, batch, len(at[0]), is_recorded or not descends or fixed is not None)

    def step(carry: _Carry, index: Scalar, drawn: PyTree) -> tuple[_Carry, PyTree]:
        now, batches = course.at(index, drawn)
        at_part = carry.iterate if descends else part(carry.iterate)
        if descends:
            kept, scale = (carry.memory, carry.optimizer), -now.lr
            change = here.gradient(at_part, only_batch(batches, "outer"))
        else:
            direction, memory = objective.gradient(task.loss, carry.iterate, carry.memory, now, batches)
            direction = part(direction)
            if local.clip_norm is not None:
                direction = shrink_to(direction, local.clip_norm)
            change, state = local.optimizer.at(now.lr).update(direction, carry.optimizer, at_part)
            kept, scale = (memory, state), 1.0
        new, is_active = _Carry(carry.iterate, *kept, carry.lr_sum + now.lr), True
        if local.is_ragged:  # clients that have finished wait unchanged until the others finish
            is_active = now.clock.step < stage.end
            new = jax.tree.map(lambda a, b: jnp.where(is_active, a, b), new, carry)
        moved = here.step(at_part, scale, change, is_active)
        whole = objective.project(moved if descends else join(moved, carry.iterate))
        if fixed is not None and task.statistics is not None:
            statistics = task.statistics(join(carry.iterate, start), only_batch(batches, "outer"))
            whole = updated(whole, stage.part(statistics), is_active)
        new = new._replace(iterate=whole)
        return new, (new.iterate, new.memory) if is_recorded else ()

    first = _Carry(here.start(), begin.memory, local.optimizer.at(0.0).init(part(start)), begin.lr_sum)
    last, path = here.loop(step, first, *at)
    end = here.params(last.iterate)
    return (join(end, start) if stage.trains else end, last.memory, last.lr_sum), path


def _read(
    data: ClientData,
    draws: tuple[Draw, ...],
    drawn: tuple[Array, Array, Array],
) -> Batches:
    """Read the batches of a step, by role.

    A CPU reads them all in one gather. On an accelerator the kernels that split such a gather would cost more.
    """
    rows, weight, keys = drawn
    at_once = reads_batches_together()
    # Without the barriers, XLA repeats the gather inside each matrix product that reads it.
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
    """Return the gradient of a client's mean loss over all its data, in slices of `size` rows, with a single mask."""
    key = jax.random.key(0)

    def add(total: Params, begin: Array) -> tuple[Params, None]:
        places = begin + jnp.arange(size, dtype=client.start.dtype)
        weight = (places < client.num_samples).astype(jnp.result_type(float))
        batch = gather(data, client.start + jnp.minimum(places, client.num_samples - 1), weight, key)
        share = weight.sum() / client.num_samples
        gradient = jax.grad(loss)(params, batch)
        # The loss of a slice that contains only filler may not be finite.
        return jax.tree.map(lambda t, g: t + jnp.where(share > 0, share * g, 0).astype(t.dtype), total, gradient), None

    begins = jnp.arange(0, max_count, size, dtype=jnp.int32)
    return jax.lax.scan(add, optax.tree.zeros_like(params), begins)[0]
