"""Exact arithmetic for exact tests: 64-bit floats, no silent broadcasting between ranks, warnings as errors."""

import gc
import importlib.util
import os
import signal

import jax
import pytest

# Tests compile hundreds of small programs that run once: these halve the time. Speed is measured in benchmarks/.
QUICK = "--xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):  # later ones stop at a flag that they no longer know
    QUICK += " --xla_cpu_use_fusion_emitters=false"
os.environ["PERSONAX_COMPILED"] = "off"  # a test writes nothing into the user's cache
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in background jobs of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send this signal to the processes that they start
gc.set_threshold(200_000, 20, 100)  # tracing allocates many objects that live on: a tenth of the time was collections
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # also in the processes that tests start

# Modules that need Flower are collected only if it is installed (make test-flower), and so are tests of trackers with
# the real libraries (make test-loggers).
_FLOWER = ("api", "client", "driver", "records", "server")
collect_ignore = [] if importlib.util.find_spec("flwr") else [f"personax/flower/{name}.py" for name in _FLOWER]
if not (importlib.util.find_spec("wandb") and importlib.util.find_spec("mlflow")):
    collect_ignore.append("tests/experiment/test_trackers.py")


@pytest.fixture(autouse=True)
def _doctests_write_elsewhere(request, monkeypatch):
    """Run each doctest in an empty folder, so that its files do not end up in the repository."""
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))
