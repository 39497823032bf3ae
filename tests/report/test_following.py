"""The page that follows a run is read-only, local, and shows what the run has written so far."""

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from personax.experiment.build import resolve
from personax.experiment.config import parse
from personax.experiment.folders import Folder
from personax.experiment.runs import Silent, execute, start
from personax.report.following import read_simulated, render
from personax.report.serving import page_server
from tests.report.browser import CHROMIUM, Browser
from tests.report.test_report import HOSTILE, figures_of, lines_of, plain, rows_of, words_of

CONFIG = {
    "name": f"tiny {HOSTILE}",
    "seeds": [0, 1],
    "data": {"kind": "synthetic", "num_clients": 8, "num_features": 3, "num_classes": 3, "num_samples": 20},
    "model": {"kind": "logistic_regression"},
    "schedule": {"num_rounds": 4, "cohort_size": 2},
    "evaluation": {"every": 1},
    "local": {"lr": 0.1, "num_steps": 2, "batch_size": 4},
    "algorithms": {"FedAvg": {"recipe": "fedavg"}, f"APFL {HOSTILE}": {"recipe": "apfl", "mix": 0.5}},
}


class Reader(Silent):
    """Reads the folder of a run whenever the run reports its progress."""

    def __init__(self, root):
        self.root, self.seen = root, []

    def advance(self, name, done, latest):
        self.seen.append((name, done, read_simulated(self.root)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("followed") / "run"
    folder = start(resolve(parse(CONFIG), baselines=True), root)
    reader = Reader(root)
    return folder, execute(folder, reader), reader


def test_progress_is_that_of_the_run_at_each_evaluation(run):
    _, record, reader = run
    names = [algorithm.name for algorithm in record.algorithms]
    assert len(reader.seen) == 5 * len(names)
    for name, done, found in reader.seen:
        at = names.index(name)
        states = ["finished"] * at + ["training"] + ["waiting"] * (len(names) - at - 1)
        assert [(one.name, one.state) for one in found.progress] == list(zip(names, states, strict=True))
        assert found.progress[at].done == done and found.progress[at].total == 4 and found.facts["state"] == "training"
        evaluations = record.algorithms[at].scores[0].evaluations[: done + 1]
        (score,) = (score for score in found.scores if score.label == record.algorithms[at].scores[0].name)
        assert score.record.evaluations == evaluations and score.clients is None


def test_the_page_has_the_curves_and_the_clients_of_the_run(run):
    folder, record, reader = run
    page = render(read_simulated(folder.root), 2)
    figures = figures_of(page)
    assert set(figures) == {"curves", "deciles", "clients"} and 'data-follow="2"' in page
    score = record.algorithms[0].scores[0]
    wanted = [100 * np.mean(one.mean["accuracy"]) for one in score.evaluations]
    np.testing.assert_allclose(lines_of(figures["curves"][0])["FedAvg"]["y"], wanted, rtol=1e-5)
    worst = [100 * np.mean(one.worst_decile["accuracy"]) for one in score.evaluations]
    np.testing.assert_allclose(figures["deciles"][0]["data"][1]["y"], worst, rtol=1e-5, atol=1e-9)
    assert [cells[2] for _, cells in rows_of(page)] == ["4 of 4"] * 3
    assert "The run is finished" in page and len(figures["clients"][0]["data"]) == 3
    half = render(reader.seen[7][2], 2)
    assert set(figures_of(half)) == {"curves", "deciles", "clients"}
    assert set(figures_of(render(reader.seen[1][2], 2))) == {"curves", "deciles"}  # no algorithm has ended


def test_names_are_text_on_the_page_that_follows_a_run(run):
    words = words_of(render(read_simulated(run[0].root), 2))
    assert "<script" not in words and "<img" not in words and "onerror" in words


def copy_of(folder, root, lines):
    """A run that is at a line of its metrics."""
    root.mkdir()
    (root / "config.toml").write_bytes(folder.config.read_bytes())
    content = folder.metrics.read_text().splitlines(True)
    (root / "metrics.jsonl").write_text("".join(content[:lines]))
    return Folder(root), content


def test_an_incomplete_line_is_ignored(run, tmp_path):
    folder, content = copy_of(run[0], tmp_path / "run", 2)
    with folder.metrics.open("a") as file:
        file.write(content[2][:100])
    (progress, *_) = read_simulated(folder.root).progress
    assert progress.done == 1 and progress.state == "training"


def test_a_run_without_progress_may_have_been_interrupted(run, tmp_path):
    folder, _ = copy_of(run[0], tmp_path / "run", 2)
    assert read_simulated(folder.root).note == ""
    before = time.time() - 300
    os.utime(folder.metrics, (before, before))
    assert re.match(r"There has been no evaluation for 300\..*personax resume", read_simulated(folder.root).note)
    folder.metrics.unlink()
    assert "latest" in render(read_simulated(folder.root), 2)  # nothing is evaluated yet


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"No run in .*: config.toml not found. Give the folder of a run."):
        read_simulated(tmp_path)


@contextlib.contextmanager
def serving(render):
    server = page_server(render)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def served():
    """A server of a page, the texts that it serves, and a function that sends requests."""
    texts = ["one"]

    def give():
        if texts[0] is None:
            raise OSError("unreadable")
        return texts[0]

    with serving(give) as place:
        port = int(place.rsplit(":", 1)[1].strip("/"))

        def ask(method="GET", path="/", host=f"127.0.0.1:{port}"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request(method, path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers

        yield port, texts, ask


def test_the_page_is_made_for_each_request(served):
    port, texts, ask = served
    status, text, headers = ask()
    assert (status, text) == (200, "one") and headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["X-Frame-Options"] == "DENY"
    texts[0] = "two"
    assert ask(host=f"localhost:{port}")[1] == "two"
    texts[0] = None
    assert ask()[:2] == (500, "OSError: unreadable") and ask()[2]["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize(
    "given, status",
    [
        ({"host": "evil.example"}, 403),  # a name that points to this machine
        ({"host": "127.0.0.1"}, 403),
        ({"host": ""}, 403),
        ({"path": "/../config.toml"}, 404),
        ({"path": "/?q"}, 404),
        ({"method": "POST"}, 501),
        ({"method": "PUT"}, 501),
        ({"method": "DELETE"}, 501),
    ],
)
def test_nothing_else_is_answered(served, given, status):
    assert served[2](**given)[0] == status


def test_the_command_serves_until_it_is_interrupted(run, tmp_path):
    command = [sys.executable, "-c", "from personax.cli import app; app()", "watch", str(run[0].root)]
    quiet = {**os.environ, "PYTHONWARNINGS": "error"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quiet) as process:
        place = re.search(r"at http://(127.0.0.1:\d+)/", process.stdout.readline()).group(1)
        connection = http.client.HTTPConnection(place, timeout=20)
        connection.request("GET", "/")
        assert plain(connection.getresponse().read().decode()).count("4 of 4") == 3
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0 and process.stderr.read() == ""
    missing = subprocess.run([*command[:-1], str(tmp_path)], capture_output=True, text=True)
    assert missing.returncode == 1 and "No run in" in missing.stderr and "Traceback" not in missing.stderr


@pytest.mark.xdist_group("chromium")
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_updates_itself_and_keeps_what_is_zoomed(run, tmp_path):
    folder, content = copy_of(run[0], tmp_path / "run", 3)
    with contextlib.closing(Browser(tmp_path / "profile")) as browser:
        with serving(lambda: render(read_simulated(folder.root), 0.1)) as place:
            browser.open(place, 420)
            assert browser.ask("document.documentElement.scrollWidth") == 420
            done = "document.querySelector('#progress tbody tr').cells[2].textContent.trim()"
            marks = "document.querySelectorAll('#plot-curves .stage .mark').length"
            assert (browser.ask(done), browser.ask(marks)) == ("2 of 4", 3)
            browser.ask("document.querySelector('#curves .tools button').click()")  # zoom in
            ticks = "[...document.querySelectorAll('#plot-curves .stage > svg > text')].map(t => t.textContent).join()"
            zoomed = browser.ask(ticks)
            with folder.metrics.open("a") as file:
                file.write("".join(content[3:5]))
            wait_for(browser, f"{done} === '4 of 4' && {marks} === 5")
            assert browser.ask(ticks) == zoomed
            assert browser.ask("document.getElementById('state').hidden") is True
            assert set(browser.complaints("/")) == {place}  # it asks for itself alone
        wait_for(
            browser, "!document.getElementById('state').hidden"
        )  # the page reports that the server does not answer


def wait_for(browser, condition):
    end = time.monotonic() + 15
    while not browser.ask(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)
