"""The server's state machine: what is settled stays settled, wherever it is stopped; rounds, deadlines, full disks."""

import errno
import os

import jax
import numpy as np
import pytest

from personax.experiment.config import ConfigError, Terms
from personax.live import journal as journal_module
from personax.live.exchange import Arrived
from personax.live.journal import Journal, read_lines
from personax.live.messages import Mismatch
from personax.live.results import journal_schedule
from tests.live.parts import NAMES, make_book, recipe

pytestmark = pytest.mark.xdist_group("live")


def upload(book, update, scale=0.01, version=None, id=None):
    shapes = {"delta": book.recipe.params_shape, "extra": book.recipe.extra_shape}
    content = book.recipe.up.encode(jax.tree.map(lambda leaf: np.full(leaf.shape, scale, leaf.dtype), shapes))
    version = book.version if version is None else version
    return Arrived(id or f"id-{update}", update, version, 1.0, content)


def state_of(book):
    return jax.tree.map(np.asarray, (book.state, book.version))


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_an_upload_is_settled_once(tmp_path):
    book = make_book(tmp_path)
    book.join("anna")
    assert book.settle("anna", upload(book, 0)).outcome == "applied"
    before = state_of(book)
    assert book.settle("anna", upload(book, 0)).outcome == "duplicate"
    assert book.settle("anna", upload(book, 0, id="other")).outcome == "duplicate"
    same(before, state_of(book))
    assert book.settle("anna", upload(book, 4)).outcome == "applied"  # a client may skip numbers
    assert book.settle("anna", upload(book, 3)).outcome == "duplicate"
    assert [line["update"] for line in read_lines(tmp_path) if line["what"] == "upload"] == [0, 4]


def test_the_bound_on_norms_is_a_multiple_of_the_median_of_the_others(tmp_path):
    """One client with a large norm does not lift the bound for the others."""
    book = make_book(tmp_path, recipe(num_rounds=100), Terms(num_clients=5, outlier_factor=4.0, model_factor=1e3))
    others = {"loud": 10.0, "anna": 0.01, "bert": 0.02, "cleo": 0.03}  # whose median is 0.025
    for name in (*others, "last"):
        book.join(name)
    for name, scale in others.items():
        assert book.settle(name, upload(book, 0, scale)).outcome == "applied"
    assert book.settle("last", upload(book, 0, 0.0999)).outcome == "applied"
    assert book.settle("last", upload(book, 1, 0.1001)).outcome == "refused"


