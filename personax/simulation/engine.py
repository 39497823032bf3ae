"""The compiled part of a run: `vmap` over the clients of a wave, a loop over waves, and `vmap` or a loop over seeds."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from personax.algorithms import Algorithm
from personax.client.local import Start, Update, local_update
from personax.client.sampling import ClientRows
from personax.data.federation import ClientData, Federation
from personax.fast.backends import holds_one_model, unrolled_arrivals
from personax.fast.flops import largest_array
from personax.keys import RunStream, run_stream, typed_key
from personax.models.tasks import as_inputs
from personax.objectives.divided import split
from personax.server import ServerState, Upload
from personax.sharing import join, over
from personax.simulation.averages import Path, Tracker
from personax.simulation.results import NO_EVENT, Faults, State, repeat
from personax.simulation.waves import WavePlan, Waves
from personax.typing import Array, Batch, Model, Params, Personal, PyTree, Task

LONG_VISIT = 256  # local steps


@dataclass(frozen=True)
class Program:
    """The constants of a compiled run. With a mesh, the members of a wave are divided among its devices."""

    task: Task
    num_clients: int  # of the federation, although the data may hold only some of them
    max_count: int
    cohort_chunk: int | None
    has_seeds: bool
    sweeps: bool = False  # each seed has its own algorithm
    mesh: Mesh | None = None
    divides_data: bool = False  # each device of the mesh holds the rows of the clients that it trains, and no others
    frozen_has_seeds: bool = False  # each seed has its own frozen parameters

    @property
    def num_devices(self) -> int:
        """The number of devices that share a wave."""
        return 1 if self.mesh is None else self.mesh.devices.size


class Procedure(NamedTuple):
    """An algorithm and its frozen parameters: each seed may have its own."""

    algorithm: Algorithm
    frozen: Params = None


class SimulationRun(NamedTuple):
    """Everything that defines a run, except for its state."""

    program: Program
    algorithm: Algorithm
    federation: Federation
    key: Array
    plan: WavePlan
    tracker: Tracker | None
    skips: bool  # True to skip updates that are not finite
    frozen: Params = None  # the frozen parameters

    def advance(
        self, procedure: Procedure, data: ClientData, key: Array, waves: Waves, state: State, begin: int, stop: int
    ) -> State:
        """Run waves `begin` to `stop`. `state.personal` cannot be used afterwards: the result has its memory."""
        compiled = advance if self.algorithm.local.steps_of(self.program.max_count) <= LONG_VISIT else advance_long
        given = (self.program, procedure, data, key, waves, self.tracker)
        return compiled(*given, state.personal, state._replace(personal=()), begin, stop, self.skips)


def _advance(
    program: Program,
    procedure: Procedure,
    data: ClientData,
    key: Array,
    waves: Waves,
    tracker: Tracker | None,
    personal: Personal,
    others: State,
    begin: int,
    stop: int,
    skips: bool,
) -> State:
    """Run waves `begin` to `stop`. End early at an update that is not finite, unless such updates are skipped.

    The states of all clients are an argument apart, because their memory is reused for the result.
    """
    state = others._replace(personal=personal)
    step = partial(_wave, program, data, tracker)
    streams_of = lambda key: (run_stream(key, RunStream.BATCHES), run_stream(key, RunStream.ITERATES))

    def run(step: Callable[..., State], procedure: Procedure, streams: PyTree, waves: Waves, state: State) -> State:
        axis = waves.client.ndim - 2  # the axis of waves, after that of seeds
        pick = lambda index: lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, axis, keepdims=False)

        def more(carry: tuple[Array, State]) -> Array:
            healthy = jnp.all(carry[1].faults.num == 0) | skips
            return (carry[0] < stop) & healthy

        def next_wave(carry: tuple[Array, State]) -> tuple[Array, State]:
            return carry[0] + 1, step(procedure, streams, jax.tree.map(pick(carry[0]), waves), carry[1])

        return jax.lax.while_loop(more, next_wave, (jnp.asarray(begin), state))[1]

    if not program.has_seeds:
        return run(step, procedure, streams_of(key), waves, state)
    given = (jax.vmap(streams_of)(key), waves, state)
    has_own = (program.sweeps, program.frozen_has_seeds)
    if not seeds_run_in_order(waves, state):
        axes = Procedure._make(0 if has else None for has in has_own)
        return run(jax.vmap(step, in_axes=(axes, 0, 0, 0)), procedure, *given)
    own = tuple(part if has else None for part, has in zip(procedure, has_own, strict=True))

    def of_seed(seed: tuple) -> State:
        parts = zip(seed[0], procedure, has_own, strict=True)
        return run(step, Procedure._make(one if has else common for one, common, has in parts), *seed[1:])

    return jax.lax.map(of_seed, (own, *given))


# On an NVIDIA GPU, a run including its loops is one graph, in which a kernel starts once its inputs are ready. The loop
# is unrolled unless that would give too many kernels. Products by the same matrix are not merged, because XLA would
# copy their other factors into one array and the results out of it.
_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE",
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    "xla_gpu_dot_merger_threshold_mb": 0,
}
_compiled = partial(jax.jit, _advance, static_argnames=("program",), donate_argnames=("personal",))
advance = _compiled(compiler_options={**_GRAPH, "xla_gpu_command_buffer_unroll_loops": True})
advance_long = _compiled(compiler_options=_GRAPH)


def seeds_run_in_order(waves: Waves, state: State) -> bool:
    """Return True if seeds run sequentially, as on a CPU whose caches cannot hold a wave's models for all seeds."""
    num_seeds, _, num_members = waves.client.shape
    return holds_one_model(num_members * _num_bytes(state.server.params) // num_seeds)


def _num_bytes(models: Params) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(models))


