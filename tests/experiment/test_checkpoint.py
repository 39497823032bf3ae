"""A checkpoint is restored bit for bit, or else the previous one, or an error is raised: never other numbers."""

import dataclasses
import json
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import personax
from personax.experiment.checkpoint import export, load, read_model, save, seal, write_atomically
from tests import closed_forms
from tests.simulation.options import grouped

KEY = jax.random.key(0)
ABOUT = {"algorithm": "fedavg", "seeds": [1, 2], "loss": 0.25}


class Pair(NamedTuple):
    first: object
    second: object


def assert_same_bits(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


def no_warning(message):
    raise AssertionError(message)


def back(folder, template, told=no_warning):
    found = load(folder, template, told)
    assert found is not None
    return found


def state(number):
    """A tree whose content depends on its number."""
    rng = np.random.default_rng(number)
    return {"w": rng.normal(size=(5, 3)), "step": np.int32(number), "pair": Pair(rng.random(2) < 0.5, ())}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def pair_of(*numbers):
    return [f"{number:08d}.{kind}" for number in numbers for kind in ("json", "safetensors")]


# Round trips


def test_special_values_come_back_bit_for_bit(tmp_path):
    payloads = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    tree = {
        "float32": payloads,  # NaNs with payloads, a signalling one, -0.0, the smallest number
        "float64": np.array([-0.0, np.inf, -np.inf, np.nan, 5e-324]),
        "bfloat16": jnp.array([1.5, -0.0, jnp.nan], jnp.bfloat16),
        "float16": np.array([65504, -0.0], np.float16),
        "complex64": np.array([1 - 2j], np.complex64),
        "bool": np.array([[True], [False]]),
        "ints": [np.array([np.iinfo(kind).min, np.iinfo(kind).max], kind) for kind in ("i1", "u2", "i4", "i8", "u8")],
        "jax": (jnp.arange(3.0), jnp.zeros((), jnp.int32)),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float64(-0.0),
        "nothing": (None, (), {}),
    }
    save(tmp_path, 0, tree, ABOUT)
    found = back(tmp_path, tree)
    assert_same_bits(found.tree, tree)
    assert found.number == 0 and found.about == ABOUT
    assert_same_bits(back(tmp_path, jax.eval_shape(lambda: tree)).tree, tree)
    assert all(leaf.flags.writeable for leaf in jax.tree.leaves(found.tree))


@pytest.mark.parametrize("tree", [(), {}, None, np.arange(3), [np.zeros((2, 0, 5))]], ids=str)
def test_trees_of_few_leaves(tmp_path, tree):
    save(tmp_path, 3, tree, {})
    assert_same_bits(back(tmp_path, tree).tree, tree)


def test_values_do_not_depend_on_the_layout_in_memory(tmp_path):
    table = np.arange(12.0).reshape(3, 4)
    tree = [table.T, table[:, ::2], np.broadcast_to(table[0], (2, 4)), table.astype(">f4")]
    save(tmp_path, 0, tree, {})
    for a, b in zip(tree, back(tmp_path, tree).tree, strict=True):
        np.testing.assert_array_equal(a, b)


def test_metadata_is_restored_as_json(tmp_path):
    save(tmp_path, 0, (), {"ids": (2, 10), 10: {2: "ü", 10: float("inf")}, "none": None})
    assert back(tmp_path, ()).about == {"ids": [2, 10], "10": {"2": "ü", "10": float("inf")}, "none": None}


@st.composite
def arrays(draw):
    """Arrays of arbitrary bits, of few entries or none."""
    kind = np.dtype(draw(st.sampled_from(["bool", "u1", "i2", "i4", "u8", "f2", "f4", "f8", "c8", jnp.bfloat16])))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    if kind.kind == "b":
        return draw(hnp.arrays(bool, shape))
    num = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer(draw(st.binary(min_size=num, max_size=num)), kind).reshape(shape)


TREES = st.recursive(
    arrays(),
    lambda trees: st.one_of(
        st.lists(trees, max_size=3),
        st.dictionaries(st.text(max_size=3), trees, max_size=3),
        st.builds(Pair, trees, st.none() | trees),
    ),
    max_leaves=6,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda items: st.lists(items, max_size=2) | st.dictionaries(st.text(max_size=3), items, max_size=2),
    max_leaves=4,
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(TREES, st.dictionaries(st.text(max_size=3), JSON, max_size=3))
def test_any_tree_comes_back_bit_for_bit(tree, about):
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), 7, tree, about)
        found = back(Path(folder), tree)
    assert_same_bits(found.tree, tree)
    assert found.about == about


