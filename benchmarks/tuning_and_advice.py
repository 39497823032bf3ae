"""Check on test data that tuning and advice help: tuned beside default options, advised beside given configurations.

`python benchmarks/tuning_and_advice.py tuning` tunes every recipe on the embedded digits and on a generated table.
`python benchmarks/tuning_and_advice.py advice` inspects ten federations: the digits, three generated tables whose
columns have scales from 1 to 1, 100 and 10,000, and six of `synthetic`. Both print a Markdown table.
"""

import argparse
import itertools
import sys
import tomllib
from typing import Any

import jax
import numpy as np

import personax as px
from personax.evaluation.scores import Evaluation, show
from personax.experiment.build import build, make_training, resolve
from personax.experiment.config import Config, parse
from personax.experiment.tuning import evaluations, show_options, tune
from personax.fast.compilation_cache import keep_compiled
from personax.inspection import Effort, inspect_federation

MOREAU = {"strength": 1.0, "prox_lr": 0.1, "num_prox_steps": 10}
SERVER = {"kind": "asynchronous", "lr": 0.2}
RECIPES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"strength": 0.1},
    "scaffold": {},
    "aruba": {},
    "local_only": {},
    "per_fedavg": {"adapt_lr": 0.1},
    "pfedme": {"lr": 0.3, **MOREAU},
    "apfl": {"mix": 0.5},
    "ditto": {"strength": 0.1},
    "anil": {"head": "dense_1", "adapt_lr": 0.1},
    "fedper": {"personal": "dense_1"},
    "lg_fedavg": {"personal": "dense_0"},
    "fedrep": {"personal": "dense_1", "num_personal_steps": 5},
    "fedalt": {"personal": "*.bias", "num_personal_steps": 5},
    "fedsim": {"personal": "*.bias"},
    "fedbabu": {"head": "dense_1"},
    "fedasync": {"server": SERVER},
    "fedasync_mixing": {"mixing": 0.2},
    "fedbuff": {},
    "persafl": {"lr": 0.3, "objective": {"kind": "Moreau", **MOREAU}, "server": SERVER},
}
ADVISED = {name: RECIPES[name] for name in ("local_only", "fedavg", "per_fedavg", "apfl")}
DIGITS = {
    "data": {"kind": "digits"},
    "partition": {"kind": "classes_per_client", "num_clients": 60, "num_classes_each": 4},
    "split": {"test_share": 0.5},
    "model": {"kind": "mlp", "widths": [32]},
}