@pytest.mark.parametrize("saves", [(), (2,), (2, 4), (1, 2, 3, 4, 5)])
def test_a_restart_continues_at_the_same_state(saves, tmp_path):
    """A book that is dropped at any moment, as by kill -9, and opened again: the same bits, and nothing twice."""
    given = recipe("SCAFFOLD", num_rounds=100)
    book = make_book(tmp_path, given)
    for name in NAMES:
        book.join(name)
    for update in range(5):
        for name in NAMES:
            book.settle(name, upload(book, update, 0.01 * (update + 1), version=max(book.version - 1, 0)))
        if update + 1 in saves:
            book.save()
    again = make_book(tmp_path, given)
    same(state_of(book), state_of(again))
    assert again.ledger.seats == book.ledger.seats and again.ledger.num_events == 15
    assert again.settle("anna", upload(again, 4)).outcome == "duplicate"
    assert again.settle("anna", upload(again, 5)).outcome == "applied"
    numbers = [line["number"] for line in read_lines(tmp_path)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_damaged_checkpoint_costs_nothing(tmp_path, caplog):
    book = make_book(tmp_path)
    book.join("anna")
    for update in range(4):
        book.settle("anna", upload(book, update))
        if update % 2:
            book.save()
    newest = sorted((tmp_path / "checkpoints").glob("*.safetensors"))[-1]
    newest.write_bytes(b"damaged")
    again = make_book(tmp_path)
    same(state_of(book), state_of(again))
    assert "damaged" in caplog.text


def newest_state(folder):
    """The file of the newest state."""
    return max((folder / "state").iterdir(), key=lambda path: int.from_bytes(path.read_bytes()[:8], "little"))


def spoil(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("at", [64, -1])
def test_a_state_that_was_not_written_whole_does_not_count(at, tmp_path, caplog):
    """Nor does the line that tells of it: the client has had no answer, and sends again."""
    book = make_book(tmp_path)
    book.join("anna")
    for update in range(3):
        book.settle("anna", upload(book, update))
    spoil(newest_state(tmp_path), at)
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"number": 5, "wh')
    again = make_book(tmp_path)
    assert again.ledger.seats["anna"].next_update == 2 and again.ledger.num_events == again.version == 2
    assert again.settle("anna", upload(again, 2)).outcome == "applied"
    same(state_of(book), state_of(again))
    assert [line["number"] for line in read_lines(tmp_path)] == [1, 2, 3, 4]
    assert "lost" not in caplog.text


def test_a_line_without_its_state_takes_what_came_after_it_along(tmp_path):
    """The machine may stop with the line of a late upload on the disk and the state before it not."""
    book = make_book(tmp_path)
    book.join("anna")
    for update in range(2):
        book.settle("anna", upload(book, update))
    book.join("bert")
    spoil(newest_state(tmp_path), -1)
    again = make_book(tmp_path)
    assert list(again.ledger.seats) == ["anna"] and again.version == 1
    assert [line["what"] for line in read_lines(tmp_path)] == ["join", "upload"]
    again.join("bert")
    same(state_of(again), state_of(make_book(tmp_path)))


@pytest.mark.parametrize("saved", [False, True])
def test_what_a_power_cut_took_is_lost_and_reported(saved, tmp_path, caplog):
    """Without `sync` the disk may have neither state: the run continues from its checkpoint, or starts over."""
    book = make_book(tmp_path)
    book.join("anna")
    book.settle("anna", upload(book, 0))
    if saved:
        book.save()
    kept = state_of(book) if saved else state_of(make_book(tmp_path / "other"))
    for update in range(1, 4):
        book.settle("anna", upload(book, update))
    for path in (tmp_path / "state").iterdir():
        path.write_bytes(b"")
    again = make_book(tmp_path)
    same(kept, state_of(again))
    assert again.ledger.num_events == saved and f"goes back to record {1 + saved}" in caplog.text
    assert again.settle("anna", upload(again, 4)).outcome == "applied"


@pytest.mark.parametrize("rest", [b"", bytes(300) + b"\n", b"[]\n"])
def test_a_state_of_lines_that_are_lost_does_not_count(rest, tmp_path, caplog):
    """A power failure may leave zeros in their place."""
    book = make_book(tmp_path)
    book.join("anna")
    for update in range(2):
        book.settle("anna", upload(book, update))
    book.save()
    before = state_of(book)
    for update in range(2, 5):
        book.settle("anna", upload(book, update))
    lines = (tmp_path / "journal.jsonl").read_bytes().splitlines(True)
    (tmp_path / "journal.jsonl").write_bytes(b"".join([*lines[:3], rest, *lines[4:]] if rest else lines[:3]))
    again = make_book(tmp_path)
    same(before, state_of(again))
    assert "goes back to record 3" in caplog.text
    for update in range(2, 5):
        again.settle("anna", upload(again, update))
    same(state_of(book), state_of(again))
    same(state_of(again), state_of(make_book(tmp_path)))


@pytest.mark.parametrize("name", ["FedAsync", "FedAvg"])
@pytest.mark.parametrize("version", [0, 99, 2**40])
def test_the_version_that_a_client_reports_is_its_own(name, version, tmp_path):
    book = make_book(tmp_path, recipe(name, num_rounds=10), Terms(num_clients=1))
    book.join("anna")
    for update in range(3):
        book.settle("anna", upload(book, update))
    book.report("anna", {"numbers": {}, "version": version})
    assert book.version == make_book(tmp_path, recipe(name, num_rounds=10), Terms(num_clients=1)).version == 3
    assert not book.finished and book.settle("anna", upload(book, 3)).outcome == "applied"


@pytest.mark.parametrize("fails", [0, 1])  # the line, the state
def test_a_full_disk_changes_nothing_and_stops_everything(fails, tmp_path, monkeypatch):
    book = make_book(tmp_path)
    book.join("anna")
    book.settle("anna", upload(book, 0))
    before = state_of(book)
    write, calls = os.pwritev, []

    def full(*given):
        calls.append(given)
        if len(calls) > fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*given)

    monkeypatch.setattr(journal_module.os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        book.settle("anna", upload(book, 1))
    monkeypatch.undo()
    with pytest.raises(OSError, match="must stop"):
        book.settle("anna", upload(book, 1))
    same(before, state_of(book))
    again = make_book(tmp_path)
    same(before, state_of(again))
    assert again.settle("anna", upload(again, 1)).outcome == "applied"


def test_a_round_ends_when_its_cohort_has_reported(tmp_path):
    book = make_book(tmp_path, recipe("FedAvg", num_rounds=2, cohort_size=2))
    assert not book.trains("anna")
    for name in NAMES:
        book.join(name)
    members = book.ledger.round.members
    assert len(members) == 2 and sum(book.trains(name) for name in NAMES) == 2
    (other,) = set(NAMES) - set(members)
    assert book.settle(other, upload(book, 0)).outcome == "late"
    book.settle(members[0], upload(book, 0))
    assert book.version == 0 and not book.trains(members[0])
    book.settle(members[1], upload(book, 0, scale=0.03))
    assert book.version == 1 and len(book.ledger.round.members) == 2
    first = jax.tree.map(np.asarray, book.recipe.initial_params())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a - b, 0.02, rtol=1e-6), first, state_of(book)[0].params)


