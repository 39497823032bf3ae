"""Load the ClientApp of `personax.flower` without the rest of personax.

Flower starts a process for each message. Importing personax imports JAX, which would take longer than the rest of such
a process, and the ClientApp does not compute. The package's own module is therefore skipped while it is loaded.
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
        del sys.modules["personax"]  # a later `import personax` loads the whole package


client_app = _load_light().client_app
