"""Commands for runs: `compare`, `run`, `resume`, `personalize`, `report`, `cite` and `init`."""

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from personax.cli.console import err, print_table
from personax.cli.errors import plain_errors
from personax.cli.imports import announce_run, load_and_announce
from personax.cli.launch import Address, JobOptions, LauncherOption, Parallel, launch_of, train_jobs, tune_jobs
from personax.cli.options import ConfigFile, Out, Overrides
from personax.cli.progress import Bars
from personax.cluster.engine import Launch
from personax.cluster.hosts import ALONE, Host, join_hosts
from personax.cluster.study import read_launched
from personax.evaluation.scores import ScoreRow, explain_columns, explain_scores, show
from personax.experiment import citations, divergence, newcomers
from personax.experiment.build import resolve
from personax.experiment.checkpoint import write_atomically
from personax.experiment.config import STARTER, Config, choose_algorithm, load_run
from personax.experiment.control import endings
from personax.experiment.folders import Folder, readable_slug, refuse_used
from personax.experiment.loggers import open_loggers
from personax.experiment.loggers.events import Listener
from personax.experiment.records import TUNING, RunRecord, TargetRecord, TuningRecord, read_results
from personax.experiment.runs import Work, end_search, execute, prepare, start, start_search
from personax.experiment.targets import describe as describe_target
from personax.experiment.tuning import TuningStudy, best_trials, prepare_tuning, show_score, split_seed, tune
from personax.report import verdict, words, write_report
from personax.values import check_names

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Fresh = Annotated[
    list[str] | None,
    typer.Option(
        "--fresh", metavar="NAME", help="Train this algorithm again from the beginning; `all` for all of them."
    ),
]
Tune = Annotated[bool, typer.Option("--tune", help="First choose step sizes and strengths on validation data.")]
Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="NAME",
        help="Also send each evaluation to tensorboard, wandb or mlflow, or to your own callback, module:name. "
        "Repeat the option or separate names with commas.",
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        metavar="auto|HOST:PORT,I/N",
        help="Run on several hosts: `auto` under srun, otherwise HOST:PORT,I/N (the first process's address, "
        "this process's index, the number of processes).",
    ),
]


def compare(
    config: ConfigFile = None,
    overrides: Overrides = None,
    folder: Out = None,
    tuned: Tune = False,
    log: Log = None,
    launcher: LauncherOption = None,
    address: Address = None,
    options: JobOptions = None,
    parallel: Parallel = None,
    hosts: Hosts = None,
) -> None:
    """Compare algorithms on the same federation, cohorts and batches: which one wins, and for which clients."""
    with plain_errors():
        listeners, launch = _listeners(log), launch_of(launcher, address, options, parallel, log)
        host = _host(hosts, tuned, launch)
        given = resolve(load_and_announce(config, overrides), baselines=True)
        _new_run(given, folder, tuned, listeners, launch, host)


def run(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    algorithm: Annotated[str | None, typer.Option(help="The algorithm, if the file has several.")] = None,
    overrides: Overrides = None,
    folder: Out = None,
    tuned: Tune = False,
    log: Log = None,
    hosts: Hosts = None,
) -> None:
    """Train one algorithm, on one host or several."""
    with plain_errors():
        listeners, host = _listeners(log), _host(hosts, tuned)
        chosen = choose_algorithm(load_and_announce(config, overrides), algorithm, config)
        _new_run(resolve(chosen, baselines=False), folder, tuned, listeners, host=host)


def resume(
    run: Run,
    fresh: Fresh = None,
    log: Log = None,
    launcher: LauncherOption = None,
    address: Address = None,
    options: JobOptions = None,
    parallel: Parallel = None,
    hosts: Hosts = None,
) -> None:
    """Continue an interrupted run. It ends with the same numbers as an uninterrupted one.

    To train a finished run for longer, increase `schedule.num_rounds` in its config.toml. After any other change of its
    settings or data, nothing is trained, because the results would be mixed. Use --fresh to train the affected
    algorithms again.
    A study that was started with --launcher continues there: running jobs are followed, and missing ones are
    submitted.
    """
    with plain_errors():
        folder, listeners = Folder(run), _listeners(log)
        launch = launch_of(launcher, address, options, parallel, log)
        host = _host(hosts, False, launch)
        if launch is None and hosts is None and (launched := read_launched(run)) is not None:
            launch = launched.launch
        if not folder.config.exists() and folder.untuned.exists() and launch is not None:
            _show_run(folder, _search_and_run(prepare_tuning(load_run(folder.untuned)), folder, launch))
            return
        if not folder.config.exists():
            raise ValueError(f"{run} is not a run folder: it has no config.toml. Start a run with `personax compare`.")
        if (run / "live.json").exists():
            raise ValueError(f"{run} is a live run. To continue it, serve it again: personax serve ... --out {run}")
        announce_run(run)
        names = list(load_run(folder.config).algorithms)
        check_names("--fresh", fresh or [], [*names, "all"], "algorithm")
        again = names if fresh and "all" in fresh else fresh or ()
        with host.folder(run) as root:
            folder = Folder(root)
            before = folder.results.read_bytes() if folder.results.exists() else b""
            record = _finish(folder, listeners, fresh=again, launch=launch, host=host)
            if not host.is_first:
                return
            if folder.results.read_bytes() == before:
                typer.echo(f"{run} is finished.")
            _show_run(folder, record)