def test_a_round_ends_at_its_deadline_with_enough_of_its_cohort(tmp_path):
    clock = Clock()
    terms = Terms(num_clients=3, deadline=60.0, least_share=0.6)
    book = make_book(tmp_path, recipe("FedAvg", num_rounds=3), terms, clock=clock)
    for name in NAMES:
        book.join(name)
    book.settle("anna", upload(book, 0))
    clock.now += 61
    assert book.advance() and book.version == 0  # one of three is too few, and no other is present
    assert set(book.ledger.round.members) == set(NAMES) and book.ledger.round.reported == ("anna",)
    book.settle("bert", upload(book, 0))
    clock.now += 59
    assert not book.advance()
    clock.now += 2
    assert book.advance() and book.version == 1
    assert book.settle("cleo", upload(book, 0, version=0)).outcome == "late"  # it is of the round before
    assert book.trains("cleo") and "cleo" not in book.ledger.round.reported
    assert book.settle("cleo", upload(book, 1)).outcome == "applied"
    again = make_book(tmp_path, recipe("FedAvg", num_rounds=3), terms, clock=clock)
    same(state_of(book), state_of(again))
    assert again.ledger.round == book.ledger.round


def test_who_joins_late_begins_with_the_next_round(tmp_path):
    book = make_book(tmp_path, recipe("FedAvg", num_rounds=3), Terms(num_clients=2))
    for name in NAMES[:2]:
        book.join(name)
    book.join("cleo")
    assert set(book.ledger.round.members) == {"anna", "bert"} and not book.trains("cleo")
    for name in NAMES[:2]:
        book.settle(name, upload(book, 0))
    assert book.version == 1 and book.trains("cleo") and set(book.ledger.round.members) == set(NAMES)


def test_who_is_away_is_replaced(tmp_path):
    clock, here = Clock(), set(NAMES)
    terms = Terms(num_clients=2, deadline=60.0, least_share=1.0)
    given = recipe("FedAvg", num_rounds=3, cohort_size=2)
    book = make_book(tmp_path, given, terms, clock=clock, present=lambda: here)
    for name in NAMES:
        book.join(name)
    gone, stays = book.ledger.round.members
    book.settle(stays, upload(book, 0))
    here.discard(gone)
    clock.now += 61
    book.advance()
    (other,) = set(NAMES) - {gone, stays}
    assert set(book.ledger.round.members) == {stays, other} and book.trains(other)
    book.settle(other, upload(book, 0))
    assert book.version == 1


