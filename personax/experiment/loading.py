"""Load a trained model: the shared model of a run, the model of one of its clients, or a model file."""

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
from personax.experiment.runs import planned, snapshot_of
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
    """Load a trained model with its schema, to ask for predictions or to export.

    Args:
        run: a run folder, or a model file such as the `personal.safetensors` of `personax personalize` and `join`.
        algorithm: whose model; by default that with the best score (of a shared model, if no client is given).
        client: the name or the number of one of the run's clients, for the model that was scored on its data, which
            is computed from the run's data and last states. By default the shared model.
        score: which of its models a client's is, by the name of a score; by default the best.
        allow_imports: whether a model file may import the code of its network. A run folder always does, because its
            configuration is code.
        notify: called with what should be known about the model.

    With several seeds it is the model of the first that did not diverge.

    >>> model = load("runs/people", "FedAvg")  # doctest: +SKIP
    >>> load("runs/people", "APFL", client="person 7").predict("new.csv")  # doctest: +SKIP
    """
    path = Path(run)
    if path.is_file():
        if (algorithm, client, score) != (None, None, None):
            raise ValueError(f"{path} is the file of one model. Leave out the algorithm, the client and the score.")
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
            raise ValueError("A score chooses among the models of a client. Give a client, or leave out the score.")
        return _shared_model(folder, config, record, _best_shared(record, trainings, algorithm), notify)
    training, score = _best_of_clients(record, trainings, algorithm, score)
    return _client_model(folder, config, record, (training, score), client, notify)


def _best_shared(record: RunRecord, trainings: Sequence[Training], algorithm: str | None) -> Training:
    """The algorithm that was asked for, or else the one whose shared model has the best score."""
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
    """The algorithm and the score with the best mean, of those by which a client has a model of its own."""
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
            f"{who} gives clients no model of their own: it was scored by the shared model, or on the data that it was "
            "adapted to, or it diverged. Leave out the client, or choose another algorithm or score."
        )
    return scorings[best.score][0], best.score


def _shared_model(
    folder: Folder, config: Config, record: RunRecord, training: Training, notify: Notify
) -> TrainedModel:
    """The shared model of an algorithm, from its file."""
    require_shared_model(training)
    tree, schema, _ = _read_model(folder, record, training.name)
    network = make_network(config.model.table, schema.num_outputs)
    words = "the shared model as it is"
    if all(scoring.model != "global" for scoring in training.scorings.values()):
        words += ", which was not scored: its clients adapt it or keep models of their own"
        notify(
            f"{training.name}: {words}. For the model of a client, give the client, or use `personalize` for a new one."
        )
    return TrainedModel(
        network, restore(network, tree["params"], schema), schema, f"{training.name} of {record.name}", words
    )


def _read_model(folder: Folder, record: RunRecord, name: str) -> tuple[dict, Schema, int]:
    """The parameters in the file of an algorithm, their schema and their seed; an error says why there is none."""
    own = next(one for one in record.algorithms if one.name == name)
    if not has_numbers(own, len(record.seeds)):
        raise ConfigError(f"{name} {describe(own.divergences)} and has no model. Choose another algorithm.")
    path = folder.model(name)
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder.root} has no model of {name}: {path} is missing. To rebuild it: personax resume {folder.root}"
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
    """The model of one client that a score is of, from the run's last state and data."""
    training, score = chosen
    name, scoring = training.name, training.scorings[score]
    if (folder.root / "live.json").exists():
        raise ConfigError(
            f"{folder.root} is a live run: the states of its clients never left them. Each client has its own model in "
            "its personal.safetensors, which `load` reads."
        )
    _, schema, seed = _read_model(folder, record, name)
    config = replace(config, algorithms={name: config.algorithms[name]})
    plan = build(config)
    snapshot = _last_snapshot(folder, config, plan, notify)
    place, is_held_out = _find(plan.federation, client, folder.root)
    if is_held_out:
        found = newcomer_scoring(training.algorithm, scoring)
        if found is None:
            raise ConfigError(f"{client} was held out of training, and `{score}` gives such clients no model.")
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
        network, params, schema, title, scoring.describe(training.algorithm.sharing).split(";")[0], is_personal=True
    )


def _find(federation: Federation, client: str | int, root: Path) -> tuple[int, bool]:
    """The position of a client among those that train or those held out, and whether it is the latter."""
    for part in (federation, federation.newcomers):
        if part is None:
            continue
        names = list(part.names)
        for name in (str(client), f"client {client}"):  # the latter is what clients with numbers are called
            if name in names:
                return names.index(name), part is not federation
    names = [*federation.names, *(federation.newcomers.names if federation.newcomers is not None else ())]
    near = did_you_mean(str(client), names)
    raise ConfigError(f"{root} has no client {client!r}.{near} The clients are {listed(names)}.")


def _last_snapshot(folder: Folder, config: Config, plan: Study, notify: Notify) -> Snapshot:
    """The state that the only algorithm of this configuration ended with, if it fits the settings and the data."""
    (training,) = plan.trainings
    run = planned(config, plan, training)
    saved = checkpoint.load(
        folder.checkpoints(training.name), lambda about: run.state_shapes(about["events"]), notify=notify
    )
    if saved is None:
        raise FileNotFoundError(
            f"{folder.root} has no checkpoint of {training.name}, which holds the states of its clients. To train it "
            f"again: personax resume {folder.root} --fresh {training.name!r}"
        )
    before = Provenance.from_table(saved.about["provenance"])
    now = provenance_of(config, training.name, digest_data(plan.federation))
    changes = before.changes_to(now)
    if before.num_rounds != now.num_rounds:
        changes.append(f"`schedule.num_rounds` was {before.num_rounds} and is {now.num_rounds}")
    if changes:
        raise ConfigError(
            f"The models in {folder.root} were trained with other settings or data: {'; '.join(changes)}. Undo the "
            f"change, or train again: personax resume {folder.root}"
        )
    return snapshot_of(run, saved)