class _Trained(NamedTuple):
    """Updates, from their training to their arrival."""

    update: Update
    client: Array  # its place in the data
    event: Array
    version: Array  # the version that it started from
    counts: Array  # True if the schedule passes it to the server
    finite: Array
    stage: Array  # the first stage that is not finite


def _wave(
    program: Program,
    data: ClientData,
    tracker: Tracker | None,
    procedure: Procedure,
    streams: tuple[Array, Array],
    wave: Waves,
    state: State,
) -> State:
    """Train the members of one wave, then let the server receive the updates that are due."""
    algorithm = procedure.algorithm
    synchronous = algorithm.server.is_synchronous
    now = (state.server.params, state.server.shared, state.server.version)
    anchors = now if synchronous else jax.tree.map(lambda leaf: leaf[wave.read], state.slots)
    updates = _train(program, procedure, data, tracker, streams[0], wave, state.personal, anchors)
    version = jnp.broadcast_to(anchors[2], wave.client.shape)
    trained = _Trained(updates, wave.client, wave.event, version, wave.aggregated, *_finite(updates))
    held, arrived = (), wave.valid
    if not synchronous:
        trained = _uploaded(trained, algorithm)
        put = lambda place, new: place.at[wave.hold].set(new.astype(place.dtype), mode="drop")
        held = jax.tree.map(put, state.held, trained)
        trained, arrived = jax.tree.map(lambda place: place[wave.take], held), wave.take >= 0
    usable = arrived & trained.finite
    target = jnp.where(usable, trained.client, len(data.ids))
    update = trained.update
    personal = jax.tree.map(lambda a, new: a.at[target].set(new, mode="drop"), state.personal, update.personal)
    weight = data.num_samples[trained.client].astype(float)
    uploads = Upload(update.delta, update.end, update.extra, trained.version, weight, usable & trained.counts)
    tracked = state.tracked
    if tracker is not None:
        iterates, memories = updates.path
        path = Path(now[0], iterates, memories, target, usable, state.server.version, streams[1])
        tracked = tracker.update(tracked, path, state.personal)
    server, slots = _receive(program, algorithm, state, uploads, wave)
    return State(server, personal, slots, held, tracked, _note(state.faults, trained, arrived))


