"""Generate the reference of the command line from the commands themselves."""

from collections.abc import Iterator

import typer.main

from personax.cli import app


def page() -> str:
    """Every command with its arguments, options and examples, in Markdown."""
    group = typer.main.get_command(app)
    return "\n".join(_command(path, command) for path, command in _leaves("personax", group))


def commands() -> list[str]:
    """The full name of every command."""
    return [path for path, _ in _leaves("personax", typer.main.get_command(app))]


def _leaves(path: str, command) -> Iterator[tuple]:
    if hasattr(command, "commands"):
        for name, one in command.commands.items():
            yield from _leaves(f"{path} {name}", one)
    else:
        yield path, command


def _command(path: str, command) -> str:
    context = command.make_context(path, [], resilient_parsing=True)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    paragraphs = (command.help or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    parts = [f"## {path}", text, f"```text\n{usage}\n```"]
    shown = [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    parts += ["\n\n".join(_parameter(one, context) for one in shown)] if shown else []
    if command.epilog:
        title, _, lines = command.epilog.partition(": ")
        parts.append(f"{title}:\n\n```bash\n" + "\n".join(line.strip() for line in lines.split(" | ")) + "\n```")
    return "\n\n".join(parts) + "\n"


def _parameter(one, context) -> str:
    """An entry of a definition list: the argument or option, and its help with the default."""
    names, text = one.get_help_record(context)
    return f"`{names}`\n: {' '.join(text.split())}"
