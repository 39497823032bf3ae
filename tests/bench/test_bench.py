import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner

import personax as px
from personax.bench import check, markdown, ours, peers, processes, suite
from personax.bench.curves import draw
from personax.bench.floor import floor_of
from personax.bench.processes import ProcessFailed, Side
from personax.bench.record import BENCH, BenchRecord, MachineRecord, PeerRecord, RowRecord, StartRecord
from personax.bench.setting import BenchSetting
from personax.bench.show import figures, row_words, summary
from personax.bench.workloads import BenchRow, rows
from personax.cli import app
from personax.fast import compilation_cache

DOCS = Path(__file__).parents[2] / "docs"
TINY = BenchSetting(
    "fedavg", 6, 2, cohort_size=3, num_samples=8, num_steps=2, batch_size=4, input_shape=(5,), widths=(4,)
)
MACHINE = MachineRecord("a processor", "cpu", 2, "Linux", "3.11", "0.10", "default", 1e9, 1e9)


def test_every_row_has_a_name_of_its_own_on_both_backends_and_known_peers():
    for backend in ("cpu", "gpu"):
        found = rows(backend)
        assert len({row.name for row in found}) == len(found)
        assert {row.workload for row in found} == set(markdown.WORKLOADS)
        assert all(set(row.peers) <= set(peers.PEERS) for row in found)
    assert all((peers.SCRIPTS / peer.script).exists() for peer in peers.PEERS.values())


@pytest.mark.parametrize("kind, gradients", [("fedavg", 1), ("first_order", 2), ("hessian_free", 4), ("moreau", 5)])
def test_the_floor_counts_the_products_of_all_gradients(kind, gradients):
    setting = replace(TINY, algorithm=kind, batch_size=9)
    layers = [5 * 4, 4 * 10]
    of_example = 2 * (2 * sum(layers) + layers[1])  # forward, weights, and inputs of all but the first layer
    assert floor_of(setting).operations == gradients * of_example * 9 * 3 * 2
    assert floor_of(replace(setting, num_seeds=7)).operations == 7 * floor_of(setting).operations


def test_the_floor_counts_products_that_gradients_share_once():
    wide = replace(TINY, input_shape=(50,), widths=(8,))
    first, second = 50 * 8, 8 * 10
    for kind, gradients, products, inner in (("exact", 4, 5, 2), ("hessian_free", 4, 5, 3), ("moreau", 5, 2, 1)):
        of_example = 2 * (products * first + inner * 50 * 4 + 3 * gradients * second)
        assert floor_of(replace(wide, algorithm=kind)).operations == of_example * 4 * 3 * 2


def test_the_floor_counts_convolutions_as_the_products_they_are():
    image = {"network": "cnn", "input_shape": (8, 8, 3), "widths": (16,), "sampling": "shuffled"}
    found = floor_of(replace(TINY, **image, num_samples=8))
    first = 3 * 3 * (4 * 4 * 3) * (4 * 32)  # windows, each of 4 x 4 pixels, for four pixels of the result
    second = 4 * 4 * (3 * 3 * 32) * 64  # patches
    dense = 2 * 2 * 64 * 16, 16 * 10
    of_example = 2 * (2 * (first + second + sum(dense)) + second + sum(dense))
    assert found.operations == of_example * 4 * 3 * 2


def test_the_floor_reads_every_batch_and_moves_every_model_once():
    samples = 3 * 2 * 4 * (5 + np.dtype(int).itemsize)
    model = (5 * 4 + 4 + 4 * 10 + 10) * jnp.ones(1).itemsize
    assert floor_of(TINY).bytes == samples + 3 * 2 * model
    assert floor_of(replace(TINY, algorithm="exact")).bytes == 3 * samples + 3 * 2 * model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fedavg", "first_order", "hessian_free", "exact", "apfl", "moreau"])
def test_every_algorithm_runs_and_seeds_differ(kind):
    one, two = (ours.make_run(replace(TINY, algorithm=kind, num_seeds=num))() for num in (1, 2))
    for alone, together in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert together.shape == (2, *alone.shape) and np.isfinite(together).all()
        assert np.abs(together[0] - together[1]).max() > 0


def test_arrivals_in_waves_end_where_sequential_ones_end():
    setting = replace(TINY, algorithm="moreau", asynchronous=True, num_rounds=20)
    waves, one_by_one = (ours.make_run(replace(setting, wave_width=width))() for width in (None, 1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), waves, one_by_one)


