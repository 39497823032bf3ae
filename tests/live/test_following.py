"""The page that follows a live run has the numbers that the run itself records."""

import json
import os
from dataclasses import asdict

import numpy as np
import pytest

from personax.experiment.config import Terms
from personax.live.following import Follower
from personax.live.results import open_run, write_results
from personax.report.following import render
from tests.live.parts import make_book, recipe
from tests.live.test_book import Clock, upload


def reported(accuracy, name, samples):
    numbers = {name: {"loss": 1 - accuracy, "accuracy": accuracy}}
    return {"numbers": numbers, "samples": samples, "train_samples": 9, "version": 0}


SAMPLES = {"anna": 5, "bert": 1, "cleo": 30}


def led(folder, name, num_rounds, follower=None, **options):
    """A run of three clients that report after every update; it is read after each step if there is a follower."""
    given, clock = recipe(name, num_rounds=num_rounds, **options), Clock()
    place, _ = open_run(folder, given, "run")
    book = make_book(folder, given, Terms(num_clients=3), clock=clock)
    for client in SAMPLES:
        book.join(client)
    rng = np.random.default_rng(0)
    for update in range(num_rounds):
        for client in SAMPLES:
            clock.now += 1.5
            outcome = book.settle(client, upload(book, update, id=f"{client}-{update}")).outcome
            assert outcome == "applied"
            book.report(client, reported(float(rng.integers(6)) / 5, name, SAMPLES[client]))
            if follower is not None:
                follower.read()
    return place, book


@pytest.mark.parametrize("name", ["FedAsync", "FedAvg"])
@pytest.mark.parametrize("reads_along", [False, True])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_curves_are_those_that_the_run_records(name, reads_along, weighting, tmp_path):
    follower, scores = Follower(tmp_path), {name: {"model": "global", "weighting": weighting}}
    place, book = led(tmp_path, name, 4, follower if reads_along else None, scores=scores)
    found = follower.read()
    (wanted,) = write_results(place, book, 1.0, 2.0).algorithms
    (score,) = found.scores
    drop = lambda one: {key: item for key, item in asdict(one).items() if key != "events"}
    recorded = [json.loads(json.dumps(drop(one))) for one in wanted.scores[0].evaluations]
    assert [json.loads(json.dumps(drop(one))) for one in score.record.evaluations] == recorded
    (progress,) = found.progress
    assert (progress.done, progress.total) == ((4, 4) if name == "FedAvg" else (12, 12))
    assert progress.state == "finished" and progress.name == name


def test_the_clients_are_those_of_the_ledger(tmp_path):
    _, book = led(tmp_path, "FedAsync", 5)
    book.settle("anna", upload(book, 5, id="late"))  # the run is finished
    page = render(Follower(tmp_path).read(), 2)
    seats = book.ledger.seats
    assert seats["anna"].num_late == 1 and "The clients" in page
    rows = page.split("The clients</span></caption>")[1].split("</table>")[0]
    for name, seat in seats.items():
        cells = rows.split(f">{name}</th>")[1].split("</tr>")[0]
        for number in (seat.num_applied, seat.num_late, seat.staleness):
            assert f"<td>{number}</td>" in cells
    assert "FedAsync: " in rows


def test_a_run_before_its_first_client_and_without_reports_is_shown(tmp_path):
    given = recipe("FedAsync", num_rounds=2)
    open_run(tmp_path, given, "run")
    follower = Follower(tmp_path)
    before = follower.read()
    assert before.progress[0].done == 0 and before.progress[0].total == 2 and before.scores == []
    book = make_book(tmp_path, given, Terms(num_clients=1))
    book.join("anna")
    book.settle("anna", upload(book, 0))
    after = follower.read()
    assert after.progress[0].done == 1 and "No client has reported numbers" in render(after, 2)


def test_a_journal_that_became_shorter_is_read_again(tmp_path):
    led(tmp_path, "FedAsync", 3)
    follower = Follower(tmp_path)
    assert follower.read().progress[0].done == 9
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(True)
    os.truncate(journal, sum(map(len, lines[:-6])))  # as after a crash that lost the last three updates
    assert follower.read().progress[0].done == 6
    with journal.open("ab") as file:
        file.write(lines[-6][:20])  # a line that is being written
    assert follower.read().progress[0].done == 6