def _uploaded(trained: _Trained, algorithm: Algorithm) -> _Trained:
    """The part of an update that waits for its turn: what the server uses, without the path."""
    unused = {"end": ()} if algorithm.server.applies == "deltas" else {"delta": ()}
    return trained._replace(update=trained.update._replace(path=(), **unused))


def _train(
    program: Program,
    procedure: Procedure,
    data: ClientData,
    tracker: Tracker | None,
    stream: Array,
    wave: Waves,
    personal: Personal,
    anchors: PyTree,
) -> Update:
    """Run the visits of a wave's members, each of which depends only on its own client."""
    algorithm, frozen = procedure
    synchronous = algorithm.server.is_synchronous
    first = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)
    model = join(first(split(personal)[0]), anchors[0] if synchronous else first(anchors[0]))
    chunk = program.cohort_chunk or _default_chunk(over(program.task, frozen), model, _outer_batch(data, algorithm))

    def visits(
        procedure: Procedure,
        data: ClientData,
        stream: Array,
        personal: Personal,
        now: PyTree,
        members: PyTree,
    ) -> Update:
        algorithm, frozen = procedure

        def visit(client: Array, update: Array, anchor: PyTree) -> Update:
            where = ClientRows(data.start[client], data.num_samples[client], data.ids[client], update)
            state = jax.tree.map(lambda leaf: leaf[client], personal)
            begin = now if synchronous else anchor
            run = (algorithm.objective, algorithm.local, program.task, data, program.max_count)
            start = Start(begin[0], begin[1], state, begin[2], frozen)
            return local_update(*run, where, start, stream, tracker is not None)

        if chunk is None:
            return jax.vmap(visit)(*members)
        # Without a batch axis for single clients: with an axis of length 1, XLA transposes gradients of dense layers.
        batch_size = None if chunk == 1 else chunk
        return jax.lax.map(lambda member: visit(*member), members, batch_size=batch_size)

    if program.mesh is not None:
        whole, divided = PartitionSpec(), PartitionSpec(program.mesh.axis_names)
        rows = ClientData._make((*(divided,) * 3, whole, whole)) if program.divides_data else whole
        specs = (whole, rows, *(whole,) * 3, divided)
        visits = jax.shard_map(visits, mesh=program.mesh, in_specs=specs, out_specs=divided, check_vma=False)
    own_anchors = () if synchronous else anchors
    members = (wave.client, wave.update, own_anchors)
    return visits(procedure, data, stream, personal, anchors if synchronous else (), members)


def _default_chunk(task: Task, model: Params, batch: Batch) -> int | None:
    """The number of clients to train at once: one if the model is large for a CPU's caches, otherwise all (None)."""
    largest = lambda: largest_array(jax.make_jaxpr(jax.grad(task.loss))(model, batch).jaxpr)
    return 1 if holds_one_model(_num_bytes(model), largest) else None


def _outer_batch(data: ClientData, algorithm: Algorithm) -> Batch:
    """The shapes of an outer batch."""
    size = algorithm.local.size_of("outer")
    x, y = (jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype) for leaf in (data.x, data.y))
    return jax.eval_shape(lambda x, y: Batch(x, y, jnp.ones(size), jax.random.key(0)), x, y)


def _receive(
    program: Program, algorithm: Algorithm, state: State, uploads: Upload, wave: Waves
) -> tuple[ServerState, PyTree]:
    """Pass a wave's uploads to the server: together at the end of a round, or sequentially."""
    server, objective = algorithm.server, algorithm.objective
    if server.is_synchronous:
        received = server.receive(state.server, uploads)
        return server.step(received, objective, program.num_clients), state.slots

    def arrive(now: ServerState, upload: Upload) -> tuple[ServerState, PyTree]:
        one = jax.tree.map(lambda leaf: leaf[None], upload)
        now = server.step_if_full(server.receive(now, one), objective, program.num_clients)
        return now, (now.params, now.shared, now.version)

    last, models = jax.lax.scan(arrive, state.server, uploads, unroll=unrolled_arrivals())
    return last, jax.tree.map(lambda slot, new: slot.at[wave.save].set(new, mode="drop"), state.slots, models)


