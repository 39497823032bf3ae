"""Announce imports: a configuration that imports runs code, so commands print what they import."""

from collections.abc import Sequence
from pathlib import Path

from personax.cli.console import err
from personax.experiment.config import Config, imports_of, load, load_run


def load_and_announce(path: Path | None, overrides: Sequence[str] | None = None) -> Config:
    """Load a configuration and print what a run of it imports."""
    return _announce(load(path, overrides or ()))


def announce_run(folder: Path) -> None:
    """Print what the configuration of a run folder imports."""
    _announce(load_run(folder / "config.toml"))


def _announce(config: Config) -> Config:
    if paths := imports_of(config):
        err.print(f"This configuration imports and runs {', '.join(paths)}.", highlight=False)
    return config
