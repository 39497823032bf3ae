"""Adapters that turn a Flax, NNX or Equinox module into a `Model`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from personax.typing import Model, Params
from personax.values import optional_import


def from_flax(module: Any) -> Model:
    """A `flax.linen` module as a `Model`; equal modules give the same one.

    If the module's `__call__` takes `train` or `deterministic`, they state whether a key was given; the key is its
    "dropout" stream. Parameters have the module's own `param_dtype`.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> import flax.linen as nn
    >>> model = px.from_flax(nn.Dense(3))
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> model.apply(params, jnp.ones((2, 4))).shape
    (2, 3)
    """
    linen = optional_import("flax.linen", "`from_flax`", "flax")
    if not isinstance(module, linen.Module):
        raise TypeError(
            f"`module` must be an instance of flax.linen.Module, got {module!r}. For flax.nnx use `from_nnx(make)`."
        )
    return _from_linen(module)


def from_nnx(make: Callable[[Any], Any]) -> Model:
    """A `flax.nnx` module as a `Model`, given as `make(rngs)` because an nnx module is born with its parameters.

    Parameters are a plain dict of arrays. `make` runs again in every trace of `apply`, which then puts the given
    parameters in place; under `jit` the discarded initial values are never computed.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> from flax import nnx
    >>> model = px.from_nnx(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> model.apply(params, jnp.ones((2, 4))).shape
    (2, 3)
    """
    optional_import("flax.nnx", "`from_nnx`", "flax")
    return _from_nnx(make)


def from_equinox(make: Callable[[Array], Any]) -> Model:
    """An Equinox module as a `Model`, given as `make(key)`; the module is for one example and is mapped over the batch.

    Parameters are the module's inexact arrays. The rest (functions, integers, integer arrays) is captured once, so
    it must not depend on the key. If the module's `__call__` takes `key`, each example gets its own.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> import equinox as eqx
    >>> model = px.from_equinox(lambda key: eqx.nn.Linear(4, 3, key=key))
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 4)))
    >>> model.apply(params, jnp.ones((2, 4))).shape
    (2, 3)
    """
    optional_import("equinox", "`from_equinox`", "equinox")
    return _from_equinox(make)


def _refuse_state(kinds: set[str]) -> None:
    """Raise if a network has state besides its parameters: nothing here would carry it between calls."""
    if kinds:
        raise ValueError(
            f"the network must have no state besides its parameters, got {sorted(kinds)}. "
            "Use layer or group normalisation in place of batch normalisation."
        )


@functools.cache
def _from_linen(module: Any) -> Model:
    accepted = inspect.signature(type(module).__call__).parameters

    def flags(training: bool) -> dict[str, bool]:
        return {name: on for name, on in (("train", training), ("deterministic", not training)) if name in accepted}

    def init(key: Array, x: Array) -> Params:
        variables = module.init(key, x, **flags(training=False))
        _refuse_state(set(variables) - {"params"})
        return variables.get("params", {})

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        rngs = {} if key is None else {"dropout": key}
        return module.apply({"params": params}, x, rngs=rngs, **flags(training=key is not None))

    return Model(init, apply)


@functools.cache
def _from_nnx(make: Callable[[Any], Any]) -> Model:
    from flax import nnx

    def init(key: Array, x: Array) -> Params:
        del x
        _, params, _, other = nnx.split(make(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)
        _refuse_state({type(variable).__name__ for _, variable in nnx.to_flat_state(other)})
        return nnx.to_pure_dict(params)

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        module = make(nnx.Rngs(0, dropout=jax.random.key(0) if key is None else key))
        state = nnx.state(module, nnx.Param)
        nnx.replace_by_pure_dict(state, params)
        nnx.update(module, state)
        if key is None:
            module.eval()
        else:
            module.train()
        return module(x)

    return Model(init, apply)


@functools.cache
def _from_equinox(make: Callable[[Array], Any]) -> Model:
    import equinox as eqx

    with jax.ensure_compile_time_eval():  # the static part must hold no tracers, wherever the adapter is called
        example = make(jax.random.key(0))
    if not isinstance(example, eqx.Module):
        raise TypeError(
            f"`make(key)` must return an equinox.Module, got {type(example).__name__}. "
            "Modules with state (batch normalisation) have no place here."
        )
    static = eqx.partition(example, eqx.is_inexact_array)[1]
    takes_key = "key" in inspect.signature(type(example).__call__).parameters

    def init(key: Array, x: Array) -> Params:
        del x
        return eqx.partition(make(key), eqx.is_inexact_array)[0]

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        module = eqx.nn.inference_mode(eqx.combine(params, static), key is None)
        if key is None or not takes_key:
            return jax.vmap(module)(x)
        # Folding in the row number keeps an example's mask the same however many rows the batch has.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(x.shape[0]))
        return jax.vmap(lambda row, row_key: module(row, key=row_key))(x, keys)

    return Model(init, apply)
