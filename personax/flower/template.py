"""A ready Flower app: three files of three lines, a recipe, and what `flwr run` wants to know."""

import tomllib
from pathlib import Path

from personax.experiment.config import choose_algorithm, load, parse
from personax.experiment.folders import readable_slug

PACKAGE = "personax_app"
RECIPE = """\
# What is trained: see docs/flower.md. One algorithm is chosen with `algorithm` in pyproject.toml.

name = "digits"
seeds = 1

# Where every node has a file of its own, nothing here says what a sample looks like. Then put:
# [live.sample]
# shape = [28, 28]
# type = "uint8"
# num_outputs = 10

[data]                        # of nodes that have a `partition-id` and no file of their own
kind = "digits"
[partition]
kind = "classes_per_client"
num_clients = 3
num_classes_each = 4
[split]
test_share = 0.3

[model]
kind = "mlp"
widths = [32]
[schedule]
num_rounds = 5                # without rounds: as many updates as that many rounds have
cohort_size = 3
[evaluation]
every = 1
[local]
lr = 0.1
num_steps = 10
batch_size = 10

[algorithms.FedAvg]
recipe = "fedavg"

[algorithms."Per-FedAvg (HF)"]
recipe = "per_fedavg"
adapt_lr = 0.1

[algorithms.APFL]
recipe = "apfl"
mix = 0.5
server = { kind = "asynchronous", lr = 0.5 }

[algorithms."PersA-FL-ME"]
recipe = "persafl"
objective = { kind = "Moreau", strength = 1.0, prox_lr = 0.1, num_prox_steps = 10 }
lr = 0.3
server = { kind = "asynchronous", lr = 0.5 }
"""
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "Personalized federated learning with personax"
license = "Apache-2.0"
dependencies = ["personax[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "personax"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# Change these here, or for one run with `flwr run DIR SUPERLINK --run-config 'KEY=VALUE'`.
[tool.flwr.app.config]
out = "runs/{name}"           # the run folder, on the machine of the SuperLink; an old one goes on
algorithm = "{algorithm}"
num-clients = {num_clients}   # how many there are: rounds wait for all of them. 0: as many as come
deadline = 600.0              # seconds that a round waits for its cohort
ttl = 1800.0                  # seconds that a message and its reply may take
drain = 120.0                 # seconds after the end for what is under way
outlier-factor = 20.0         # updates so many times longer than the others' are refused; 0: none
sync = false                  # true: survive power cuts, by waiting for the disk at each update
"""
SERVER = '''\
"""The server's side: the recipe, over the nodes that Flower knows."""

from pathlib import Path

from personax.flower.server import server_app

app = server_app(Path(__file__).with_name("recipe.toml"))
'''
CLIENT = '''\
"""The clients' side: hands each message to the worker of its node, where personax runs. Imports no JAX."""

from pathlib import Path

from personax_flower import client_app

app = client_app(Path(__file__).with_name("recipe.toml"))
'''
IGNORED = "__pycache__/\nruns/\n.flwr/\n"


def write_app(folder: Path, config: Path | None = None, algorithm: str | None = None, num_clients: int = 3) -> None:
    """Write a Flower app into a new folder: the recipe given, or one on the embedded digits."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty. Choose another folder.")
    text = RECIPE if config is None else config.read_text(encoding="utf-8")
    given = parse(tomllib.loads(RECIPE)) if config is None else load(config)
    (chosen,) = choose_algorithm(given, algorithm or next(iter(given.algorithms)), config or folder).algorithms
    name = readable_slug(folder.resolve().name, "personax-app")
    fields = {"name": name, "package": PACKAGE, "algorithm": chosen, "num_clients": num_clients}
    files = {
        "pyproject.toml": PROJECT.format(**fields),
        ".gitignore": IGNORED,
        f"{PACKAGE}/__init__.py": '"""A Flower app."""\n',
        f"{PACKAGE}/server_app.py": SERVER,
        f"{PACKAGE}/client_app.py": CLIENT,
        f"{PACKAGE}/recipe.toml": text,
    }
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")
