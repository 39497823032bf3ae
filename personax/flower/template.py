"""A complete Flower app: three short Python files, a recipe, and the settings for `flwr run`."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from personax.experiment.config import choose_algorithm, load
from personax.experiment.folders import readable_slug

PACKAGE = "personax_app"
APP = Path(__file__).with_name("app")
RECIPE = APP / "recipe.toml"
IGNORED = "__pycache__/\nruns/\n.flwr/\n"


def write_app(folder: Path, config: Path | None = None, algorithm: str | None = None, num_clients: int = 3) -> None:
    """Write a Flower app into a new folder, with the given recipe or one on the embedded digits."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty. Choose another folder.")
    given = load(config or RECIPE)
    (chosen,) = choose_algorithm(given, algorithm or next(iter(given.algorithms)), config or folder).algorithms
    name = readable_slug(folder.resolve().name, "personax-app")
    fields = {"name": name, "package": PACKAGE, "algorithm": chosen, "num_clients": num_clients}
    templates = Environment(loader=FileSystemLoader(APP), undefined=StrictUndefined, keep_trailing_newline=True)
    filled = lambda file: templates.get_template(f"{file}.jinja").render(fields)
    files = {
        "pyproject.toml": filled("pyproject.toml"),
        ".gitignore": IGNORED,
        f"{PACKAGE}/__init__.py": '"""A Flower app."""\n',
        f"{PACKAGE}/server_app.py": filled("server_app.py"),
        f"{PACKAGE}/client_app.py": filled("client_app.py"),
        f"{PACKAGE}/recipe.toml": (config or RECIPE).read_text(encoding="utf-8"),
    }
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")
