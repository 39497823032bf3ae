"""Every random stream, and that no two of them give the same key."""

import ast
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax as px
from personax import keys
from personax.keys import MAX_DRAWS, MAX_STEPS, HostStream, InspectionStream, RunStream
from tests.sources import trees

NUM = 10_000
KEY = jax.random.key(0)
LARGEST = 2**31 - 1  # of a client's id, an update, a server version


def tuples(*most):
    """NUM different index tuples up to these largest values, the smallest and the largest among them."""
    rng = np.random.default_rng(0)
    drawn = np.stack([rng.integers(0, one, NUM, endpoint=True) for one in most], axis=1)
    corners = np.stack(np.meshgrid(*([0, 1, one] for one in most), indexing="ij"), axis=-1).reshape(-1, len(most))
    found = np.unique(np.concatenate([corners, drawn]), axis=0)
    return jnp.asarray(found[np.r_[: NUM - 1, -1]] if len(found) > NUM else found, jnp.uint32)


def words(derived):
    return {tuple(pair) for pair in np.asarray(jax.random.key_data(derived)).reshape(-1, 2).tolist()}


def jax_streams():
    """Every kind of JAX key that a run derives from its key, for many index tuples."""
    for stream in RunStream:
        yield stream.name, keys.run_stream(KEY, stream)[None]
    for stream in InspectionStream:
        yield f"inspection {stream.name}", keys.inspection_key(KEY, stream)[None]
    rounds = jax.vmap(lambda n: keys.round_key(keys.run_stream(KEY, RunStream.ITERATES), n))
    yield "rounds of ITERATES", rounds(jnp.asarray(tuples(LARGEST)[:, 0]))
    draw = lambda parent, step, code: keys.draw_key(parent, step, code)
    code = 3 * (MAX_DRAWS // 3 - 1) + 2  # of the last draw of the last role
    for stream in (RunStream.BATCHES, RunStream.ADAPTATION):
        visit = lambda row, stream=stream: keys.visit_key(keys.run_stream(KEY, stream), row[0], row[1])
        batch = lambda row, visit=visit: draw(visit(row), row[2], row[3])
        epoch = lambda row, visit=visit: draw(keys.epoch_key(visit(row)), row[2], row[3])
        whole, pairs = tuples(LARGEST, LARGEST, MAX_STEPS - 1, code), tuples(LARGEST, LARGEST)
        yield f"visits of {stream.name}", jax.vmap(visit)(pairs)
        yield f"epochs of {stream.name}", jax.vmap(lambda row, visit=visit: keys.epoch_key(visit(row)))(pairs)
        yield f"batches of {stream.name}", jax.vmap(batch)(whole)
        yield f"dropout of {stream.name}", jax.vmap(lambda row, batch=batch: keys.dropout_key(batch(row)))(whole)
        yield f"shuffles of {stream.name}", jax.vmap(epoch)(whole)
        steps = jnp.arange(NUM, dtype=jnp.uint32)  # one visit's own, next to each other
        visited = keys.visit_key(keys.run_stream(KEY, stream), jnp.uint32(7), jnp.uint32(7))
        yield f"one visit of {stream.name}", jax.vmap(lambda n, v=visited: draw(v, n // 7, n % 7))(steps)


def test_no_two_jax_streams_give_the_same_key():
    seen = {}
    for name, derived in jax_streams():
        found = words(derived)
        assert len(found) == derived.size, f"{name} repeats itself"
        for other, earlier in seen.items():
            assert not found & earlier, f"{name} and {other} share keys"
        seen[name] = found


ROOM = 2**30 - 5  # blocks of delays in one schedule
INDICES = {
    HostStream.DELAYS: (ROOM - 1,),
    HostStream.THEORY_SAMPLES: (LARGEST,),
    HostStream.LIVE_COHORTS: (LARGEST, LARGEST),
    HostStream.SYNTHETIC: (LARGEST,),
}


def test_no_two_host_streams_give_the_same_generator():
    seen = {}
    for stream in HostStream:
        most = INDICES.get(stream, ())
        for row in np.asarray(tuples(*most)).tolist() if most else [[]]:
            given = (stream + row[0],) if stream is HostStream.DELAYS else (stream, *row)
            state = tuple(keys.host_generator(KEY, *given).bit_generator.seed_seq.generate_state(4).tolist())
            assert state not in seen, f"{stream.name}{row} and {seen.get(state)}"
            seen[state] = (stream.name, row)


def test_the_numbers_of_streams_are_different_and_delays_have_room():
    numbers = sorted(HostStream)
    assert len(set(numbers)) == len(HostStream.__members__)
    after = next(number for number in numbers if number > HostStream.DELAYS)
    assert after >= HostStream.DELAYS + ROOM


def test_every_stream_is_in_the_table():
    """Keys are folded and generators are seeded in keys.py alone (networks draw their own weights and dropout)."""
    allowed = {"keys.py", "models/networks.py", "models/adapters.py", "models/tasks.py"}
    allowed |= {"reproduce/cited_code.py", "reproduce/apfl/networks.py"}
    for path, tree in trees():
        name = str(path)
        if name in allowed or name.startswith("bench/"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("fold_in", "default_rng"):
                raise AssertionError(f"{name}:{node.lineno} derives its own stream")
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "host_generator":
                stream = node.args[1:2]
                assert not stream or "HostStream" in ast.dump(stream[0]), f"{name}:{node.lineno}"


def test_a_visit_has_no_more_steps_than_there_are_keys():
    with pytest.raises(ValueError, match=f"`num_steps` must be at most {MAX_STEPS}"):
        px.Local(0.1, num_steps=MAX_STEPS + 1)
    fed = px.Federation.from_clients([(np.zeros((3, 2)), np.zeros(3, int))])
    algorithm = px.fedavg(lr=0.1, num_epochs=MAX_STEPS, batch_size=1)
    task, schedule = px.classification(px.logistic_regression(2)), px.rounds(1, 1, key=KEY)
    with pytest.raises(ValueError, match="A visit would take 3145728 local steps"):
        px.simulate(algorithm, task, fed, schedule, key=KEY)


def test_streams_have_a_comment_on_their_use():
    source = inspect.getsource(HostStream) + inspect.getsource(RunStream)
    for name in [*HostStream.__members__, *RunStream.__members__]:
        line = next(line for line in source.splitlines() if line.strip().startswith(f"{name} ="))
        assert "#" in line
