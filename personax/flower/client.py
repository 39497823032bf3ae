"""The ClientApp, which lives for one message and passes it to the worker of its node."""

from pathlib import Path
from typing import Any

from personax.flower.api import ClientApp, Context, Message  # pyright: ignore[reportAttributeAccessIssue]
from personax.flower.channel import ask
from personax.flower.node import read_node, request_of
from personax.flower.records import from_content, to_content


def client_app(recipe: Path, mods: list[Any] | None = None) -> ClientApp:
    """Make the ClientApp of an app whose recipe is in this file. `mods` are passed to Flower."""
    app = ClientApp(mods=mods)

    def handle(message: Message, context: Context) -> Message:
        folder, node = read_node(context.node_config, recipe)
        about, arrays = from_content(message.content)
        task = message.metadata.message_type.partition(".")[0]
        answer, found = ask(folder, request_of(node, task, about), arrays)
        return Message(to_content(answer, found), reply_to=message)

    for register in (app.query, app.train, app.evaluate):
        register()(handle)
    return app