@pytest.mark.parametrize("epoch", [False, True])
def test_the_work_for_the_peers_is_repeated_by_plain_gradient_steps(tmp_path, epoch):
    check.write_work(TINY, tmp_path / "work.npz", epoch)
    with np.load(tmp_path / "work.npz") as held:
        setting = BenchSetting(**json.loads(str(held["setting"])))
        layers = lambda name: [held[f"{name}_{i}"] for i in range(int(held["num_arrays"]))]
        x, y, start, end = held["x"], held["y"], layers("start"), layers("end")
    assert x.shape[:4] == (3, setting.num_steps, 1, setting.batch_size) and epoch == (setting.num_steps == 1)
    gradient = jax.jit(jax.grad(ours.make_task(setting).loss))

    def visit(images, labels):
        names = ("kernel", "bias")
        params = {f"dense_{i}": dict(zip(names, start[2 * i : 2 * i + 2], strict=True)) for i in range(2)}
        for xs, ys in zip(images[:, 0], labels[:, 0], strict=True):
            batch = px.Batch(jnp.asarray(xs), jnp.asarray(ys), jnp.ones(len(ys)), jax.random.key(0))
            params = jax.tree.map(lambda p, g: p - setting.lr * g, params, gradient(params, batch))
        return ours.layers_of(params)

    visits = [visit(*of_client) for of_client in zip(x, y, strict=True)]
    for found, expected in zip(zip(*visits, strict=True), end, strict=True):
        np.testing.assert_allclose(np.mean(found, axis=0), expected, rtol=1e-9, atol=1e-12)


def test_a_row_is_measured_beside_a_peer_and_a_peer_that_cannot_run(tmp_path, monkeypatch):
    good = 'import sys\nprint(\'{"version": "1", "note": "", "error": 0.5}\', flush=True)\n'
    good += 'for line in sys.stdin:\n    print(\'{"rounds": 2, "seconds": 6.0}\', flush=True)\n'
    (tmp_path / "good.py").write_text(good)
    (tmp_path / "bad.py").write_text("raise SystemExit('there is no camel')\n")
    made = {name: peers.Peer(name, f"{name}.py", name, (), ()) for name in ("good", "bad", "gone")}
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    monkeypatch.setattr(suite, "PEERS", made)
    row = BenchRow("tiny", "mnist", "tiny", replace(TINY, divided=True), ("good", "bad", "gone"))
    found = suite.measure_row(row, suite.BenchPlan(0.2, 2, tuple(made)), MACHINE)
    assert found.turns == 2 and found.seconds_per_round > 0 and found.host_peak_bytes > 1e6
    assert found.local_steps_per_second == pytest.approx(6 / found.seconds_per_round)
    assert found.operations_per_second >= 1e9 and found.bytes_per_second >= 1e9
    by_bytes = found.bytes / found.bytes_per_second
    assert found.floor_seconds == max(found.operations / found.operations_per_second, by_bytes)
    first, *others = found.peers
    assert first.seconds_per_round == 3.0 and "not the same work" in first.note and first.ratio is not None
    assert {one.name: one.note for one in others} == {
        "bad": "ended: there is no camel",
        "gone": "its script gone.py is available only in the repository",
    }


def test_a_side_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(processes, "FAREWELL", 0.1)
    with (
        Side([sys.executable, "-c", "import time; time.sleep(60)"], {}) as side,
        pytest.raises(ProcessFailed, match="within"),
    ):
        side.get_ready(0.2)


def test_an_unknown_row_or_peer_is_an_error_that_names_those_there_are():
    with pytest.raises(
        ValueError, match=r"`personax bench` has no row `camel`\. There are: apfl-100, apfl-10000, cifar-cnn"
    ):
        suite.run_suite(suite.BenchPlan(), ["mnist", "camel"])
    asked = CliRunner().invoke(app, ["bench", "--peer", "camel"])
    assert asked.exit_code == 1 and "camel" in asked.stderr and "torch-vmap" in asked.stderr


