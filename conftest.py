"""Exact arithmetic for exact tests: 64-bit floats, no silent broadcasting between ranks, warnings as errors."""

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tests compile hundreds of small programs that run once; their speed is measured in benchmarks/.
jax.config.update("jax_disable_most_optimizations", True)
