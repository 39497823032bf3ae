"""Most of these tests need Flower, which is in a separate environment: make test-flower."""

import importlib.util

_NEED_FLOWER = ["test_driver.py", "test_examples.py", "test_parity.py", "test_proxy.py"]
collect_ignore = [] if importlib.util.find_spec("flwr") else _NEED_FLOWER