def _finite(updates: Update) -> tuple[Array, Array]:
    """For each update, True if it is finite, and the index of the first stage (in `STAGES`) that is not."""
    num = len(jax.tree.leaves(updates.delta)[0])

    def all_finite(tree: PyTree) -> Array:
        # A sum is not finite if a term is not, and summing is several times faster than checking each term.
        sums = [leaf.reshape(num, -1).sum(axis=1, dtype=float) for leaf in jax.tree.leaves(tree)]
        return jnp.isfinite(sum(sums, jnp.zeros(num)))

    good = jnp.stack([all_finite(tree) for tree in (updates.delta, updates.personal, updates.extra)])
    return good.all(axis=0), jnp.argmin(good, axis=0)


def _note(faults: Faults, trained: _Trained, arrived: Array) -> Faults:
    bad = arrived & ~trained.finite
    events = jnp.where(bad, trained.event, NO_EVENT)
    first = jnp.argmin(events)
    earlier = events[first] < faults.event
    pick = lambda new, old: jnp.where(earlier, new[first], old)
    return Faults(
        faults.num + bad.sum(dtype=jnp.int32),
        pick(events.astype(jnp.int32), faults.event),
        pick(trained.stage.astype(jnp.int32), faults.stage),
    )


def replicate(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Copy a tree to all devices of a mesh; without a mesh, return it unchanged."""
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Array) -> Array:
        if isinstance(leaf, jax.Array) and leaf.sharding == everywhere:
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(place(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        whole = np.asarray(leaf)  # with a callback, because `device_put` cannot reach devices of other processes
        return jax.make_array_from_callback(whole.shape, everywhere, lambda part: whole[part])

    return jax.tree.map(place, tree)


def initial_params(task: Task, federation: Federation, *, key: Array) -> Params:
    """The initial model of a run with this key; with several keys, along a leading axis."""
    keys = typed_key(key)
    return first_params(task.model, federation.first_sample[0], keys, keys.ndim > 0)


@partial(jax.jit, static_argnames=("model", "has_seeds"))
def first_params(model: Model, x: Array, key: Array, has_seeds: bool = False) -> Params:
    """Initialize the model for samples of this shape, in a separate program that all algorithms share."""
    init = lambda key: model.init(run_stream(key, RunStream.INIT), as_inputs(x))
    return jax.vmap(init)(key) if has_seeds else init(key)


@partial(jax.jit, static_argnames=("program", "num_personal", "num_slots", "num_places"))
def initialize(
    program: Program,
    algorithm: Algorithm,
    params: Params,
    tracker: Tracker | None,
    num_personal: int,
    num_slots: int,
    num_places: int,
) -> State:
    """The state before the first event, for each seed, with the personal states of `num_personal` clients.

    `params` are the trained parameters; frozen ones may be missing.
    """

    def one(algorithm: Algorithm, params: Params) -> State:
        own = algorithm.divided.init_personal(params)
        server = algorithm.init_server(params)
        params = server.params
        personal = repeat(own, num_personal)
        slots = repeat((server.params, server.shared, server.version), num_slots)
        held = ()
        if num_places:
            count, flag = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
            update = Update(params, params, server.pending_extra, own, ())
            held = repeat(_uploaded(_Trained(update, count, count, count, flag, flag, count), algorithm), num_places)
        tracked = () if tracker is None else tracker.init(params, personal)
        none = jnp.full((), NO_EVENT, jnp.int32)
        return State(server, personal, slots, held, tracked, Faults(jnp.zeros((), jnp.int32), none, none))

    of_seeds = jax.vmap(one, in_axes=(0 if program.sweeps else None, 0))
    return (of_seeds if program.has_seeds else one)(algorithm, params)
