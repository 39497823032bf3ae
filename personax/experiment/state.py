"""The state of a run folder: finished algorithms, and checks that results match the configuration and data."""

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence

from personax.data.locks import sole_user
from personax.experiment import checkpoint
from personax.experiment.build import Training
from personax.experiment.config import ConfigError
from personax.experiment.folders import Folder
from personax.experiment.provenance import Provenance
from personax.experiment.results import AlgorithmResult, DamagedPart, Part, read_part


@contextlib.contextmanager
def owning(folder: Folder, names: Sequence[str]) -> Iterator[None]:
    """Lock these algorithms of a run, or raise `Taken`; the end of the process releases them."""
    with contextlib.ExitStack() as held:
        for name in names:
            folder.lock(name).parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(sole_user(folder.lock(name), f"`{name}` of the run {folder.root}"))
        yield


def forget(folder: Folder, name: str) -> None:
    """Remove the states, the results and the model of one algorithm."""
    folder.results.unlink(missing_ok=True)
    for path in (folder.part(name), folder.part_clients(name), folder.model(name)):
        path.unlink(missing_ok=True)
    checkpoint.discard(folder.checkpoints(name))


def finished(
    folder: Folder,
    trainings: Sequence[Training],
    provenances: dict[str, Provenance],
    num_seeds: int,
    notify: Callable[[str], None],
) -> dict[str, AlgorithmResult]:
    """Read the results of finished algorithms; raise an error if something does not match the configuration.

    `notify` gets a message about each damaged file that is rebuilt from a checkpoint.
    """
    parts: dict[str, Part] = {}
    damaged: dict[str, str] = {}
    for training in trainings:
        try:
            part = read_part(folder, training, num_seeds)
        except DamagedPart as error:
            damaged[training.name] = str(error)
        else:
            if part is not None:
                parts[training.name] = part
    _require_same(folder, _recorded(folder, parts, provenances), provenances)
    for name, words in damaged.items():
        if checkpoint.peek(folder.checkpoints(name)) is None:
            raise ValueError(
                f"{words} There is no checkpoint to rebuild it from, so these results of `{name}` are lost. Restore "
                f"the file from a copy, or retrain: {_again(folder, [name], provenances)}"
            )
        notify(f"{words} Rebuilding it from the checkpoint.")
    whole = {name: part for name, part in parts.items() if part.provenance.num_rounds == provenances[name].num_rounds}
    return {name: part.result for name, part in whole.items()}


def refuse_lost(folder: Folder, name: str, problem: object, provenances: dict[str, Provenance]) -> ValueError:
    """Make the error for an algorithm whose checkpoints are all damaged."""
    again = _again(folder, [name], provenances)
    return ValueError(f"{problem} The states of `{name}` are lost. To retrain it, run: {again}")


def _recorded(
    folder: Folder, parts: dict[str, Part], provenances: dict[str, Provenance]
) -> dict[str, list[tuple[Provenance, bool]]]:
    """Read the provenance of each algorithm's results and states, with True if it forbids a shorter run."""
    found: dict[str, list[tuple[Provenance, bool]]] = {}
    for name, now in provenances.items():
        part, about = parts.get(name), checkpoint.peek(folder.checkpoints(name))
        found[name] = [] if part is None else [(part.provenance, True)]
        if about is not None:
            before = Provenance.from_table(about["provenance"])
            found[name].append((before, part is None or part.provenance.num_rounds != now.num_rounds))
    return found


def _require_same(
    folder: Folder, recorded: dict[str, list[tuple[Provenance, bool]]], provenances: dict[str, Provenance]
) -> None:
    """Raise an error if settings or data differ from those of the results and states, or a run became shorter."""
    changed: dict[str, dict[str, None]] = {}  # the algorithms by what has changed
    for name, now in provenances.items():
        for before, fixed in recorded[name]:
            found = before.changes_to(now)
            if fixed and before.num_rounds > now.num_rounds:
                shown = f"was {before.num_rounds} and is {now.num_rounds}"
                found.append(f"`schedule.num_rounds` {shown}: a run can be extended but not shortened")
            for change in found:
                changed.setdefault(change, {})[name] = None
    if changed:
        affected = dict.fromkeys(name for names in changed.values() for name in names)
        lines = [f"  {change} (for {', '.join(names)})" for change, names in changed.items()]
        raise ConfigError(
            f"The results in {folder.root} were computed with different settings or data, and would be mixed:\n"
            + "\n".join(lines)
            + f"\nUndo the change, or retrain the affected algorithms: {_again(folder, list(affected), provenances)}"
        )


def _again(folder: Folder, names: Sequence[str], provenances: dict[str, Provenance]) -> str:
    """Return the command that retrains these algorithms."""
    words = ["all"] if len(names) == len(provenances) > 1 else names
    return " ".join(["personax resume", shlex.quote(str(folder.root)), *(f"--fresh {shlex.quote(w)}" for w in words)])