def assert_continues(folder, algorithm, schedule, key, **options):
    fed, snapshots = closed_forms.federation()[0], []
    run = lambda **more: personax.simulate(
        algorithm, closed_forms.TASK, fed, schedule, key=key, params={"w": jnp.ones(3)}, **grouped(**options, **more)
    )
    whole = run(every=2, observe=snapshots.append)
    cut = snapshots[len(snapshots) // 2]
    assert 0 < cut.wave < whole.snapshot.wave
    save(folder, cut.wave, cut.state, {"wave": cut.wave})
    for template in (cut.state, jax.eval_shape(lambda: cut.state)):
        found = back(folder, template)
        resumed = run(start=dataclasses.replace(cut, state=found.tree))
        assert_same_bits(resumed.snapshot.state, whole.snapshot.state)


def test_a_run_of_rounds_continues_as_if_it_had_not_stopped(tmp_path):
    algorithm = personax.apfl(lr=0.1, mix=0.5, num_steps=2, batch_size=4)
    schedule = personax.rounds(4, 6, 2, key=KEY)
    assert_continues(tmp_path, algorithm, schedule, KEY, tracker=personax.WeightedAverage(1.0))


def test_a_run_of_arrivals_with_several_seeds_continues_as_if_it_had_not_stopped(tmp_path):
    server = personax.buffered(2, optimizer=personax.optimizer("adam"))
    algorithm = personax.Algorithm(personax.Scaffold(), personax.Local(0.1, num_steps=2, batch_size=4), server)
    schedule = personax.arrivals(4, 15, delays=personax.delays.persafl_delays(4, key=KEY), key=KEY)
    assert_continues(tmp_path, algorithm, schedule, jax.random.split(KEY, 2))


# Kept checkpoints


def test_the_last_two_are_kept_and_files_of_others_stay(tmp_path):
    strangers = [".notes.tmp", "00000000.npz", "1.json", "best.safetensors", ".00000001.json.swp"]
    for name in strangers:
        (tmp_path / name).write_bytes(b"mine")
    for number in (0, 3, 4, 12):
        save(tmp_path, number, state(number), {})
    assert names(tmp_path) == sorted([*pair_of(4, 12), *strangers])
    assert_same_bits(back(tmp_path, state(0)).tree, state(12))


def test_numbers_are_ordered_as_numbers(tmp_path):
    for number in (99_999_999, 100_000_000, 100_000_001):
        save(tmp_path, number, state(number), {})
    assert names(tmp_path) == pair_of(100_000_000, 100_000_001)


def test_a_checkpoint_can_be_saved_again(tmp_path):
    for number in (1, 2, 2):
        save(tmp_path, number, state(number), {})
    assert names(tmp_path) == pair_of(1, 2)


def test_a_good_newer_checkpoint_is_not_overtaken_and_a_damaged_one_is_replaced(tmp_path):
    for number in (1, 5):
        save(tmp_path, number, state(number), {})
    with pytest.raises(ValueError, match=r"`number` must be at least 5, .*, got 3\. Resume from that checkpoint"):
        save(tmp_path, 3, state(3), {})
    assert names(tmp_path) == pair_of(1, 5)
    (tmp_path / "00000005.safetensors").unlink()
    save(tmp_path, 3, state(3), {})
    assert names(tmp_path) == pair_of(1, 3)


def test_loading_returns_none_without_a_checkpoint(tmp_path):
    assert load(tmp_path, ()) is None
    assert load(tmp_path / "nowhere", ()) is None
    (tmp_path / "notes.json").write_text("{}")
    assert load(tmp_path, ()) is None


# Interruptions


STOPPED = {
    "in the arrays": (["00000003.safetensors", "00000003.json"], [".00000003.safetensors.0123abcd.tmp"], 2),
    "before the JSON": (["00000003.json"], [], 2),
    "in the JSON": (["00000003.json"], [".00000003.json.0123abcd.tmp"], 2),
    "before the old are removed": ([], [".00000001.json.0123abcd.tmp"], 3),
}


@pytest.mark.parametrize("when", STOPPED)
def test_a_stop_at_any_point_leaves_whole_checkpoints(tmp_path, when):
    lacking, left, newest = STOPPED[when]
    for number in (1, 2, 3):
        save(tmp_path, number, state(number), {})
    for name in lacking:
        (tmp_path / name).unlink()
    for name in left:
        (tmp_path / name).write_bytes(b"\0" * 9)
    assert_same_bits(back(tmp_path, state(0)).tree, state(newest))
    save(tmp_path, 4, state(4), {})
    assert names(tmp_path) == pair_of(newest, 4)


def large(number):
    return {"w": np.full(300_000, number, np.int64), "step": np.int64(number)}


def newest(folder):
    return max(int(name[:8]) for name in names(folder) if name[0] != "." and name.endswith(".json"))


def save_on(folder):
    number = back(folder, large(0)).number
    while True:
        number += 1
        save(folder, number, large(number), {"number": number, "text": "x" * 10_000})


def test_killed_at_random_moments_a_checkpoint_is_whole(tmp_path):
    processes = multiprocessing.get_context("forkserver")  # one slow import for all
    processes.set_forkserver_preload(["tests.experiment.test_checkpoint"])
    save(tmp_path, 0, large(0), {"number": 0})
    rng, numbers = np.random.default_rng(0), [0]
    for _ in range(10):
        saving = processes.Process(target=save_on, args=(tmp_path,))
        saving.start()
        deadline = time.monotonic() + 60
        while newest(tmp_path) == numbers[-1] and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        saving.kill()
        saving.join()
        assert saving.exitcode == -9
        found = back(tmp_path, large(0))
        assert_same_bits(found.tree, large(found.number))
        assert found.about["number"] == found.number > numbers[-1]
        numbers.append(found.number)
    save(tmp_path, numbers[-1] + 1, large(0), {})
    assert names(tmp_path) == pair_of(numbers[-1], numbers[-1] + 1)


def save_within(folder, num_bytes, errors):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    try:
        save(folder, 2, state(2), {"text": "x" * 5000})
    except OSError as error:
        errors.put(str(error))


@pytest.mark.parametrize(("num_bytes", "file"), [(100, "00000002.safetensors"), (2000, "00000002.json")])
def test_a_disk_that_is_full_leaves_what_was_there(tmp_path, num_bytes, file):
    for number in (0, 1):
        save(tmp_path, number, state(number), {})
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.experiment.test_checkpoint"])
    errors = processes.Queue()
    saving = processes.Process(target=save_within, args=(tmp_path, num_bytes, errors))
    saving.start()
    assert file in errors.get(timeout=60)
    saving.join()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]
    assert_same_bits(back(tmp_path, state(0)).tree, state(1))