@pytest.mark.slow
def test_the_command_prints_a_record_and_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "measure_machine", lambda: MACHINE)
    monkeypatch.setattr(suite, "rows", lambda backend: [BenchRow("tiny", "mnist", "tiny", TINY)])
    asked = ["bench", "--only", "tiny", "--json", "--seconds", "0.1", "--turns", "1", "--out", str(tmp_path / "b.json")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0 and "tiny" in done.stderr
    assert BENCH.validate_json(done.stdout) == BENCH.validate_json((tmp_path / "b.json").read_bytes())


def test_an_interrupted_command_keeps_the_rows_that_are_done(tmp_path, monkeypatch):
    done = iter(record().rows)
    monkeypatch.setattr(suite, "measure_machine", lambda: MACHINE)
    monkeypatch.setattr(
        suite, "rows", lambda backend: [BenchRow(name, "mnist", name, TINY) for name in ("tiny-a", "tiny-b")]
    )

    def measure(row, plan, machine):
        if row.name == "tiny-b":
            raise KeyboardInterrupt
        return next(done)

    monkeypatch.setattr(suite, "measure_row", measure)
    path = tmp_path / "b.json"
    asked = CliRunner().invoke(app, ["bench", "--only", "tiny", "--out", str(path)])
    assert asked.exit_code == 130 and str(path) in asked.stderr
    assert BENCH.validate_json(path.read_bytes()).rows == record().rows[:1]


def record(*extra):
    numbers = {"seconds_per_round": 0.01, "rounds_per_second": 100.0, "local_steps_per_second": 1e4, "operations": 1e6}
    more = {"bytes": 1e6, "floor_seconds": 0.001, "share_of_operations": 0.1, "share_of_bytes": 0.1, "mean_wave": None}
    more |= {"operations_per_second": 1e9, "bytes_per_second": 1e9}
    rest = {"compile_seconds": 2.0, "host_peak_bytes": 10**9, "device_peak_bytes": None, "turns": 3}
    beside = [PeerRecord("torch", "torch 2", "", 1e-4, 0.1, 10.0), PeerRecord("pfl", note="not installed")]
    wanted = [row for row in rows("cpu") if row.name.startswith(("mnist-fo-784", "cifar", "persafl-30-", *extra))]
    made = [RowRecord(r.name, r.workload, r.words, r.setting, **numbers, **more, **rest, peers=beside) for r in wanted]
    return BenchRecord(
        "0.1", "2026-01-02T03:04:05", "personax bench", 1.0, 0.5, "", MACHINE, made, StartRecord([4], [2])
    )


def test_the_schema_in_the_docs_is_that_of_the_records():
    schema = json.loads((DOCS / "benchmarks" / "schema.json").read_text())
    assert schema == BENCH.json_schema()
    jsonschema.validate(json.loads(BENCH.dump_json(record())), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"rows": []}, schema)


def test_a_record_as_lines_and_as_a_page():
    made = record("growth-steps")
    told = row_words(made.rows[0])
    assert "10.0" in told and "torch 100 ms, 10.0 x; pfl: not installed" in told
    assert "first round after 4.0 s, or after 2.0 s" in summary(made)
    page = markdown.page({"here": made})
    assert "| mnist-fo-784-100-10 | 10.0 | 100 | 10,000 | 1.00 | 10% |" in page
    assert "26.0 times as long" in page and "1500 rounds take 15.0 s" in page and "1.00 times as fast in waves" in page
    assert "benchmarks/here-growth-steps.svg" in page
    assert set(markdown.plots({"here": made})) == {"here-growth-steps.svg"}


def test_a_plot_has_a_dot_for_each_point():
    picture = draw("a < b", "n", "ms", {"one": [(1, 2.0), (10, 3.0)], "two": [(1, 20.0)]})
    assert picture.count("<circle") == 3 and picture.count("<polyline") == 2 and "a &lt; b" in picture


def test_the_page_of_the_docs_is_made_from_the_committed_records():
    records = markdown.read_records(DOCS)
    assert (DOCS / "performance.md").read_text(encoding="utf-8") == markdown.page(records)
    for name, picture in markdown.plots(records).items():
        assert (DOCS / "benchmarks" / name).read_text(encoding="utf-8") == picture


@pytest.mark.parametrize("number, shown", [(1234.5, "1,234"), (56.78, "56.8"), (5.678, "5.68"), (0.5678, "0.568")])
def test_numbers_have_three_figures(number, shown):
    assert figures(number) == shown and math.isclose(float(shown.replace(",", "")), number, rel_tol=1e-3)


def test_compiled_programs_are_kept_where_the_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv(compilation_cache.VARIABLE, "off")
    assert compilation_cache.compiled_folder() is None
    monkeypatch.setenv(compilation_cache.VARIABLE, str(tmp_path))
    assert compilation_cache.compiled_folder() == tmp_path
    monkeypatch.delenv(compilation_cache.VARIABLE)
    assert "personax" in str(compilation_cache.compiled_folder())


KEEP = """
from personax.fast.compilation_cache import keep_compiled
keep_compiled()
import jax, jax.numpy as jnp
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
print(jax.jit(lambda x: jnp.sin(x) + 1)(0.0))
"""


def test_what_is_compiled_is_found_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(compilation_cache.VARIABLE, str(tmp_path / "kept"))
    subprocess.run([sys.executable, "-c", KEEP], check=True, capture_output=True)
    assert any((tmp_path / "kept").iterdir())