def test_counts_beside_the_delta_must_be_counts(tmp_path):
    """ARUBA's server loops over the reported number of visits, so it refuses one of two billion."""
    book = make_book(tmp_path, recipe_of_aruba())
    book.join("anna")
    assert book.settle("anna", upload(book, 0, scale=1)).outcome == "applied"
    settled = book.settle("anna", upload(book, 1, scale=2**30))
    assert settled.outcome == "refused" and "num_tasks" in settled.words


def recipe_of_aruba():
    from personax.data.schema import Schema, numbered
    from personax.experiment.build import resolve
    from personax.experiment.config import parse
    from personax.live.recipe import make_recipe

    entry = {"recipe": "aruba", "num_steps": 1, "server": {"kind": "asynchronous"}}
    table = {"seeds": 1, "model": {"kind": "logistic_regression"}, "algorithms": {"ARUBA": entry}}
    return make_recipe(resolve(parse(table), baselines=False), Schema((4,), "float64", classes=numbered(3)))


def test_what_only_simulations_have_is_refused():
    with pytest.raises(ConfigError, match="Controllers work in simulations only"):
        recipe(controller={"kind": "RunBudget", "time": 9.0})
    with pytest.raises(ConfigError, match="Schedules of single algorithms work in simulations only"):
        recipe(schedule={"deadline": 9.0})


def test_numbers_of_clients_are_their_own(tmp_path):
    book = make_book(tmp_path)
    assert book.join("anna", 1).id == 1 and book.join("bert").id == 0 and book.join("cleo").id == 2
    assert book.join("anna", 1).id == 1
    with pytest.raises(Mismatch, match="and anna both have number"):
        book.join("dora", 1)


def test_an_upload_that_is_sent_again_started_from_the_model_that_it_was_made_from(tmp_path):
    """A client that comes back fetches the newest model first, and then sends what it had made from an older one."""
    book = make_book(tmp_path)
    for name in ("anna", "bert"):
        book.join(name)
    book.hand_out("anna", 0, 0)
    for update in range(3):
        book.hand_out("bert", book.version, book.ledger.num_events)
        book.settle("bert", upload(book, update))
    book.hand_out("anna", book.version, book.ledger.num_events)
    book.settle("anna", upload(book, 0, version=0))
    told = journal_schedule(read_lines(tmp_path), ["anna", "bert"])
    assert told.client.tolist() == [1, 1, 1, 0] and told.started_at.tolist() == [0, 1, 2, 0]


def test_a_journal_tells_what_happened(tmp_path):
    state = lambda number: [bytes([number]), b"more"]
    journal = Journal(tmp_path)
    assert journal.restore(0) == ([], None)
    journal.append({"what": "join", "client": "anna"})
    journal.append({"what": "upload"}, state(1))
    journal.append({"what": "step"}, state(2))
    journal.close()
    again = Journal(tmp_path, sync=True)
    records, newest = again.restore(1)
    assert [record["what"] for record in records] == ["upload", "step"] and newest == b"".join(state(2))
    again.append({"what": "upload"}, state(3))
    again.append({"what": "report"})
    again.close()
    last = Journal(tmp_path)
    records, newest = last.restore(4)  # a checkpoint has that state
    assert [record["what"] for record in records] == ["report"] and newest is None and last.last == 5
    last.close()
    assert [line["number"] for line in read_lines(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_run_of_an_older_version_is_refused(tmp_path):
    (tmp_path / "log").mkdir()
    with pytest.raises(ValueError, match="Finish it with that"):
        Journal(tmp_path)


@pytest.mark.parametrize(
    "given, told",
    [
        ({"deadline": 0.0}, "deadline"),
        ({"least_share": 2.0}, "least_share"),
        ({"outliers": "keep"}, "outliers"),
        ({"max_streams": 1}, "max_streams"),
    ],
)
def test_terms_that_make_no_sense_are_refused(given, told):
    with pytest.raises(ValueError, match=told):
        Terms(**given)