def personalize(
    run: Run,
    data: Annotated[Path, typer.Option(help="The client's samples: npz, CSV or Parquet with a label column.")],
    algorithm: Annotated[str | None, typer.Option(help="Default: the run's best algorithm that can adapt.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of adaptation steps. Default: the run's.")] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Their step size. Default: the run's.")] = None,
    path: Annotated[Path, typer.Option("--out", "-o", help="The file for the personal model.")] = Path(
        "personal.safetensors"
    ),
) -> None:
    """Adapt a trained model to a client that was not in training, and write its personal model."""
    with plain_errors():
        announce_run(run)
        given = {"num_steps": steps, "lr": lr, "notify": lambda text: err.print(text, highlight=False)}
        found = newcomers.personalize_newcomer(Folder(run), data, algorithm, **given)
        newcomers.write(found, path)
        typer.echo(f"{found.algorithm}: {found.words.split(';')[0]}, from {found.num_train} samples")
        typer.echo(f"on {found.num_test} other samples:")
        for metric, after in found.after.items():
            before = f"{show(found.before[metric], metric):>8} before" if metric in found.before else ""
            typer.echo(f"  {metric:10}{before}{show(after, metric):>8} after")
        typer.echo(f"The model is in {path}")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One or more run folders.")],
    path: Annotated[Path | None, typer.Option("--out", "-o", help="Default: report.html in the first folder.")] = None,
) -> None:
    """Write an HTML page about one or several runs. It needs no network."""
    with plain_errors():
        typer.echo(f"The report is in {write_report(runs, path or Folder(runs[0]).report)}")


def cite(run: Run) -> None:
    """Print the BibTeX entries of everything that a run used."""
    with plain_errors():
        record = read_results(run)
        used = [key for algorithm in record.algorithms for key in algorithm.citations]
        typer.echo(citations.cite(dict.fromkeys([*used, *record.federation.citations, "jax"])))


def init(path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("personax.toml")) -> None:
    """Write a commented starter configuration."""
    with plain_errors():
        if path.exists():
            raise ValueError(f"{path} exists. Choose another name, or delete it.")
        path.write_text(STARTER.read_text(encoding="utf-8"), encoding="utf-8")
        typer.echo(f"Wrote {path}. Edit it, then run: personax compare {path}")


def _listeners(log: Sequence[str] | None) -> list[Listener]:
    """Open the loggers of `--log` before anything else, so that a missing library is reported at once."""
    return open_loggers(log or (), lambda text: err.print(text, highlight=False))


def _host(hosts: str | None, tuned: bool, launch: Launch | None = None) -> Host:
    """Connect the processes of a run on several hosts."""
    if hosts is not None and (tuned or launch is not None):
        raise ValueError("`--hosts` is for one run. Leave out --launcher and --tune; tune in an earlier run.")
    return join_hosts(hosts)


def _new_run(
    config: Config,
    path: Path | None,
    tuned: bool,
    listeners: Sequence[Listener],
    launch: Launch | None = None,
    host: Host = ALONE,
) -> None:
    """Tune a resolved configuration if `tuned`, then run it in a new folder."""
    path = path or Path("runs") / f"{readable_slug(config.name)}-{datetime.now():%Y%m%d-%H%M%S}"
    with host.folder(path) as root:
        refuse_used(root)
        if tuned and launch is not None:
            study = prepare_tuning(config)
            folder = start_search(config, root)
            _show_run(folder, _search_and_run(study, folder, launch))
            return
        found = None
        if tuned:
            config, found = _tune(config)
        work = prepare(config, devices=host.devices)  # before `start`: an invalid configuration leaves no folder
        folder = start(config, root)
        if found is not None:
            write_atomically(folder.tuning, TUNING.dump_json(found, indent=1))
        record = _finish(folder, listeners, work, launch=launch, host=host)
        if host.is_first:
            _show_run(folder, record)


def _search_and_run(study: TuningStudy, folder: Folder, launch: Launch) -> RunRecord:
    """Tune a configuration as jobs, continuing an earlier search if there is one, then run it."""
    with plain_errors(_go_on(folder)):
        tuned, found = tune_jobs(study, folder, launch)
    _show_search(found)
    work = prepare(tuned)
    write_atomically(folder.tuning, TUNING.dump_json(found, indent=1))
    end_search(tuned, folder)
    return _finish(folder, (), work, launch=launch)


