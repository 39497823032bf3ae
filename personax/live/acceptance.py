"""Decide whether a client accepts a server's recipe: it must be readable, contain no code and respect the limits."""

import contextlib
import json
from dataclasses import replace
from typing import Any, Literal

import jax
import pydantic

from personax.algorithms import Algorithm
from personax.data.schema import Schema
from personax.experiment.config import Config, parse
from personax.experiment.names import printable
from personax.experiment.pretrained import digest_of
from personax.live.limits import Limits, Refused, within
from personax.live.messages import Mismatch
from personax.live.recipe import OPTIMIZERS, Recipe, check_names_on_the_wire, optimizers_in
from personax.values import imports_forbidden, imports_in, name_of

_MOST_TEXT = 1 << 20  # characters of a recipe, which names all columns and classes
_LAYOUTS = pydantic.TypeAdapter(dict[Literal["down", "up"], list[tuple[str, list[int], str]]])


def read_recipe(text: str, layout: str, limits: Limits) -> Recipe:
    """Read a recipe sent by a server. Raise `Refused` if the client's owner does not allow it.

    Also raise `Mismatch` if this installation derives other array layouts from the recipe than the server.
    """
    if max(len(text), len(layout)) > _MOST_TEXT:
        got = max(len(text), len(layout))
        raise Refused(f"A recipe must have at most {_MOST_TEXT} characters, got {got}. Ask the server's operator.")

    def read() -> Recipe:
        # The scan gives a clear message; the guard blocks imports that the scan misses.
        with contextlib.nullcontext() if limits.allow_imports else imports_forbidden():
            return _read_recipe(text, layout, limits)

    return within(limits.max_compile_seconds, read)


def _read_recipe(text: str, layout: str, limits: Limits) -> Recipe:
    try:
        content, agreed = json.loads(text), _LAYOUTS.validate_json(layout)
        table = content["config"]
        _refuse_imports(table, limits)
        _refuse_depth(table.get("model"), limits)
        config = _with_base(parse(table), limits)
        check_names_on_the_wire(config)
        recipe = Recipe(config, Schema.from_dict(content["schema"]), bool(content["fits_scaling"]))
        _check_limits(recipe, limits)
        recipe.down.require_same(agreed["down"], "The server's model")
        recipe.up.require_same(agreed["up"], "The upload")
        _require_same_rest(recipe, str(content["unshared"]))
    except (Refused, Mismatch):
        raise
    except Exception as error:  # the text is untrusted, so any failure is a reason to refuse it
        words = " ".join(printable(error).split())[:300]
        raise Refused(
            f"The server's recipe cannot be read: {words or type(error).__name__}. Install the server's version of "
            "personax."
        ) from None
    return recipe


def _with_base(config: Config, limits: Limits) -> Config:
    """Replace the server's path of the base, if there is one, with the client's own file."""
    digest = config.model.base_digest
    if digest is None:
        return replace(config, model=replace(config.model, base=None))
    needed = f"The server's model starts from a base file with the SHA-256 {digest:.64}"
    if limits.base is None:
        raise Refused(f"{needed}. Ask its operator for the file, and give it with --base (limit `base`).")
    if (found := digest_of(limits.base)) != digest:
        raise Refused(f"{needed}, but {limits.base} has {found}. Ask its operator for the file.")
    return replace(config, model=replace(config.model, base=limits.base))


def _require_same_rest(recipe: Recipe, expected: str) -> None:
    """Refuse a run whose frozen or initial personal parameters differ from those computed here."""
    found = recipe.unshared_fingerprint
    if found != expected:
        raise Mismatch(
            f"The parameters that are not sent ({recipe.algorithm.sharing.describe()}) have the fingerprint "
            f"{found:.12} here and {expected:.12} on the server. Use the server's base, and its versions of personax "
            "and jax."
        )


def _refuse_depth(table: Any, limits: Limits) -> None:
    """Refuse a network that would take long to trace, before anything is traced."""
    longest = max((len(item) for item in table.values() if isinstance(item, list)), default=0) if table else 0
    if longest > limits.max_layers:
        raise Refused(f"The server's network has {longest} layers, but this client allows {limits.max_layers}.")


def _refuse_imports(table: dict[str, Any], limits: Limits) -> None:
    """Refuse names that would import a module, which amounts to running code, unless the owner allows it."""
    if limits.allow_imports:
        return
    if paths := imports_in(table):
        raise Refused(
            f"The server's recipe imports {', '.join(paths)}, which this client does not allow (limit `allow_imports`)."
        )
    for name in optimizers_in(table.get("algorithms", {})):
        if name not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise Refused(f"The server's optimizer must be one of {known}, got {name!r} (limit `allow_imports`).")


