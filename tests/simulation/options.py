"""Options of `simulate` written flat, which is shorter in tests that vary one of them."""

import dataclasses

import personax as px

EXECUTION = {field.name for field in dataclasses.fields(px.Execution)}
MONITOR = {field.name for field in dataclasses.fields(px.Monitor)}


def grouped(**options):
    """The same options as `simulate` takes them."""
    of = lambda names: {name: item for name, item in options.items() if name in names}
    rest = {name: item for name, item in options.items() if name not in EXECUTION | MONITOR}
    return {**rest, "monitor": px.Monitor(**of(MONITOR)), "execution": px.Execution(**of(EXECUTION))}
