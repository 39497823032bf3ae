"""These tests need submitit and Ray, which are in a separate environment: make test-cluster."""

import importlib.util

_NEED_ENGINES = ["test_local.py", "test_slurm.py", "test_ray.py"]
collect_ignore = [] if importlib.util.find_spec("submitit") and importlib.util.find_spec("ray") else _NEED_ENGINES
