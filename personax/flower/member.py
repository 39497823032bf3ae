"""One client in one run: its visits, its numbers, and its personal state on its own disk.

Before an upload leaves, the new personal state and the upload itself are on the disk, in one checkpoint. A server that
asks for an update which was made before (the answer was lost, or the server was killed) gets that one, not another.
"""

import json
import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from personax.data.federation import Federation
from personax.experiment import checkpoint
from personax.flower.arrays import Arrays, to_arrays, to_tree
from personax.live.client import Holding
from personax.live.recipe import Limits, read_recipe, require_within
from personax.live.visits import make_visit, personal_model, score, score_one
from personax.simulation.checks import check_model
from personax.typing import Params, Shared

logger = logging.getLogger("personax.flower")
Answer = tuple[dict[str, Any], Arrays]


class Member:
    """What a node is in a run. `about` is what the server says with each message."""

    def __init__(self, name: str, about: Mapping[str, Any], data: Federation, folder: Path, limits: Limits) -> None:
        self.recipe = read_recipe(about["recipe"], about["layout"], limits)
        self.data = replace(data, ids=np.array([about["id"]]), names=[name])
        require_within(self.recipe, int(self.data.counts[0]), limits)
        check_model(self.recipe.task, self.data, None)
        if not re.fullmatch(r"[\w-]{1,80}", about["run"]):
            raise ValueError(f"A run must be named with letters, digits, - and _, got {about['run']!r}.")
        self.who, self.place = [name, int(about["id"])], folder / about["run"]
        self.holding = self._restored()
        self.visit = make_visit(self.recipe, self.data)

    def train(self, about: Mapping[str, Any], arrays: Arrays, report_every: int | None) -> Answer:
        """A visit from the model that came, or the update that was made before and not settled; what is uploaded."""
        next_update, numbers = about["update"], {}
        if self.holding.upload is None or self.holding.upload["update"] < next_update:
            params, shared = self._model(arrays)
            update = max(self.holding.update, next_update)
            if report_every is not None and update % report_every == 0:
                numbers = self._numbers(params, shared, about["version"])
            fault = self._visit(params, shared, about["version"], update)
            if fault:
                return {"fault": fault}, {}
        else:
            logger.info("Update %d is sent again.", self.holding.upload["update"])
        upload = self.holding.upload
        assert upload is not None
        facts = {key: upload[key] for key in ("id", "update", "version")}
        weight = float(self.data.counts[0]) if self.recipe.counts_samples else 1.0
        return {**facts, "samples": weight, "report": numbers}, to_arrays(self.recipe.up, upload["tree"])

    def finish(self, about: Mapping[str, Any], arrays: Arrays, reports: bool) -> Answer:
        """Write the personal model and its numbers; what the owner lets the server know of them."""
        params, shared = self._model(arrays)
        own = (self.holding.personal, self.holding.update)
        model, words = personal_model(self.recipe, self.data, params, shared, *own)
        facts = self._numbers(params, shared, about["version"])
        numbers = {"scores": facts["numbers"], "shared": score_one(self.recipe, self.data, params)}
        numbers["personal"] = score_one(self.recipe, self.data, model)
        described = {"algorithm": self.recipe.training.name, "scoring": words, "numbers": json.dumps(numbers)}
        checkpoint.export(self.place / "personal.safetensors", model, described)
        checkpoint.write_atomically(self.place / "numbers.json", json.dumps(numbers, indent=1).encode())
        return {"report": facts if reports else {}}, {}

    def _model(self, arrays: Arrays) -> tuple[Params, Shared]:
        tree = to_tree(self.recipe.down, arrays)
        return tree["params"], tree["shared"]

    def _numbers(self, params: Params, shared: Shared, version: int) -> dict[str, Any]:
        """What is reported, as the server's book keeps it."""
        held = (self.holding.personal, version, self.holding.update)
        found = score(self.recipe, self.data, params, shared, *held)
        counts = {"samples": len(self.data.client_test(0)[1]), "train_samples": int(self.data.counts[0])}
        return {"numbers": found, "version": version, **counts}

    def _visit(self, params: Params, shared: Shared, version: int, update: int) -> str:
        """Train and save; what went wrong, or nothing."""
        vectors, personal, finite = self.visit(params, shared, self.holding.personal, version, update)
        if not finite:
            self.holding = replace(self.holding, update=update + 1)
            return f"Update {update} is not finite. Ask for smaller step sizes."
        tree = self.recipe.up.unflatten([np.asarray(vector) for vector in vectors])
        upload = {"id": secrets.token_hex(16), "update": update, "version": version, "tree": tree}
        self.holding = Holding(jax.tree.map(np.asarray, personal), update + 1, upload)
        facts = {key: item for key, item in upload.items() if key != "tree"}
        saved = {"personal": self.holding.personal, "upload": tree}
        about = {"client": self.who, "update": update + 1, "upload": facts}
        checkpoint.save(self.place / "state", update + 1, saved, about)
        return ""

    def _restored(self) -> Holding:
        """What the disk has of this run, or the beginning."""
        objective = self.recipe.algorithm.objective
        own = jax.eval_shape(objective.init_personal, self.recipe.params_shape)
        sent = {self.recipe.uploads: self.recipe.params_shape, "extra": self.recipe.extra_shape}
        saved = checkpoint.load(self.place / "state", {"personal": own, "upload": sent}, notify=logger.warning)
        if saved is None:
            return Holding(objective.init_personal(self.recipe.initial_params()), 0)
        if saved.about["client"] != self.who:
            known, now = ("{} with number {}".format(*who) for who in (saved.about["client"], self.who))
            raise ValueError(f"{self.place} has the state of {known}, and this is {now}. Use another `folder`.")
        logger.info("Goes on after %d updates of its own.", saved.about["update"])
        upload = {**saved.about["upload"], "tree": saved.tree["upload"]}
        return Holding(saved.tree["personal"], saved.about["update"], upload)
