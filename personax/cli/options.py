"""Options and settings shared by several groups of commands."""

from pathlib import Path
from typing import Annotated, Any

import typer

GROUP_SETTINGS: dict[str, Any] = {"rich_markup_mode": None, "no_args_is_help": True}  # for every `typer.Typer`

ConfigFile = Annotated[Path | None, typer.Argument(help="A TOML file. Default: the embedded digits.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: --set schedule.num_rounds=50")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The run folder. Default: a new one under runs/.")]
