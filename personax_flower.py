"""The ClientApp of `personax.flower` without the rest of personax.

Flower starts a process for each message. Importing personax imports JAX, which takes longer than all else in such a
process, and nothing in it computes: so the package's own module is left out while its ClientApp is loaded.
"""

import importlib.util
import sys


def _load_light():
    if "personax" in sys.modules:
        return importlib.import_module("personax.flower.client")
    found = importlib.util.find_spec("personax")
    assert found is not None  # it is in the same distribution
    sys.modules["personax"] = importlib.util.module_from_spec(found)
    try:
        return importlib.import_module("personax.flower.client")
    finally:
        del sys.modules["personax"]  # whoever needs all of personax later gets it


client_app = _load_light().client_app
