"""Networks initialized from a file: equal numbers, checked names and shapes, and a digest in the run folder."""

import hashlib
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from personax.experiment import checkpoint
from personax.experiment.build import build, make_network, resolve
from personax.experiment.config import dump, load_run, parse
from personax.experiment.loading import load
from personax.experiment.model_files import read_trained
from personax.experiment.pretrained import digest_of, pretrained
from personax.experiment.runs import execute, start
from personax.models import lora, mlp
from personax.values import ConfigError

X = jnp.zeros((1, 64))


def base_params(widths=(7,), seed=3):
    return mlp(widths, 10).init(jax.random.key(seed), X)


def write(path, params, about=None):
    checkpoint.export(path, params, about or {})
    return path


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def configuration(base, **lora):
    return {
        "seeds": 2,
        "data": {"kind": "digits"},
        "partition": {"kind": "iid", "num_clients": 4},
        "model": {"kind": "mlp", "widths": [7], "base": str(base), **({"lora": lora} if lora else {})},
        "schedule": {"num_rounds": 2, "cohort_size": 2},
        "local": {"lr": 0.1, "num_steps": 2, "batch_size": 5},
        "algorithms": {"FedAvg": {"recipe": "fedavg"}},
    }


def test_a_network_starts_at_the_file_for_every_seed(tmp_path):
    params = base_params()
    model = pretrained(mlp((7,), 10), write(tmp_path / "base.safetensors", params))
    assert_same(model.init(jax.random.key(0), X), params)
    of_seeds = jax.jit(jax.vmap(model.init, (0, None)))(jax.random.split(jax.random.key(0), 3), X)
    assert_same(of_seeds, jax.tree.map(lambda leaf: np.stack([leaf] * 3), params))
    assert model is pretrained(mlp((7,), 10), tmp_path / "base.safetensors")


def test_no_copy_of_the_file_is_in_the_program(tmp_path):
    params = base_params((300,))
    model = pretrained(mlp((300,), 10), write(tmp_path / "base.safetensors", params))
    program = jax.jit(model.init).lower(jax.random.key(0), X)
    assert len(program.as_text()) < 10_000
    assert not jax.make_jaxpr(model.init)(jax.random.key(0), X).consts


def test_adapters_are_added_to_a_base_from_a_file(tmp_path):
    params = base_params()
    path = write(tmp_path / "base.safetensors", {"params": params, "shared": {}}, {"model": "shared"})
    adapted = lora(pretrained(mlp((7,), 10), path), 2)
    found = adapted.init(jax.random.key(0), X)
    assert_same(found["base"], params)
    x = jnp.ones((3, 64))
    np.testing.assert_allclose(adapted.apply(found, x), mlp((7,), 10).apply(params, x))


def test_numbers_have_the_type_of_the_network(tmp_path):
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), base_params())
    found = pretrained(mlp((7,), 10), write(tmp_path / "half.safetensors", halves)).init(jax.random.key(0), X)
    assert_same(found, jax.tree.map(lambda leaf: leaf.astype(float), halves))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.result_type(float)}


def test_names_and_shapes_are_listed_where_they_differ(tmp_path):
    params = base_params()
    del params["dense_1"]["bias"]
    params["dense_2"] = {"bias": np.zeros(3)}
    path = write(tmp_path / "base.safetensors", params)
    with pytest.raises(ConfigError) as error:
        pretrained(mlp((9,), 10), path).init(jax.random.key(0), X)
    message = str(error.value)
    assert "Missing: dense_1.bias; unexpected: dense_2.bias; with a different shape: dense_0.bias ([7] in" in message
    assert "dense_0.kernel ([64, 7] in the file, [64, 9] in the model)" in message


