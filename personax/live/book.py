"""The server's state machine. Every upload is settled exactly once, by the functions that the simulator uses.

Each event is first written to disk, as a record of the journal with the resulting state, and then applied to the book.
A restart reads the state and folds the records since its checkpoint into the rest. Only one thread at a time may change
a book.
"""

import time
from collections.abc import Callable, Iterable
from math import inf, sqrt
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from personax.experiment import checkpoint
from personax.experiment.config import ConfigError, Terms
from personax.keys import HostStream, host_generator
from personax.live import admission, saved
from personax.live.arithmetic import VersionedState, compiled, first_state, miscounted, not_finite
from personax.live.exchange import Arrived, Published, Settled
from personax.live.journal import Journal, Record
from personax.live.ledger import Ledger, Seat
from personax.live.log import logger
from personax.live.messages import Layout, Mismatch, room_for
from personax.live.recipe import Recipe
from personax.live.samples import fit_scaling, with_scaling
from personax.server import ServerState
from personax.sharing import require_same_base


class Book:
    """The state of a run: the model, the clients' contributions, and pending work."""

    def __init__(
        self,
        recipe: Recipe,
        terms: Terms,
        journal: Journal,
        checkpoints: Path,
        run: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        present: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        if recipe.fits_scaling and not terms.num_clients:
            raise ConfigError("`standardize` requires `live.num_clients`. Set it to the number of clients.")
        self.recipe, self.terms, self.journal, self.checkpoints = recipe, terms, journal, checkpoints
        self.clock, self.wall, self.present = clock, wall, present or (lambda: list(self.ledger.seats))
        self.is_synchronous = recipe.algorithm.server.is_synchronous
        like_model = jax.tree.structure(recipe.extra_shape) == jax.tree.structure(recipe.params_shape)
        self.root = 0.5 if like_model else 0.25  # other extras may be sums of squares
        self.marked = (0, 0)  # at the newest checkpoint: the last record and the length of the journal
        self.saved_states, self.kept_at = journal.lines.parent / "saved", -inf
        self.room = room_for(recipe.up.num_bytes)  # buffer for the upload being applied: XLA's own copy costs more
        self._published: Published | None = None
        # For each client: the version of its last download, the number of events before it, and the time.
        self.fetched: dict[str, tuple[int, int, float]] = {}
        self.saved = self._restore(run)  # the number of the last record in a checkpoint

    # Queries

    @property
    def now(self) -> float:
        """Seconds since the run began. They follow the monotonic clock within a process and never decrease."""
        return self.resumed_at + self.clock() - self.started

    @property
    def state(self) -> ServerState:
        """The server's state, as in the simulator."""
        return self.kept.unflatten([np.asarray(vector) for vector in self.vectors])

    @property
    def cohort_size(self) -> int:
        """The number of clients in a round; without rounds, the number of updates that count as one round."""
        wanted = self.recipe.config.schedule.cohort_size
        return max(len(self.ledger.seats), self.terms.num_clients or 1) if wanted == "all" else wanted

    @property
    def finished(self) -> bool:
        """True once all rounds, or the equivalent number of updates, are done."""
        section = self.recipe.config.schedule
        if self.is_synchronous:
            return self.version >= section.num_rounds
        return self.ledger.num_events >= section.num_rounds * self.cohort_size

    def trains(self, name: str) -> bool:
        """True if a client should train now."""
        seat = self.ledger.seats.get(name)
        if self.finished or self.recipe.fits_scaling or seat is None or seat.excluded:
            return False
        if not self.is_synchronous:
            return True
        at = self.ledger.round
        return at is not None and name in at.members and name not in at.reported

    @property
    def fresh(self) -> Published | None:
        """The newest model if it is already encoded, otherwise None."""
        made = self._published
        return made if made is not None and made.version == self.version else None

    def published(self) -> Published:
        """The newest model, encoded on the first request."""
        made = self._published
        if made is None or made.version != self.version:
            down = self.recipe.down
            buffers = down.buffers_of(self.vectors, self.kept)
            made = self._published = Published(self.version, buffers, down.num_bytes, self.ledger.num_events)
        return made

    # Events

    def join(self, name: str, id: int | None = None, num_samples: float = 0.0) -> Seat:
        """Return a client's seat: its existing one, or a new one with number `id` or the next free number.

        `num_samples` is its weight if the server weights by samples.
        """
        seats = self.ledger.seats
        if name in seats:
            if num_samples not in (0.0, seats[name].samples):
                self._note({"what": "samples", "client": name, "samples": num_samples})
            return seats[name]
        taken = {seat.id for seat in seats.values()}
        if id in taken:
            owner = next(other for other, seat in seats.items() if seat.id == id)
            raise Mismatch(f"{name} and {owner} both have number {id}. Issue {name} a certificate with another number.")
        number = next(n for n in range(len(taken) + 1) if n not in taken) if id is None else id
        counted = {"samples": num_samples} if num_samples else {}
        self._note({"what": "join", "client": name, "id": number, **counted})
        self.advance()
        return self.ledger.seats[name]

    def contribute(self, name: str, found: dict[str, Any]) -> None:
        """Store the moments of a client's columns, and fit the scaling once `num_clients` clients have sent theirs."""
        ledger = self.ledger
        if not self.recipe.fits_scaling:
            return
        known = {**ledger.moments, name: ledger.moments.get(name, found)}
        in_order = sorted(known, key=lambda client: ledger.seats[client].id)
        scaling = fit_scaling(self.recipe.schema, (known[client] for client in in_order))
        if name not in ledger.moments:
            self._note({"what": "moments", "client": name, "moments": found})
        if len(known) >= (self.terms.num_clients or 1):
            self._note({"what": "scaling", "scaling": scaling})
            self.advance()

    def hand_out(self, name: str, version: int, num_events: int) -> None:
        """Record which model a client downloaded and when. This is not journaled: only a report's figures use it."""
        self.fetched[name] = (version, num_events, round(self.now, 3))

    def settle(self, name: str, arrived: Arrived) -> Settled:
        """Apply or reject an upload; the same upload is never applied twice."""
        seat = self.ledger.seats[name]
        if arrived.update < seat.next_update:
            if arrived.id == seat.last_upload:
                return Settled("duplicate", f"It was already settled: {seat.last_outcome}.")
            words = f"Update {arrived.update} was already settled; the next is {seat.next_update}. Nothing was applied."
            return self._refuse(name, Settled("duplicate", words))
        settled, reached, numbers = self._judge(name, arrived)
        version, started_at, received = self.fetched.get(name, (-1, 0, 0.0))
        if version != arrived.version:  # a retry, or after a restart: the time of the download is unknown
            each = self.recipe.algorithm.server.buffer_size or 1
            started_at, received = min(each * arrived.version, self.ledger.num_events), round(self.now, 3)
        about = {
            "what": "upload",
            "client": name,
            "update": arrived.update,
            "upload": arrived.id,
            "started": arrived.version,
            "staleness": self.version - arrived.version,
            "started_at": started_at,
            "received": received,
            "outcome": settled.outcome,
            **({"words": settled.words} if settled.words else {}),
            **numbers,
        }
        self._note(about, reached)
        if settled.outcome == "refused":
            self._refuse(name, settled)
        self.advance()
        return settled

    def report(self, name: str, numbers: dict[str, Any]) -> int:
        """Store the numbers that a client chose to report; return their size on disk in bytes."""
        before = self.journal.end
        self._note({"what": "report", "client": name, **numbers})
        return self.journal.end - before

    def exclude(self, name: str, excluded: bool, by: str) -> None:
        """Exclude a client's uploads, or admit them again, as the operator `by` decided."""
        if name not in self.ledger.seats:
            known = ", ".join(self.ledger.seats) or "none"
            raise Mismatch(f"{name} has not registered in this run. Registered: {known}.")
        if self.ledger.seats[name].excluded != excluded:
            self._note({"what": "exclude", "client": name, "excluded": excluded, "by": by})
            self.advance()

    def advance(self) -> bool:
        """Begin, end or extend a synchronous round if that is due. Return True if anything changed."""
        if not self.is_synchronous or self.finished or self.recipe.fits_scaling:
            return False
        at, now = self.ledger.round, self.now
        if at is None:
            return self._begin_round()
        if len(at.reported) == len(at.members):
            self._step("complete")
        elif now < at.since + self.terms.deadline:
            return False
        elif at.reported and len(at.reported) >= self.terms.least_share * len(at.members):
            self._step("deadline")
        else:
            away = [name for name in at.members if name not in at.reported]
            others = [name for name in self._present() if name not in at.members]
            drawn = self._draw(others, len(away))
            stay = away[: len(away) - len(drawn)]
            self._note({"what": "cohort", "members": [*at.reported, *drawn, *stay]})
            logger.warning(
                "The round is waiting for %s. Replaced by: %s", ", ".join(away), ", ".join(drawn) or "no one"
            )
            return True
        self._begin_round()
        return True

    def snapshot(self) -> Callable[[], None]:
        """Return a function that writes a checkpoint of the current state, also from another thread (one at a time)."""
        number = self.journal.last
        if number == self.saved:
            return lambda: None
        before, cut = self.marked, self.journal.cut_archived()
        before = (before[0], before[1] - cut)
        self.marked = (number, self.journal.end)
        self.saved, state, ledger, seconds = number, self.state, self.ledger.to_table(), self.now

        version, unshared = self.version, self.recipe.unshared_fingerprint
        about = {"ledger": ledger, "seconds": seconds, "unshared": unshared}
        due = self.clock() - self.kept_at >= self.terms.save_every
        if due:
            self.kept_at = self.clock()

        def write() -> None:
            self.journal.flush()  # otherwise a power failure could leave a checkpoint ahead of the journal
            checkpoint.save(self.checkpoints, number, state, about, private=True)
            self.journal.archive_lines(*before)  # a restart needs at most the lines since the previous checkpoint
            if due:
                saved.keep(self.saved_states, version, number, state, about, self.terms.num_saved)

        return write

    def save(self) -> None:
        """Write a checkpoint."""
        self.snapshot()()

    def roll_back(self, version: int) -> None:
        """Return to a saved state and discard later updates. Clients recognize the model by the new rollback count."""
        tree, ledger = saved.load(self.saved_states, version, self.state)
        facts = {
            name: {"norm": seat.norm, "extras": seat.extras, "excess": seat.excess, "num_applied": seat.num_applied}
            for name, seat in ledger.seats.items()
        }
        about = {"what": "rollback", "from": self.version, "events": ledger.num_events, "seats": facts}
        reached = [jnp.array(vector) for vector in self.kept.vectors(self.kept.encode(tree))], np.int32(version)
        self._note(about, reached)
        self.fetched, self._published = {}, None
        self.save()

    # Implementation

    def _step(self, why: str) -> None:
        self._note({"what": "step", "why": why}, self.step(self.vectors, np.int32(self._num_clients)))

    def _begin_round(self) -> bool:
        names = self._present()
        wanted = self.recipe.config.schedule.cohort_size
        needed = self.terms.num_clients or (1 if wanted == "all" else wanted)
        excluded = sum(seat.excluded for seat in self.ledger.seats.values())
        if len(names) < max(needed - excluded, 1):
            return False
        self._note({"what": "cohort", "members": self._draw(names, len(names) if wanted == "all" else wanted)})
        return True

    def _present(self) -> list[str]:
        """The clients that are present, ordered by number."""
        here, seats = set(self.present()), self.ledger.seats
        return sorted((name for name in seats if name in here and not seats[name].excluded), key=lambda n: seats[n].id)

    def _draw(self, names: list[str], num: int) -> list[str]:
        rng = host_generator(self.recipe.key, HostStream.LIVE_COHORTS, self.version, self.journal.last)
        return [names[i] for i in rng.permutation(len(names))[:num]]

    def _judge(self, name: str, arrived: Arrived) -> tuple[Settled, VersionedState | None, Record]:
        """The outcome of an upload; if it is applied, also the resulting state and its numbers."""
        up = self.recipe.up
        if settled := self._untimely(name, arrived):
            return settled, None, {}
        try:
            up.require(arrived.content)
        except Mismatch as error:
            return Settled("refused", str(error)), None, {}
        self.room[:] = arrived.content  # the previous upload is no longer in use once its squares are known
        vectors = up.vectors(self.room)
        if problem := miscounted(up, vectors):
            return Settled("refused", problem), None, {}
        weight, scale, settled = self._weight(name, arrived.num_samples), 1.0, Settled("applied")
        reached, found = self._received(arrived, vectors, weight, scale)
        squares = np.asarray(found)
        if problem := not_finite(up, squares):
            return Settled("refused", problem), None, {}
        norm, parts = sqrt(squares[-1]), zip(up.spans, squares.tolist(), strict=False)
        extras = {part: total**self.root for part, total in parts if part.startswith("extra")}
        seat, peers = self.ledger.seats[name], self.ledger.peers_of(name)
        verdict = admission.judge(self.terms, seat, peers, norm, extras, self._model_norm)
        if verdict.problem:
            if self.terms.outliers == "refuse" or self.recipe.uploads != "delta" or not verdict.may_clip:
                return Settled("refused", verdict.problem), None, {}
            logger.warning("%s: upload %d clipped. %s", name, arrived.update, verdict.problem)
            settled, scale = Settled("applied", f"Clipped. {verdict.problem}"), verdict.bound / norm
            reached, _ = self._received(arrived, vectors, weight, scale)
        numbers = {"norm": min(norm, verdict.bound), "scale": scale, "samples": weight}
        claimed = arrived.num_samples if weight != arrived.num_samples else None
        more = {"extras": extras, "excess": verdict.excess, "claimed": claimed}
        return settled, reached, numbers | {key: item for key, item in more.items() if item}

    def _untimely(self, name: str, arrived: Arrived) -> Settled | None:
        """The outcome of an upload with the wrong client, model or time; None for other uploads."""
        if self.ledger.seats[name].excluded:
            return Settled("refused", f"{name} was excluded by the operator.")
        if arrived.rollbacks != self.ledger.rollbacks:
            return Settled("late", "The run was rolled back after the client downloaded its model.")
        if self.finished:
            return Settled("late", "The run is finished.")
        if arrived.version > self.version:
            return Settled("refused", f"It started from version {arrived.version}, but the newest is {self.version}.")
        if self.is_synchronous and (arrived.version < self.version or not self.trains(name)):
            return Settled("late", "Its round is over, or the client was not in the cohort.")
        return None

    def _weight(self, name: str, claimed: float) -> float:
        """The weight of an upload, in samples."""
        if not self.recipe.counts_samples:
            return claimed
        seats, at = self.ledger.seats, self.ledger.round
        known = {member: seats[member].samples for member in (at.members if at else seats)}
        return admission.weight_of(self.terms, name, claimed, known)

    def _model_norm(self) -> float:
        """The norm of the shared model."""
        squares = (np.sum(np.square(leaf, dtype=float)) for leaf in jax.tree.leaves(self.state.params))
        return sqrt(sum(squares))

    def _received(self, arrived: Arrived, vectors: list[np.ndarray], weight: float, scale: float) -> Any:
        counts = np.array([arrived.version, self._num_clients], np.int32)
        factors = np.array([weight, scale], np.float32)
        return self.receive(self.vectors, vectors, counts, factors)

    def _refuse(self, name: str, settled: Settled) -> Settled:
        """Count and log a refusal with the client's name."""
        logger.warning("%s: upload %s. %s", name, settled.outcome, settled.words)
        seat = self.ledger.seats[name]
        self.ledger.seats[name] = seat._replace(num_refused=seat.num_refused + 1)
        return settled

    def _note(self, about: Record, reached: VersionedState | None = None) -> None:
        """Record an event and the resulting state: first on disk, then in memory."""
        about = {**about, "time": round(self.now, 3)}
        if reached is None:
            self._fold(self.journal.append(about))
            return
        vectors, version = reached
        about["version"] = np.asarray(version).item()
        record = self.journal.append(about, self.kept.buffers_of(vectors))
        self.vectors = vectors
        self._fold(record)

    def _fold(self, about: Record) -> None:
        """Apply a record to everything but the arrays, in the same way now and after a restart."""
        if "state" in about:  # a report also has a version, which its client chooses freely
            self.version = about["version"]
        self.ledger.fold(about)
        if about["what"] == "scaling":
            self.recipe = with_scaling(self.recipe, about["scaling"])

    @property
    def _num_clients(self) -> int:
        return max(len(self.ledger.seats), self.terms.num_clients or 1)

    def _restore(self, run: str) -> int:
        """Restore the last checkpoint and the records since then; return the number of its last record."""
        algorithm = self.recipe.algorithm
        tree = first_state(algorithm, self.recipe.initial_params())
        saved = checkpoint.load(self.checkpoints, tree, notify=logger.warning)
        self.ledger, number, last = Ledger(run, self.wall()), 0, 0.0
        if saved is not None:
            tree, self.ledger, number = saved.tree, Ledger.from_table(saved.about["ledger"]), saved.number
            last = saved.about.get("seconds", 0.0)
            remedy = "Restore the base of the model, or begin another run."
            require_same_base(
                self.recipe.unshared_fingerprint, saved.about.get("unshared", ""), str(self.checkpoints), remedy
            )
        if self.ledger.scaling is not None:
            self.recipe = with_scaling(self.recipe, self.ledger.scaling)
        self.kept = Layout.of(tree)
        assert self.kept.begins_with(self.recipe.down)
        self.receive, self.step = compiled(algorithm, self.recipe.up, self.kept)
        self.version = np.asarray(tree.version).item()
        records, newest = self.journal.restore(number)
        for record in records:
            self._fold(record)
        last = max([last, *(record["time"] for record in records)])
        self.started, self.resumed_at = self.clock(), max(self.wall() - self.ledger.began, last)
        content = self.kept.encode(tree) if newest is None else newest
        self.vectors = [jnp.array(vector) for vector in self.kept.vectors(content)]
        return number
