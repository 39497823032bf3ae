"""Loading of trained models: the shared model of a run, the model of a client, or a model file."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from personax.data.federation import Federation
from personax.data.schema import Notify, Schema, listed
from personax.evaluation.evaluate import client_models
from personax.experiment import checkpoint
from personax.experiment.build import Study, Training, build, make_network, make_training
from personax.experiment.config import Config, ConfigError, choose_algorithm, load_run
from personax.experiment.divergence import describe, has_numbers
from personax.experiment.folders import Folder
from personax.experiment.model_files import read_trained, restore
from personax.experiment.newcomers import best_row, require_shared_model
from personax.experiment.provenance import Provenance, digest_data, provenance_of
from personax.experiment.records import RunRecord, read_results
from personax.experiment.runs import planned, shapes_of, snapshot_of
from personax.experiment.summaries import newcomer_scoring
from personax.experiment.trained import TrainedModel
from personax.simulation.results import Snapshot
from personax.values import check_names, did_you_mean


def load(
    run: Path | str,
    algorithm: str | None = None,
    client: str | int | None = None,
    *,
    score: str | None = None,
    allow_imports: bool = False,
    notify: Notify = lambda text: None,
) -> TrainedModel:
    """Load a trained model with its schema, for predictions or export.

    Args:
        run: a run folder, or a model file such as the `personal.safetensors` of `personax personalize` and `join`.
        algorithm: the algorithm; by default the one with the best score (of a shared model, if no client is given).
        client: the name or number of one of the run's clients, to load the model that was scored on its data, which is
            computed from the run's data and final states. By default, the shared model is loaded.
        score: the name of a score, which selects one of the client's models; by default the best.
        allow_imports: if True, a model file may import the code of its network. Run folders always may, because their
            configuration is code.
        notify: called with notes about the model.

    With several seeds, the model of the first seed that did not diverge is loaded.

    >>> model = load("runs/people", "FedAvg")  # doctest: +SKIP
    >>> load("runs/people", "APFL", client="person 7").predict("new.csv")  # doctest: +SKIP
    """
    path = Path(run)
    if path.is_file():
        if (algorithm, client, score) != (None, None, None):
            raise ValueError(f"{path} is a single model file. Omit the algorithm, client and score.")
        return read_trained(path, allow_imports=allow_imports)
    if not path.exists():
        raise FileNotFoundError(f"Run folder or model file not found: {path}.")
    record = read_results(path)
    config, folder = load_run(Folder(path).config), Folder(path)
    if algorithm is not None:
        config = choose_algorithm(config, algorithm, "the run")
    trainings = [make_training(name, entry) for name, entry in config.algorithms.items()]
    if client is None:
        if score is not None:
            raise ValueError("A score selects a model of a client. Give a client, or omit the score.")
        return _shared_model(folder, config, record, _best_shared(record, trainings, algorithm), notify)
    training, score = _best_of_clients(record, trainings, algorithm, score)
    return _client_model(folder, config, record, (training, score), client, notify)


def _best_shared(record: RunRecord, trainings: Sequence[Training], algorithm: str | None) -> Training:
    """Return the requested algorithm, or the one whose shared model has the best score."""
    if algorithm is None and len(trainings) > 1:
        has = {name for training in trainings for name, one in training.scorings.items() if one.model == "global"}
        best = best_row(record, [row for row in record.table if row.score in has and row.is_ranked])
        if best is None:
            names = ", ".join(training.name for training in trainings)
            raise ConfigError(f"{record.name} has no score of a shared model. Choose an algorithm: {names}.")
        return next(training for training in trainings if training.name == best.algorithm)
    return trainings[0]


def _best_of_clients(
    record: RunRecord, trainings: Sequence[Training], algorithm: str | None, score: str | None
) -> tuple[Training, str]:
    """Return the algorithm and score with the best mean among scores of clients' own models."""
    scorings = {name: (training, one) for training in trainings for name, one in training.scorings.items()}
    if score is not None:
        check_names("the run", [score], scorings, "score")
    able = {name for name, (_, one) in scorings.items() if one.model != "global" and not one.flag}
    able &= set(scorings) if score is None else {score}
    rows = [row for row in record.table if row.score in able]
    best = best_row(record, [row for row in rows if row.is_ranked or algorithm or score])
    if best is None:
        who = f"`{score or algorithm or record.name}`"
        raise ConfigError(
            f"{who} has no models of single clients: it scored the shared model, or models on the data that they were "
            "adapted to, or it diverged. Omit the client, or choose another algorithm or score."
        )
    return scorings[best.score][0], best.score