def _check_limits(recipe: Recipe, limits: Limits) -> None:
    """Check the limits that do not depend on the client's data."""
    algorithm = recipe.algorithm
    name = name_of(algorithm.objective)
    if limits.objectives is not None and name not in limits.objectives:
        allowed = ", ".join(limits.objectives)
        raise Refused(f"The server's objective is {name}, which this client does not allow (it allows {allowed}).")
    scorings = recipe.training.scorings.values()
    if len(scorings) > limits.max_scores:
        raise Refused(f"The server asks for {len(scorings)} scores, but this client allows {limits.max_scores}.")
    _check_work(recipe, 1, limits)
    sizes = [draw.size for draw in algorithm.local.draws(algorithm.objective)]
    largest = max([*sizes, *(scoring.batch_size for scoring in scorings)])
    if largest > limits.max_batch:
        raise Refused(f"The server asks for batches of {largest} samples, but this client allows {limits.max_batch}.")
    if min(sizes) < limits.min_batch:
        raise Refused(
            f"The server asks for batches of {min(sizes)} samples, but this client requires at least "
            f"{limits.min_batch}: samples may be recovered from updates on smaller batches (limit `min_batch`)."
        )
    if algorithm.local.num_steps is not None:
        _check_least_steps(algorithm.local.num_steps, limits)
    arrays = jax.tree.leaves(recipe.whole_shape)
    num_layers, num_params = sum(leaf.ndim > 1 for leaf in arrays), sum(leaf.size for leaf in arrays)
    if num_layers > limits.max_layers:
        raise Refused(f"The server's network has {num_layers} layers, but this client allows {limits.max_layers}.")
    if num_params > limits.max_params:
        got = f"{num_params:,} parameters"
        raise Refused(f"The server's network has {got}, but this client allows {limits.max_params:,}.")
    for layout in (recipe.down, recipe.up):
        if layout.num_bytes > limits.max_bytes:
            got = f"{layout.num_bytes:,} bytes"
            raise Refused(f"The server's model takes {got} to send, but this client allows {limits.max_bytes:,}.")


def gradients(algorithm: Algorithm, num_samples: int) -> int:
    """Estimate the number of gradients in one visit of a client with this many samples."""
    return int(algorithm.local.steps_of(num_samples)) * algorithm.objective.gradients_per_step()


def work(recipe: Recipe, num_samples: int) -> int:
    """Estimate the number of gradients that a client with this many samples computes between two uploads.

    The estimate covers the visit, each score, and the final adaptation that produces the client's personal model.
    """
    algorithm, total = recipe.algorithm, 0
    visit, each = gradients(algorithm, num_samples), algorithm.objective.gradients_per_step()
    for scoring in recipe.training.scorings.values():
        of_step = each if scoring.model == "recomputed" else 1
        total += visit if scoring.model == "localized" else of_step * scoring.num_steps if scoring.can_adapt else 0
    return 2 * total + visit


def require_within(recipe: Recipe, num_samples: int, limits: Limits) -> None:
    """Check the limit on steps again with the client's number of samples, which matters if a visit runs in epochs."""
    _check_work(recipe, num_samples, limits)


def require_hidden(recipe: Recipe, num_samples: int, limits: Limits) -> None:
    """Refuse to upload if samples could be recovered because there are too few of them or too few local steps."""
    roles, share = recipe.algorithm.objective.roles(), recipe.algorithm.local.query_share
    query = num_samples if share is None else min(max(round(num_samples * share), 1), max(num_samples - 1, 1))
    drawn_from = {role: query if role == "outer" or share is None else num_samples - query for role in roles}
    fewest = min(drawn_from.values())
    if fewest < limits.min_batch:
        raise Refused(
            f"This client has {num_samples} training samples, and some batches are drawn from {fewest} of them. It "
            f"uploads only with {limits.min_batch} or more: samples may be recovered from updates on fewer (limit "
            "`min_batch`)."
        )
    _check_least_steps(_uploaded_steps(recipe, num_samples), limits)


def _uploaded_steps(recipe: Recipe, num_samples: int) -> int:
    """The number of steps of a visit that train shared parameters."""
    stages = recipe.algorithm.local.stages(num_samples, num_samples)
    return sum(int(stage.end - stage.first) for stage in stages if jax.tree.leaves(stage.part(recipe.params_shape)))


def _check_work(recipe: Recipe, num_samples: int, limits: Limits) -> None:
    most = work(recipe, num_samples)
    if most > limits.max_steps:
        raise Refused(
            f"The server asks for {most} gradients per visit, including its scores and the final adaptation, and this "
            f"client allows {limits.max_steps} (limit `max_steps`)."
        )


def _check_least_steps(num_steps: int, limits: Limits) -> None:
    if num_steps < limits.min_steps:
        raise Refused(
            f"The server asks for visits of {num_steps} steps, but this client requires at least {limits.min_steps}: "
            "samples may be recovered from an update with fewer steps (limit `min_steps`)."
        )
