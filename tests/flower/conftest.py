"""These tests need Flower, which has an environment of its own: make test-flower."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["*.py"]
