"""One client in one run: its visits, numbers, and personal state on disk, independent of any transport.

Before an upload is sent, the new personal state and the upload itself are on disk, in one checkpoint. A killed client
resumes with both and sends the same upload again, which the server settles once.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from personax.client.local import Start
from personax.experiment import checkpoint
from personax.experiment.model_files import describe_model, write_personal
from personax.experiment.names import require_run_name
from personax.live.acceptance import read_recipe, require_hidden, require_within
from personax.live.limits import Found, Limits, within
from personax.live.log import logger
from personax.live.samples import SampleSource, conformed
from personax.live.visits import client_params, make_visit, personal_model, score, score_one, start_of
from personax.sharing import require_same_base
from personax.simulation.checks import check_model
from personax.typing import Params, Personal, Shared


class Assignment(NamedTuple):
    """The run that a server assigns to a client, the client's number in it, and the recipe and layouts as text."""

    run: str
    id: int
    recipe: str
    layout: str


class Anchor(NamedTuple):
    """The model that a client downloaded, the shared state broadcast beside it, and their version."""

    params: Params
    shared: Shared
    version: int
    rollbacks: int = 0


class SavedUpload(NamedTuple):
    """An upload saved on disk: its identifiers and the vectors of its layout."""

    id: str
    update: int
    version: int
    vectors: list[np.ndarray]
    rollbacks: int = 0


@dataclass(frozen=True)
class Holding:
    """The state of a client. Only `upload` is ever sent."""

    personal: Personal
    update: int  # the number of its next update
    upload: SavedUpload | None = None  # the last upload


def bind(folder: Path, authority: str) -> None:
    """Bind a client's folder to a federation by the fingerprint of its authority; raise if it is bound to another.

    A server of another federation thus receives nothing that was made for this one, even if their runs have the same
    name.
    """
    path = folder / "authority.txt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.write_atomically(path, f"{authority}\n".encode(), private=True)
    known = path.read_text(encoding="utf-8").strip()
    if known != authority:
        raise ValueError(
            f"{folder} belongs to the federation of authority {known:.16}, but this server's authority is "
            f"{authority:.16}. Nothing was sent. Use another folder for this server."
        )