def test_a_file_is_replaced_or_left_as_it_was(tmp_path):
    path = tmp_path / "new" / "results.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new" and names(path.parent) == ["results.json"]
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match=r"results\.json"):
        write_atomically(path, b"newer")
    assert names(path.parent) == ["results.json"]


# Damage


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for number in (1, 2):
        save(folder, number, state(number), ABOUT)
    return folder


def assert_falls_back(folder, file):
    messages = []
    found = back(folder, state(0), messages.append)
    assert_same_bits(found.tree, state(1))
    assert found.number == 1
    (message,) = messages
    assert file in message and message.endswith("Using checkpoint 1 instead.")


@pytest.mark.parametrize("file", pair_of(2))
@pytest.mark.parametrize("damage", ["cut", "flip", "longer"])
def test_damage_leads_to_the_checkpoint_before(two, tmp_path, file, damage):
    folder = tmp_path / "copy"
    shutil.copytree(two, folder)
    content = (folder / file).read_bytes()
    rng = np.random.default_rng(0)
    if damage == "cut":
        spots = [0, 1, 7, 8, 9, len(content) // 2, len(content) - 1, *rng.integers(len(content), size=40)]
        bad = [content[:spot] for spot in spots]
    elif damage == "flip":
        spots = [*range(16), len(content) - 1, *rng.integers(len(content), size=200)]
        bad = [content[:s] + bytes([content[s] ^ (1 << rng.integers(8))]) + content[s + 1 :] for s in spots]
    else:
        bad = [content + b"\0", content + content, b" " + content[1:] + b"}"]
    for wrong in bad:
        (folder / file).write_bytes(wrong)
        assert_falls_back(folder, file)


def test_files_of_another_checkpoint_lead_to_the_one_before(two, tmp_path):
    for file in pair_of(2):
        folder = tmp_path / file
        shutil.copytree(two, folder)
        shutil.copy(folder / file.replace("2", "1"), folder / file)
        assert_falls_back(folder, file)
    for file in pair_of(2):
        shutil.copy(two / file, tmp_path / file.replace("2", "9"))
    with pytest.raises(ValueError, match=r"00000009\.json is damaged: its digest does not match"):
        load(tmp_path, state(0))


def test_numbers_changed_by_hand_are_noticed(two, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(two, folder)
    path = folder / "00000002.json"
    record = json.loads(path.read_text())
    for change in ({"about": {}}, {"format": 2}, {"number": 3}, {"leaves": record["leaves"][::-1]}, {"sha256": ""}):
        path.write_text(json.dumps(record | change))
        assert_falls_back(folder, path.name)
    for other in ([], 1, None, {}):
        path.write_text(json.dumps(other))
        assert_falls_back(folder, path.name)


def test_arrays_that_are_missing_lead_to_the_checkpoint_before(two, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(two, folder)
    (folder / "00000002.safetensors").unlink()
    assert_falls_back(folder, "00000002.safetensors is missing")
    with pytest.warns(UserWarning, match=r"00000002\.safetensors is missing\. Using checkpoint 1 instead"):
        load(folder, state(0))


def test_if_all_are_damaged_the_error_names_them(two, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(two, folder)
    (folder / "00000001.json").write_bytes(b"{")
    (folder / "00000002.safetensors").write_bytes(b"short")
    message = (
        r"All 2 checkpoints in .* are damaged: .*00000002\.safetensors .* instead of \d+\. .*00000001\.json is damaged"
    )
    with pytest.raises(ValueError, match=message):
        load(folder, state(0), no_warning)


def test_another_format_is_an_error_and_no_damage(tmp_path):
    save(tmp_path, 0, (), {})
    path = tmp_path / "00000000.json"
    record = json.loads(path.read_text())
    del record["sha256"]
    path.write_bytes(seal(record | {"format": 2}))
    with pytest.raises(ValueError, match=r"must have format 1, got 2\. Use the version of personax that wrote it"):
        load(tmp_path, ())


# Errors


TREE = {"w": np.zeros((5, 3)), "step": np.int32(0), "pair": Pair(np.zeros(2, bool), ())}
OTHER = {
    "shape": (TREE | {"w": np.zeros((5, 4))}, r"\['w'\] .*, float64 of shape \(5, 4\), got float64 of shape \(5, 3\)"),
    "dtype": (TREE | {"step": np.int64(0)}, r"\['step'\] .*, int64 of shape \(\), got int32 of shape \(\)"),
    "missing": (TREE | {"bias": np.zeros(3)}, r"\['bias'\] .*, float64 of shape \(3,\), got no such leaf"),
    "surplus": (
        {"w": TREE["w"], "step": TREE["step"]},
        r"\['pair'\]\.first .*, no such leaf, got bool of shape \(2,\)",
    ),
    "structure": (np.zeros(3), r"of the whole tree .*, float64 of shape \(3,\), got no such leaf"),
    "key": (TREE | {"step": KEY}, r"\['step'\] .*, key<fry> of shape \(\), got int32"),
}


@pytest.mark.parametrize("kind", OTHER)
def test_a_template_of_another_run_is_refused(two, kind):
    template, message = OTHER[kind]
    for made in (template, jax.eval_shape(lambda: template)):
        with pytest.raises(ValueError, match=rf"00000002\.json: leaf .*{message}.*different configuration"):
            load(two, made, no_warning)


class Same:
    """A key with the same text as another."""

    def __repr__(self):
        return "same"

    def __lt__(self, other):
        return id(self) < id(other)


@pytest.mark.parametrize(
    ("tree", "about", "message"),
    [
        ({"key": KEY}, {}, r"Leaf \['key'\] must be .*, got key<fry>\. Save random keys as `jax.random.key_data"),
        (["text"], {}, r"Leaf \[0\] must be an array of numbers or bools, got str"),
        ([np.zeros(2, complex)], {}, r"Leaf \[0\] must be an array of numbers or bools, got complex128"),
        ({Same(): 1, Same(): 2}, {}, r"Duplicate leaf name '\[same\]'"),
        ((), {"array": np.zeros(2)}, r"`about` must be JSON-serializable: .*ndarray"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path, tree, about, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path, 0, tree, about)
    assert names(tmp_path) == []


def test_numbers_count(tmp_path):
    with pytest.raises(ValueError, match="`number` must be a whole number of at least 0, got -1"):
        save(tmp_path, -1, (), {})


# Models


def test_a_model_comes_back_under_readable_names(tmp_path):
    params = personax.cnn2(10).init(KEY, jnp.zeros((1, 28, 28)))
    path = tmp_path / "models" / "final.safetensors"
    export(path, params, {"algorithm": "fedavg", "data": "Ziffern, größer"})
    found, about = read_model(path)
    assert_same_bits(found, params)
    assert about == {"algorithm": "fedavg", "data": "Ziffern, größer"}
    flat = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(flat["dense_0.kernel"], params["dense_0"]["kernel"])


def test_trees_other_than_dictionaries_are_named_by_their_keys(tmp_path):
    network = eqx.nn.MLP(2, 3, 4, 1, key=KEY)
    params = {"net": eqx.filter(network, eqx.is_array), "scale": [jnp.ones(2, jnp.bfloat16), np.float32(3)]}
    export(tmp_path / "model", params, {})
    found, about = read_model(tmp_path / "model")
    assert_same_bits(found["net"]["layers"]["1"]["weight"], network.layers[1].weight)
    assert_same_bits(found["scale"], {"0": params["scale"][0], "1": params["scale"][1]})
    assert about == {}
    export(tmp_path / "model", np.arange(3), {})
    assert_same_bits(read_model(tmp_path / "model")[0], {"params": np.arange(3)})


@pytest.mark.parametrize(
    ("params", "about", "message"),
    [
        ({"a.b": np.ones(1)}, {}, r"must not contain dots.*, got \['a\.b'\]"),
        ({"__metadata__": np.ones(1)}, {}, r"or be `__metadata__`, got"),
        ([{Same(): np.ones(1), Same(): np.ones(1)}], {}, r"Duplicate leaf name '0\.same'"),
        ({"a": KEY}, {}, r"Parameter a must be an array of numbers or bools, got key<fry>"),
        ({}, {"seed": 3}, r"`about` must map strings to strings, got 'seed': 3"),
    ],
)
def test_models_that_cannot_be_exported_are_refused(tmp_path, params, about, message):
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "model", params, about)
    assert names(tmp_path) == []


def test_files_that_are_no_models_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"File not found: "):
        read_model(tmp_path / "none")
    export(tmp_path / "model", {"a": np.ones(4)}, {})
    whole = (tmp_path / "model").read_bytes()
    for wrong in (b"", b"PK\3\4", whole[:-1], whole[:20]):
        (tmp_path / "model").write_bytes(wrong)
        with pytest.raises(ValueError, match="model is not a safetensors file: "):
            read_model(tmp_path / "model")


def test_files_are_readable_by_others_as_the_user_wants(tmp_path):
    mask = os.umask(0o022)
    try:
        write_atomically(tmp_path / "report.html", b"")
    finally:
        os.umask(mask)
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o644
