"""The same row with `px.mlp` or `px.cnn` instead of Flax: a peer of `personax bench` (see peer.py).

Its parameters after the same work are compared with those of the twin: both trees have the same order.
"""

import json
import sys
from dataclasses import replace
from importlib.metadata import version

import jax
import jax.numpy as jnp
from peer import error_of, read_work

from personax.bench import check
from personax.bench.machine import num_cores
from personax.bench.ours import from_layers, make_task
from personax.bench.setting import SETTING
from personax.bench.worker import prepare, run_for

ORIGINALS = {"flax-mlp": "mlp", "flax-cnn": "cnn"}


def main() -> None:
    """Prepare, report readiness, and run on request until the input ends."""
    asked = json.loads(sys.argv[1])
    twin = SETTING.validate_python(asked["setting"])
    setting = replace(twin, network=ORIGINALS[twin.network])
    if setting.divided:
        jax.config.update("jax_num_cpu_devices", num_cores())
    work = read_work(asked["check"])
    small = replace(check.small(setting, epoch=False), divided=False)
    shapes = jax.eval_shape(make_task(small).model.init, jax.random.key(0), jnp.zeros((1, *small.input_shape)))
    error = error_of(check.end_of(small, from_layers(shapes, work.start)), work)
    run, facts = prepare(setting)
    note = f"{ORIGINALS[twin.network]}, compiled in {facts['compile_seconds']:.1f} s"
    print(json.dumps({"version": f"personax {version('personax')}", "error": error, "note": note}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run_for(run, setting.num_rounds, float(line))), flush=True)


if __name__ == "__main__":
    main()