def test_other_files_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="File not found"):
        pretrained(mlp((7,), 10), tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("not tensors")
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        pretrained(mlp((7,), 10), tmp_path / "text.safetensors").init(jax.random.key(0), X)
    path = write(tmp_path / "base.safetensors", base_params())
    with pytest.raises(ConfigError, match="its SHA-256 is"):
        pretrained(mlp((7,), 10), path, "00")
    model = pretrained(mlp((7,), 10), path)
    write(path, base_params(seed=4))
    with pytest.raises(Exception, match="has changed since this model was created"):
        model.init(jax.random.key(0), X)


def test_a_run_records_the_digest_and_refuses_another_base(tmp_path):
    path = write(tmp_path / "base.safetensors", base_params())
    config = resolve(parse(configuration(path)), baselines=False)
    assert config.model.base_digest == hashlib.sha256(path.read_bytes()).hexdigest() == digest_of(path)
    plan = build(config)
    assert_same(plan.task.model.init(jax.random.key(0), X), base_params())
    folder = start(config, tmp_path / "run")
    execute(folder)
    assert tomllib.loads(folder.config.read_text())["model"]["base_digest"] == digest_of(path)
    before = folder.model("FedAvg").read_bytes()
    execute(folder)  # everything is done
    write(path, base_params(seed=4))
    with pytest.raises(ConfigError, match="is not the base of this model"):
        execute(folder)
    moved = write(tmp_path / "moved.safetensors", base_params())
    text = folder.config.read_text().replace(str(path), str(moved))
    folder.config.write_text(text.replace("num_rounds = 2", "num_rounds = 3"))
    execute(folder)  # the content counts, not the path
    assert folder.model("FedAvg").read_bytes() != before
    changed = load_run(folder.config).model
    digests = {changed.base_digest: digest_of(write(path, base_params(seed=4))), str(moved): str(path)}
    for old, new in digests.items():
        folder.config.write_text(folder.config.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=r"`model.base_digest` was"):
        execute(folder)


def test_a_model_with_adapters_is_read_without_its_base(tmp_path):
    path = write(tmp_path / "base.safetensors", base_params())
    config = resolve(parse(configuration(path, rank=2)), baselines=False)
    assert parse(tomllib.loads(dump(config))) == config
    folder = start(config, tmp_path / "run")
    execute(folder)
    trained = read_trained(folder.model("FedAvg"))
    x = np.ones((2, 64), np.float32)
    before = trained.predict(x)
    assert sorted(trained.params) == ["base", "lora"]
    path.unlink()
    np.testing.assert_array_equal(read_trained(folder.model("FedAvg")).predict(x), before)
    np.testing.assert_array_equal(load(folder.root, "FedAvg").predict(x), before)


def test_two_adapters_are_configured_by_their_mix():
    table = {"kind": "mlp", "widths": [7], "lora": {"rank": 2, "mix": 0.5}}
    params = make_network(table, 10).init(jax.random.key(0), X)
    assert sorted(params) == ["base", "global", "local"]
    with pytest.raises(ConfigError, match="`rank` must be"):
        make_network({**table, "lora": {"rank": 0}}, 10)
    with pytest.raises(ConfigError, match=r"model.lora"):
        parse({**configuration("base"), "model": {"kind": "mlp", "widths": [7], "lora": {"rank": 2, "one": 3}}})


def test_recipes_with_adapters_run_over_a_frozen_base(tmp_path):
    path = write(tmp_path / "base.safetensors", base_params())
    table = configuration(path, rank=2) | {"algorithms": {"FedSA": {"recipe": "fedsa_lora"}}}
    table["schedule"]["cohort_size"] = "all"
    folder = start(resolve(parse(table), baselines=False), tmp_path / "run")
    record = execute(folder)
    (row,) = (row for row in record.table if row.metric == "accuracy")
    assert row.score == "FedSA" and np.isfinite(row.mean.mean)
    tree, about = checkpoint.read_model(folder.model("FedSA"))
    assert about["model"] == "shared"
    jax.tree.map(np.testing.assert_array_equal, tree["params"]["base"], jax.tree.map(np.asarray, base_params()))
    of_a_client = load(folder.root, "FedSA", client="client 0").params["lora"]["dense_0"]["kernel"]
    assert np.abs(of_a_client["b"]).max() > 0
    np.testing.assert_array_equal(of_a_client["a"], tree["params"]["lora"]["dense_0"]["kernel"]["a"])