class Membership:
    """One client's participation in a run, within the limits of its owner.

    `report_every` is the number of updates between reports of its numbers; with None, nothing is reported. `authority`
    identifies the federation (see `bind`). A newcomer does not train and has no `holding`; for other clients, call
    `restore` first.
    """

    def __init__(
        self,
        given: Assignment,
        name: str,
        data: SampleSource,
        folder: Path,
        limits: Limits,
        report_every: int | None = None,
        authority: str = "none",
    ) -> None:
        self.run, self.authority = require_run_name(given.run), authority
        self.recipe = read_recipe(given.recipe, given.layout, limits)
        samples = conformed(data, self.recipe, logger.info)
        self.data = replace(samples, ids=np.array([given.id]), names=[name])
        require_within(self.recipe, int(self.data.counts[0]), limits)
        check_model(self.recipe.task, self.data, None)
        self.limits, self.compiled = limits, set[str]()
        self.report_every, self.client, self.place = report_every, [name, int(given.id)], folder / self.run
        bind(folder, authority)
        self.visit = make_visit(self.recipe, self.data)
        self.holding: Holding | None = None

    @property
    def held(self) -> Holding:
        """The state of a client that trains."""
        assert self.holding is not None, "call `restore` first"
        return self.holding

    @property
    def num_samples(self) -> float | None:
        """The number of training samples if the server weights by it, otherwise None."""
        return float(self.data.counts[0]) if self.recipe.counts_samples else None

    def restore(self) -> None:
        """Load the state from disk, or create the initial state."""
        require_hidden(self.recipe, int(self.data.counts[0]), self.limits)
        place, objective = self.place / "state", self.recipe.algorithm.divided
        own = jax.eval_shape(objective.init_personal, self.recipe.whole_shape)
        template = {"personal": own, "upload": self.recipe.up.vector_shapes}
        saved = checkpoint.load(place, template, notify=logger.warning)
        if saved is None:
            self.holding = Holding(objective.init_personal(self.recipe.initial_params()), 0)
            return
        about = saved.about
        if (about["authority"], about["run"]) != (self.authority, self.run):
            raise ValueError(
                f"{place} has the state of run {about['run']} of authority {about['authority']:.16}; this is run "
                f"{self.run} of authority {self.authority:.16}. Nothing was sent. Use another folder."
            )
        if about["client"] != self.client:
            owner, mine = ("{} with number {}".format(*who) for who in (about["client"], self.client))
            raise ValueError(f"{place} has the state of client {owner}; this is {mine}. Use another folder.")
        remedy = "Nothing was sent. Restore the base of the model, or use another folder."
        require_same_base(self.recipe.unshared_fingerprint, about.get("unshared", ""), str(place), remedy)
        logger.info("Continuing after %d updates of this client.", about["update"])
        upload = SavedUpload(**about["upload"], vectors=saved.tree["upload"])
        self.holding = Holding(saved.tree["personal"], about["update"], upload)

    def resume(self, next_update: int) -> SavedUpload | None:
        """Continue at the update that the server expects; return the saved upload if it must be sent again."""
        held = self.held
        if held.upload is not None and held.upload.update >= next_update:
            logger.info("Sending update %d again.", held.upload.update)
            return held.upload
        self.holding = replace(held, update=max(held.update, next_update))
        return None

    def train(self, anchor: Anchor) -> SavedUpload | None:
        """Run a visit, save and return its upload; if it is not finite, return None and change only the count."""
        held = self.held
        start = self._start(anchor)
        vectors, personal, finite = self.timed("visit", lambda: jax.block_until_ready(self.visit(start, held.update)))
        if not finite:
            self.holding = replace(held, update=held.update + 1)
            return None
        sent = [np.asarray(vector) for vector in vectors]
        upload = SavedUpload(secrets.token_hex(16), held.update, anchor.version, sent, anchor.rollbacks)
        self._save(Holding(jax.tree.map(np.asarray, personal), held.update + 1, upload))
        return upload

    def report(self, anchor: Anchor) -> dict[str, Any] | None:
        """The client's numbers if its owner reports them after this update, otherwise None."""
        if self.report_every is None or self.held.update % self.report_every:
            return None
        return self.reported(self.score(anchor), anchor.version)

    def reported(self, numbers: dict[str, dict[str, float]], version: int) -> dict[str, Any] | None:
        """A report as the server's book stores it; None if the owner reports nothing."""
        if self.report_every is None:
            return None
        counts = {"samples": len(self.data.client_test(0)[1]), "train_samples": int(self.data.counts[0])}
        return {"numbers": numbers, "version": version, **counts}

    def score(self, anchor: Anchor) -> dict[str, dict[str, float]]:
        """The client's numbers with this model and its personal state."""
        return self.timed("scores", lambda: score(self.recipe, self.data, self._start(anchor), self.held.update))

    def score_shared(self, anchor: Anchor) -> dict[str, float]:
        """The metrics of the shared model, with this client's own part if a part is personal, on its test data."""
        own = None if self.holding is None else self.holding.personal
        return self._score_one(client_params(self.recipe, anchor.params, own))

    def _shared_words(self) -> str:
        """Describe the model that `score_shared` scores."""
        sharing = self.recipe.algorithm.sharing
        if not sharing.is_completed_by_clients:
            return "shared model"
        if sharing.tuned:
            return "before fine-tuning"
        return "untrained personal part" if self.holding is None else "before finishing"

    def _score_one(self, params: Params) -> dict[str, float]:
        return self.timed("score", lambda: score_one(self.recipe, self.data, params))

    def _start(self, anchor: Anchor) -> Start:
        """The start of the next visit from a download."""
        return start_of(self.recipe, anchor.params, anchor.shared, self.held.personal, anchor.version)

    def timed(self, what: str, do: Callable[[], Found]) -> Found:
        """Call `do`. The first call for each `what` compiles, so the limit on compilation time applies to it."""
        if what in self.compiled:
            return do()
        found = within(self.limits.max_compile_seconds, do)
        self.compiled.add(what)
        return found

    def finish(self, anchor: Anchor, more: Mapping[str, Any] | None = None) -> tuple[Path, dict[str, Any]]:
        """Write the personal model and its numbers, including `more`; return the model's path and the numbers."""
        numbers = {**(more or {}), "shared": self.score_shared(anchor), "shared_model": self._shared_words()}
        if self.holding is not None:
            numbers["scores"] = self.score(anchor)
        own = None if self.holding is None else self.holding.personal
        make = partial(personal_model, self.recipe, self.data, anchor.params, anchor.shared, own)
        model, words = self.timed("model", make)
        numbers["personal"] = self._score_one(model)
        path = self.place / "personal.safetensors"
        about = describe_model(self.recipe.config, self.recipe.schema, self.recipe.training.name)
        write_personal(path, {**about, "scoring": words, "numbers": json.dumps(numbers)}, model)
        content = json.dumps(numbers, indent=1).encode()
        checkpoint.write_atomically(self.place / "numbers.json", content, private=True)
        return path, numbers

    def _save(self, holding: Holding) -> None:
        """Adopt a state once it is on disk."""
        assert holding.upload is not None
        facts = {key: item for key, item in holding.upload._asdict().items() if key != "vectors"}
        tree = {"personal": holding.personal, "upload": holding.upload.vectors}
        about = {"authority": self.authority, "run": self.run, "client": self.client}
        about |= {"update": holding.update, "upload": facts, "unshared": self.recipe.unshared_fingerprint}
        checkpoint.save(self.place / "state", holding.update, tree, about, private=True)
        self.holding = holding
