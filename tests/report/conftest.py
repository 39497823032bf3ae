"""Run folders with made-up numbers, written once for the tests of a module."""

import json

import pyarrow.parquet as pq
import pytest

from tests.report.fake_runs import FULL, edit_results, write_full, write_minimal, write_regression, write_run
from tests.report.test_report import HOSTILE, page_of


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return write_full(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def page(full):
    return page_of(full)


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    return write_regression(tmp_path_factory.mktemp("regression"))


@pytest.fixture(scope="module")
def minimal(tmp_path_factory):
    return write_minimal(tmp_path_factory.mktemp("minimal"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run in which every name is an attack."""
    entries = tuple(e._replace(score=f"{e.score} {HOSTILE}", algorithm=f"{e.algorithm} {HOSTILE}") for e in FULL)
    names = {"local_baseline": entries[0].score, "global_baseline": entries[1].score, "client_name": f"{{}} {HOSTILE}"}
    folder = tmp_path_factory.mktemp("hostile")
    write_run(folder, f"run {HOSTILE}", entries, (0, 1), num_held_out=5, config=f"# {HOSTILE}\n", **names)

    def rename(run):
        run["machine"][HOSTILE] = run["started"] = run["personax"] = run["federation"]["summary"] = HOSTILE
        run["federation"]["citations"] = [HOSTILE]
        for algorithm in run["algorithms"]:
            algorithm["recipe"] = HOSTILE
            for score in algorithm["scores"]:
                score["words"], score["flag"] = f"{score['words']} {HOSTILE}", HOSTILE if score["flag"] else ""

    edit_results(folder, rename)
    results, clients, metric = folder / "results.json", folder / "clients.parquet", f"{HOSTILE} accuracy"
    results.write_text(results.read_text().replace('"accuracy"', json.dumps(metric)))
    table = pq.read_table(clients)
    pq.write_table(table.rename_columns([{"accuracy": metric}.get(c, c) for c in table.column_names]), clients)
    return folder