def people(scale: float = 1.0, num_clients: int = 24, num_samples: int = 60, *, key: Any) -> px.Federation:
    """Generate a table: three classes, eight columns with scales from 1 to `scale`, clients that differ in both."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
    weight, clients = rng.normal(size=(8, 3)), []
    for _ in range(num_clients):
        z = rng.normal(size=(num_samples, 8)) + 0.5 * rng.normal(size=8)
        own = weight + 0.7 * rng.normal(size=weight.shape)
        y = np.argmax(z @ own + 0.5 * rng.gumbel(size=(num_samples, 3)), axis=1)
        clients.append((((z + 1) * scale ** np.linspace(0, 1, 8)).astype(np.float32), y.astype(np.int32)))
    return px.Federation.from_clients(clients)


def table(scale: float, standardize: bool) -> dict[str, Any]:
    """The sections of a generated table."""
    data = {"kind": "import", "path": f"{__name__}:people", "scale": scale, "standardize": standardize}
    return {"data": data, "split": {"test_share": 0.4}, "model": {"kind": "mlp", "widths": [32]}}


def synthetic(model_spread: float, input_spread: float) -> dict[str, Any]:
    """The sections of a synthetic federation with these spreads."""
    data = {"kind": "synthetic", "model_spread": model_spread, "input_spread": input_spread}
    data |= {"num_clients": 30, "num_samples": 60, "num_features": 20, "num_classes": 5}
    return {"data": data, "split": {"test_share": 0.4}, "model": {"kind": "logistic_regression"}}


FEDERATIONS = {
    "digits": DIGITS,
    **{f"table, scales 1 to {scale:g}": table(scale, False) for scale in (1.0, 100.0, 1e4)},
    # The first number has no effect on labels: it shifts the scores of all classes alike.
    **{f"synthetic({one:g}, {one:g})": synthetic(one, one) for one in (0, 0.25, 0.5, 1, 2, 4)},
}
TUNED = {"digits": DIGITS, "table": table(100.0, True)}


def config_of(sections: dict[str, Any], recipes: dict[str, dict[str, Any]], given: argparse.Namespace) -> Config:
    """A resolved configuration of these recipes."""
    everything = {
        "seeds": given.seeds,
        "schedule": {"num_rounds": given.rounds, "cohort_size": 10, "delays": "persafl"},
        "local": {"lr": 0.1, "num_steps": 5, "batch_size": 10},
        "algorithms": {name: {"recipe": name, **options} for name, options in recipes.items()},
    }
    return resolve(parse(everything | sections), baselines=False)


def _on_tests(config: Config, name: str) -> Evaluation | None:
    """The first scoring of one algorithm on test data; None if it diverged."""
    return evaluations(config, build(config), [make_training(name, config.algorithms[name])])[0]


def _score(found: Evaluation | None) -> str:
    return "diverged" if found is None else show(found.interval("accuracy"), "accuracy")


def _difference(new: Evaluation, old: Evaluation | None) -> tuple[str, str]:
    """The paired difference, and whether it is at least zero or includes it in its interval."""
    if old is None:
        return "", "yes"
    gain = new.difference(old, "accuracy")
    verdict = "yes" if gain.mean >= 0 else "no" if gain.is_below(0) else "within the interval"
    return show(gain, "accuracy"), verdict


def compare_tuning(given: argparse.Namespace) -> None:
    """Print the test scores of default and tuned options for every recipe."""
    print("| federation | recipe | default | tuned | difference | at least as good | options |")
    print("|---|---|---|---|---|---|---|")
    for name, recipe in itertools.product(given.federations or TUNED, given.recipes or RECIPES):
        config = config_of(TUNED[name], {recipe: RECIPES[recipe]}, given)
        tuned, record = tune(config)
        old, new = (_on_tests(of, recipe) for of in (config, tuned))
        assert new is not None  # it did not diverge on a part of the data
        options = show_options(record.algorithms[0].chosen)
        print(
            f"| {name} | {recipe} | {_score(old)} | {_score(new)} | {' | '.join(_difference(new, old))} | {options} |"
        )


def compare_advice(given: argparse.Namespace) -> None:
    """Print the test scores of given and advised configurations, each by its best algorithm on validation data."""
    print("| federation | given | advised | difference | at least as good | advice |\n|---|---|---|---|---|---|")
    for name in given.federations or FEDERATIONS:
        config = config_of(FEDERATIONS[name], ADVISED, given)
        advice = inspect_federation(config, Effort(10, 20)).advice
        assert advice.validation is not None
        own = [one for one in advice.validation.runs if one.source == "your configuration"]
        best = max(own, key=lambda one: -1.0 if one.score is None else one.score).algorithm
        advised = resolve(parse(tomllib.loads(advice.starter)), baselines=False)
        old, new = (_on_tests(*one) for one in ((config, best), (advised, advice.algorithm)))
        assert new is not None
        numbers = [f"{best} {_score(old)}", f"{advice.algorithm} {_score(new)}", *_difference(new, old)]
        print(f"| {name} | {' | '.join(numbers)} | {advice.summary} |")


def main() -> None:
    """Run one of the checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=["tuning", "advice"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--federations", nargs="*", help="by default all")
    parser.add_argument("--recipes", nargs="*", help="by default all")
    given = parser.parse_args()
    keep_compiled()
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    {"tuning": compare_tuning, "advice": compare_advice}[given.check](given)


if __name__ == "__main__":
    main()
