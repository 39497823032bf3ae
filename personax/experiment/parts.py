"""Separate jobs for the algorithms of a run, merged by the job that ends last."""

from collections.abc import Sequence

from personax.experiment.config import load_run
from personax.experiment.folders import Folder
from personax.experiment.loggers.events import Listener
from personax.experiment.records import RunRecord
from personax.experiment.results import AlgorithmResult, write_part
from personax.experiment.runs import Silent, Watch, Work, merge, prepare, provenances_of, train
from personax.experiment.state import finished, owning


def execute_part(
    folder: Folder,
    name: str,
    started: str,
    watch: Watch = Silent(),
    checkpoint_seconds: float = 10.0,
    listeners: Sequence[Listener] = (),
) -> RunRecord | None:
    """Complete one algorithm of a run; if all others have ended, merge and return the results.

    The training program is the same as in `execute`. `started` is the start of the whole run. Raises `Taken` if another
    process trains the same algorithm.
    """
    work = prepare(load_run(folder.config), name)
    training = next(one for one in work.plan.trainings if one.name == name)
    provenances = provenances_of(work)
    own = Folder(folder.root, job=name)
    own.jobs.mkdir(exist_ok=True)
    with owning(folder, [name]):
        done = finished(folder, [training], {name: provenances[name]}, len(work.config.seed_list), watch.note)
        if name not in done:
            own.metrics.write_bytes(b"")
            result = train(work, training, own, watch, checkpoint_seconds, listeners, provenances)
            write_part(folder, result, provenances[name])
    return merge_finished(work, folder, started, watch)


def merge_finished(work: Work, folder: Folder, started: str, watch: Watch = Silent()) -> RunRecord | None:
    """Merge the results of a run if all its algorithms have ended."""
    if not all(folder.part(training.name).exists() for training in work.plan.trainings):
        return None
    done = finished_of(work, folder, watch)
    if len(done) < len(work.plan.trainings):
        return None
    record = merge(work, folder, [done[training.name] for training in work.plan.trainings], started)
    for path in folder.jobs.glob("*.jsonl"):
        path.unlink(missing_ok=True)  # the stream of the run now has their lines
    return record


def finished_of(work: Work, folder: Folder, watch: Watch = Silent()) -> dict[str, AlgorithmResult]:
    """Read the results of the algorithms of a run that need no training; raise if they do not fit its configuration."""
    return finished(folder, work.plan.trainings, provenances_of(work), len(work.config.seed_list), watch.note)
