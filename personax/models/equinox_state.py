"""The state of Equinox modules as a part of their parameters. Importing this requires Equinox."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from personax.typing import Array, Params, PyTree


class Stateful:
    """Modules that contain their state: each `StateIndex` has its own value, as floats."""

    def __init__(self, make: Callable[[Array], Any]):
        self._make = eqx.nn.make_with_state(make)
        shapes = eqx.filter_eval_shape(self._make, jax.random.key(0))[1]
        self._types = jax.tree.map(lambda leaf: leaf.dtype, shapes)
        layers = jax.tree.leaves(eqx.filter_eval_shape(make, jax.random.key(0)), is_leaf=_is_batch_norm)
        names = {layer.axis_name for layer in layers if _is_batch_norm(layer)}
        if len(names) > 1:
            raise ValueError(
                f"All batch normalizations must have the same `axis_name`, got {sorted(names)}. Choose one."
            )
        self._axis = next(iter(names), None)

    @staticmethod
    def is_needed(module: Any) -> bool:
        """Return True if a module has state."""
        return any(map(_is_index, jax.tree.leaves(module, is_leaf=_is_index)))

    def make(self, key: Array) -> Any:
        """Make the module with its state inside."""
        module, state = self._make(key)
        return _placed(module, state)

    def run(
        self, module: Any, x: Array, weight: Array | None = None, keys: Array | None = None
    ) -> tuple[Array, eqx.nn.State]:
        """Return the outputs for a batch and the new state; in training, `weight` excludes padding rows."""
        state = jax.tree.map(_in_type, eqx.nn.State(module), self._types)
        share = None
        if weight is not None:
            counts = weight > 0
            counts |= ~counts.any()
            share = counts / counts.sum()

        def of_row(row: Array, key: Array | None, share: Array | None) -> tuple[Array, eqx.nn.State]:
            own = module if share is None else _weighted(module, share)
            own_state = jax.tree.map(lambda leaf: leaf, state)  # a state can be used only once
            return own(row, own_state) if key is None else own(row, own_state, key=key)

        return jax.vmap(of_row, out_axes=(0, None), axis_name=self._axis)(x, keys, share)

    def statistics(self, params: Params, state: eqx.nn.State) -> Params:
        """Return the new state at its place in the parameters, with None for all other leaves."""
        return _placed(jax.tree.map(lambda leaf: leaf if _is_index(leaf) else None, params, is_leaf=_is_index), state)


def _placed(module: Any, state: eqx.nn.State) -> Any:
    """Store the values of a state in the indices of a module, as floats."""

    def value(leaf: Any) -> Any:
        if not _is_index(leaf):
            return leaf
        own = jax.tree.map(lambda one: jnp.asarray(one, jnp.result_type(one, jnp.float32)), state.get(leaf))
        return eqx.tree_at(lambda index: index.init, leaf, own, is_leaf=lambda one: one is None)

    return jax.tree.map(value, module, is_leaf=_is_index)


def _in_type(given: Array, dtype: Any) -> Array:
    """Convert a float to the dtype of the state: flags are True above one half, counts are rounded."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return given > 0.5
    return jnp.round(given).astype(dtype) if jnp.issubdtype(dtype, jnp.integer) else given


def _weighted(module: Any, share: Array) -> Any:
    """Make the batch normalizations of a module use this row with its share of the batch."""
    weigh = lambda layer: _weighted_norm(layer, share) if _is_batch_norm(layer) else layer
    return jax.tree.map(weigh, module, is_leaf=_is_batch_norm)


class WeightedBatchNorm(eqx.nn.StatefulLayer):
    """A training version of `eqx.nn.BatchNorm` for rows with unequal shares of the batch."""

    layer: Any  # an `eqx.nn.BatchNorm`
    share: Array

    def __call__(
        self, x: Array, state: eqx.nn.State, *, key: Array | None = None, inference: bool | None = None
    ) -> tuple[Array, eqx.nn.State]:
        """Return the outputs and the new state."""
        layer = self.layer
        if layer.inference if inference is None else inference:
            return layer(x, state, inference=True)
        over_rows = lambda values: jax.lax.psum(self.share.astype(values.dtype) * values, layer.axis_name)
        of_channels = lambda values: values.reshape(len(values), -1).mean(axis=1)
        mean = over_rows(of_channels(x))
        var = over_rows(of_channels(jnp.square(x - mean.reshape(-1, *(1,) * (x.ndim - 1)))))
        mix = lambda old, new: layer.momentum * old + (1 - layer.momentum) * new
        if layer.mode == "ema":  # normalizes with the running statistics in training too
            index, flag = layer.ema_state_index, layer.ema_first_time_index
            first, (old_mean, old_var) = state.get(flag), state.get(index)
            moved = jnp.where(first, mean, mix(old_mean, mean)), jnp.where(first, var, mix(old_var, var))
            state = state.set(flag, jnp.array(False)).set(index, moved)
            return layer(x, _copy(state), inference=True)[0], state
        index, counter = layer.batch_state_index, layer.batch_counter
        count, (old_mean, old_var) = state.get(counter), state.get(index)
        by_batch = _copy(state).set(index, (mean, var)).set(counter, jnp.zeros_like(count))
        state = state.set(index, (mix(old_mean, mean), mix(old_var, var))).set(counter, count + 1)
        return layer(x, by_batch, inference=True)[0], state


_weighted_norm: Any = WeightedBatchNorm  # hides its generated constructor from type checkers


def _copy(state: PyTree) -> Any:
    """Copy a state, because setting a value invalidates the original."""
    return jax.tree.map(lambda leaf: leaf, state)


def _is_index(leaf: Any) -> bool:
    return isinstance(leaf, eqx.nn.StateIndex)


def _is_batch_norm(leaf: Any) -> bool:
    return isinstance(leaf, eqx.nn.BatchNorm)