def _shared_model(
    folder: Folder, config: Config, record: RunRecord, training: Training, notify: Notify
) -> TrainedModel:
    """Load the shared model of an algorithm from its file."""
    require_shared_model(training)
    if training.algorithm.sharing.personal:
        raise ConfigError(
            f"{training.name} has no shared model: {', '.join(training.algorithm.sharing.personal)} is personal. Give "
            "a client, or use `personalize` for a new one."
        )
    tree, schema, _ = _read_model(folder, record, training.name)
    network = make_network(config.model.table, schema.num_outputs)
    words = "the shared model, unchanged"
    if all(scoring.model != "global" for scoring in training.scorings.values()):
        words += ", which was not scored: its clients adapt it or have their own models"
        notify(f"{training.name}: {words}. For a client's model, give the client, or use `personalize` for a new one.")
    return TrainedModel(
        network, restore(network, tree["params"], schema), schema, f"{training.name} of {record.name}", words
    )


def _read_model(folder: Folder, record: RunRecord, name: str) -> tuple[dict, Schema, int]:
    """Read the parameters of an algorithm's file, their schema and their seed, or raise an error with the reason."""
    own = next(one for one in record.algorithms if one.name == name)
    if not has_numbers(own, len(record.seeds)):
        raise ConfigError(f"{name} {describe(own.divergences)} and has no model. Choose another algorithm.")
    path = folder.model(name)
    if not path.is_file():
        raise FileNotFoundError(
            f"File not found: {path}. To rebuild the model of {name}, run: personax resume {folder.root}"
        )
    tree, about = checkpoint.read_model(path)
    return tree, Schema.from_dict(json.loads(about["schema"])), int(about["seed"])


def _client_model(
    folder: Folder,
    config: Config,
    record: RunRecord,
    chosen: tuple[Training, str],
    client: str | int,
    notify: Notify,
) -> TrainedModel:
    """Compute the model of one client that a score refers to, from the run's final state and data."""
    training, score = chosen
    name, scoring = training.name, training.scorings[score]
    if (folder.root / "live.json").exists():
        raise ConfigError(
            f"{folder.root} is a live run, whose clients keep their states. Each client has its own model in its "
            "personal.safetensors, which `load` can read."
        )
    _, schema, seed = _read_model(folder, record, name)
    config = replace(config, algorithms={name: config.algorithms[name]})
    plan = build(config)
    snapshot = _last_snapshot(folder, config, plan, notify)
    place, is_held_out = _find(plan.federation, client, folder.root)
    if is_held_out:
        found = newcomer_scoring(training.algorithm, scoring)
        if found is None:
            raise ConfigError(f"{client} was held out of training and has no model for `{score}`.")
        scoring = found
    elif scoring.clients == "held_out":
        scoring = replace(scoring, clients="all")
    at = config.seed_list.index(seed)
    given = (training.algorithm, plan.task, plan.federation, snapshot.of_seeds(at, at + 1), scoring)
    models = client_models(*given, [place], key=plan.keys[at : at + 1])
    params = jax.tree.map(lambda leaf: np.asarray(leaf[0, 0]), models)
    network = make_network(config.model.table, schema.num_outputs)
    title = f"{name} of {record.name}, {client}"
    return TrainedModel(
        network, params, schema, title, scoring.describe(training.algorithm.divided).split(";")[0], is_personal=True
    )


def _find(federation: Federation, client: str | int, root: Path) -> tuple[int, bool]:
    """Return a client's position among training or held-out clients, and True if it is held out."""
    for part in (federation, federation.newcomers):
        if part is None:
            continue
        names = list(part.names)
        for name in (str(client), f"client {client}"):  # the latter is the name of numbered clients
            if name in names:
                return names.index(name), part is not federation
    names = [*federation.names, *(federation.newcomers.names if federation.newcomers is not None else ())]
    near = did_you_mean(str(client), names)
    raise ConfigError(f"{root} has no client {client!r}.{near} The clients are {listed(names)}.")


def _last_snapshot(folder: Folder, config: Config, plan: Study, notify: Notify) -> Snapshot:
    """Load the final state of the only algorithm of a configuration, if it matches the settings and data."""
    (training,) = plan.trainings
    run = planned(config, plan, training)
    saved = checkpoint.load(folder.checkpoints(training.name), lambda about: shapes_of(run, about), notify=notify)
    if saved is None:
        raise FileNotFoundError(
            f"{folder.root} has no checkpoint of {training.name} with the states of its clients. To retrain it, "
            f"run: personax resume {folder.root} --fresh {training.name!r}"
        )
    before = Provenance.from_table(saved.about["provenance"])
    now = provenance_of(config, training.name, digest_data(plan.federation))
    changes = before.changes_to(now)
    if before.num_rounds != now.num_rounds:
        changes.append(f"`schedule.num_rounds` was {before.num_rounds} and is {now.num_rounds}")
    if changes:
        raise ConfigError(
            f"The models in {folder.root} were trained with different settings or data: {'; '.join(changes)}. Undo the "
            f"change, or retrain: personax resume {folder.root}"
        )
    return snapshot_of(run, saved)
