"""One client in one run: answers to Flower's messages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from personax.flower.arrays import Arrays, to_arrays, to_tree
from personax.live.limits import Limits
from personax.live.membership import Anchor, Assignment, Membership
from personax.live.samples import SampleSource

Answer = tuple[dict[str, Any], Arrays]


def join(
    name: str, about: Mapping[str, Any], data: SampleSource, folder: Path, limits: Limits, report_every: int | None
) -> Membership:
    """Take part in the run of a message, with the state that earlier visits left on disk."""
    given = Assignment(*(about[field] for field in Assignment._fields))
    member = Membership(given, name, data, folder, limits, report_every, authority="flower")
    member.restore()
    return member


def train(member: Membership, about: Mapping[str, Any], arrays: Arrays) -> Answer:
    """Run a visit from the received model, or repeat an update that was not settled; return the upload."""
    upload, report = member.resume(about["update"]), None
    if upload is None:
        anchor, update = _anchor(member, about, arrays), member.held.update
        report = member.report(anchor)
        upload = member.train(anchor)
        if upload is None:
            return {"fault": f"Update {update} is not finite. Use smaller step sizes."}, {}
    facts = {"id": upload.id, "update": upload.update, "version": upload.version}
    tree = member.recipe.up.unflatten(upload.vectors)
    return {**facts, "samples": member.num_samples or 1.0, "report": report or {}}, to_arrays(member.recipe.up, tree)


def finish(member: Membership, about: Mapping[str, Any], arrays: Arrays) -> Answer:
    """Write the personal model and its numbers; return the numbers that the owner reports."""
    _, numbers = member.finish(_anchor(member, about, arrays))
    return {"report": member.reported(numbers["scores"], about["version"]) or {}}, {}


def _anchor(member: Membership, about: Mapping[str, Any], arrays: Arrays) -> Anchor:
    tree = to_tree(member.recipe.down, arrays)
    return Anchor(tree["params"], tree["shared"], about["version"])
