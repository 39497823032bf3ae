"""Most of these tests need Flower, which has an environment of its own: make test-flower."""

import importlib.util

_NEED_FLOWER = ["test_driver.py", "test_examples.py", "test_parity.py", "test_proxy.py"]
collect_ignore = [] if importlib.util.find_spec("flwr") else _NEED_FLOWER
