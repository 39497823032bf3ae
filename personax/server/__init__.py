"""The server: when and how updates are applied."""

from personax.server.modes import Server, ServerState, Upload, asynchronous, buffered, synchronous

__all__ = ["Server", "ServerState", "Upload", "asynchronous", "buffered", "synchronous"]