def _tune(config: Config) -> tuple[Config, TuningRecord]:
    """Tune a resolved configuration and print the scores on validation data."""
    err.print(
        f"Tuning on validation data: {config.tune.share:.0%} of each client's training data, drawn with split seed "
        f"{split_seed(config)}. Test data are not used.",
        highlight=False,
    )
    with err.status("Tuning") as status:
        tuned, found = tune(config, lambda text: err.print(text, highlight=False), status.update)
    _show_search(found)
    return tuned, found


def _show_search(found: TuningRecord) -> None:
    """Print the best options of each algorithm and their scores."""
    for one in found.algorithms:
        typer.echo(f"{one.algorithm}, on validation data ({len(one.trials)} trials):")
        columns = list(one.trials[0].options)
        values = lambda options, columns=columns: [str(options[name]) for name in columns]
        rows = [[*values(trial.options), show_score(trial, one.metric), mark] for trial, mark in best_trials(one)]
        print_table((*columns, one.metric, ""), rows)


def _go_on(folder: Folder) -> str:
    return f"Interrupted. To continue, run: personax resume {folder.root}"


def _finish(
    folder: Folder,
    listeners: Sequence[Listener],
    work: Work | None = None,
    fresh: Sequence[str] = (),
    launch: Launch | None = None,
    host: Host = ALONE,
) -> RunRecord:
    """Train the unfinished algorithms of a run, here or as jobs, and return its results."""
    with plain_errors(_go_on(folder)):
        work = work or prepare(load_run(folder.config), devices=host.devices)
        host.require_same(work)
        if not host.is_first:
            return execute(folder, checkpoint_seconds=math.inf, work=work, fresh=fresh)
        if launch is not None:
            return train_jobs(folder, work, launch, fresh)
        with Bars(err, list(work.config.algorithms)) as bars:
            return execute(folder, bars, listeners=listeners, work=work, fresh=fresh)


def _show_run(folder: Folder, record: RunRecord) -> None:
    """Print the results of a run, and write its report. Raise an error if all its algorithms diverged."""
    _print_results(folder, record)
    typer.echo(f"The results are in {folder.root}, the report in {write_report([folder.root], folder.report)}")
    sentences = divergence.warnings(record)
    for sentence in endings(record):
        typer.echo(sentence)
    if any(divergence.has_numbers(algorithm, len(record.seeds)) for algorithm in record.algorithms):
        for sentence in sentences:
            typer.echo(f"Warning: {sentence}", err=True)
        return
    raise ValueError("\n".join(["All algorithms diverged.", *sentences]))


def _print_results(folder: Folder, record: RunRecord) -> None:
    """Print the table of the headline metric, then the verdict and explanations of the columns and scores."""
    diverged = {one.name: divergence.describe(one.divergences) for one in record.algorithms if one.divergences}
    of_metric = [row for row in record.table if row.metric == record.headline]
    rows = [_cells(row, diverged.get(row.algorithm, "")) for row in of_metric]
    columns = [title for title in rows[0] if not title.startswith("over ")]  # the rest fits into 80 characters
    print_table(columns, [[row[title] for title in columns] for row in rows])
    described = [(score.name, score.words) for algorithm in record.algorithms for score in algorithm.scores]
    _print_target(record)
    for line in (*filter(None, [verdict(folder.root)]), *explain_columns(of_metric), *explain_scores(described)):
        typer.echo(line)


def _print_target(record: RunRecord) -> None:
    """Print the cost of reaching the target for each score, if there is virtual time or traffic to compare."""
    target = record.target
    if target is None or not any(one.num_reached for one in target.scores):
        return
    columns = cost_columns(target, len(record.seeds))
    typer.echo(f"Cost of reaching the {describe_target(target)}:")
    print_table(list(columns), [list(row) for row in zip(*columns.values(), strict=True)])


def cost_columns(target: TargetRecord, num_seeds: int) -> dict[str, list[str]]:
    """Return the columns of the table of costs as text; virtual time only if there are delays."""
    number = lambda found: "–" if found is None else f"{found.mean:.4g}"
    sent = lambda found: "–" if found is None else words.size(found.mean)
    columns = {
        "": [one.score for one in target.scores],
        "rounds": [number(one.rounds) for one in target.scores],
        "virtual time": [number(one.time) for one in target.scores],
        "bytes sent": [sent(one.bytes) for one in target.scores],
        "seeds": [f"{one.num_reached} of {num_seeds}" for one in target.scores],
    }
    if not any(one.time is not None and one.time.mean for one in target.scores):
        del columns["virtual time"]
    return columns


def _cells(row: ScoreRow, diverged: str) -> dict[str, str]:
    """The cells of a row, with the time and place of divergence if its algorithm diverged."""
    cells = row.cells()
    if not diverged:
        return cells
    mean = cells[row.metric] if row.mean.num_seeds else "diverged"
    return {**cells, "": f"{cells['']}\n{diverged}", row.metric: mean}
