"""Adapters that turn a Flax, NNX or Equinox module into a `Model`.

Running statistics of batch normalization are leaves of the parameters. In training a layer normalizes by the statistics
of the batch without its filler rows; in evaluation (without a key) by the running ones.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from personax.typing import Model, Params
from personax.values import optional_import

# Arguments of a module's `__call__` that state its mode, and the mode that True means.
_MODES = {"train": True, "deterministic": False, "use_running_average": False}


def from_flax(module: Any) -> Model:
    """Convert a `flax.linen` module to a `Model`; equal modules give the same object.

    If the module's `__call__` takes `train`, `deterministic` or `use_running_average`, they are set according to the
    presence of a key, which becomes the "dropout" stream. Parameters have the module's `param_dtype`. With batch
    normalization, they are a dict of the collections "params" and "batch_stats".

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
            f"`module` must be an instance of flax.linen.Module, got {module!r}. For flax.nnx, use `from_nnx(make)`."
        )
    return _from_linen(module)


def from_nnx(make: Callable[[Any], Any]) -> Model:
    """Convert a `flax.nnx` module to a `Model`, given as `make(rngs)` because nnx modules contain their parameters.

    Parameters are a plain dict of arrays, including the running statistics of batch normalization. `make` runs in every
    trace of `apply`, which then inserts the given parameters; under `jit`, the unused initial values are never
    computed.

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
    """Convert an Equinox module for one example to a `Model`, given as `make(key)`; it is mapped over the batch.

    Parameters are the module's inexact arrays. Everything else (functions, integers, integer arrays) is captured once,
    so it must not depend on the key. If the module's `__call__` takes `key`, each example gets its own key.

    A module with state, such as `eqx.nn.BatchNorm`, is called as `module(x, state)` and returns its outputs and the
    new state. `make` returns the module alone, without `eqx.nn.make_with_state`. The state is part of the parameters,
    in the place of its `StateIndex`, as floats.

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
    """Raise an error if a network has state that would be lost between calls."""
    if kinds:
        raise ValueError(
            f"The only state besides parameters may be the statistics of batch normalization, got {sorted(kinds)}. "
            "Remove other state from the module."
        )


def _counted(weight: Array, x: Array) -> Array:
    """Return the mask of the rows without filler, shaped for the input `x` of a layer; all rows if all are filler."""
    if x.shape[0] != len(weight):
        raise ValueError(
            f"Batch normalization must see the batch as its leading axis, got {x.shape} for a batch of {len(weight)}. "
            "Move the other axes behind it."
        )
    counts = weight > 0
    return (counts | ~counts.any()).reshape(-1, *(1,) * (x.ndim - 1))


def _nothing_of(params: Params) -> Params:
    """The tree with None for every leaf."""
    return jax.tree.map(lambda _: None, params)


@functools.cache
def _from_linen(module: Any) -> Model:
    from flax import linen

    accepted = inspect.signature(type(module).__call__).parameters.keys() & _MODES

    def flags(training: bool) -> dict[str, bool]:
        return {name: _MODES[name] == training for name in accepted}

    def init(key: Array, x: Array) -> Params:
        variables = module.init(key, x, **flags(training=False))
        _refuse_state(set(variables) - {"params", "batch_stats"})
        if "batch_stats" not in variables:
            return variables.get("params", {})
        if not accepted:
            raise ValueError(
                f"{type(module).__name__} has batch normalization, but its `__call__` takes none of "
                f"{', '.join(_MODES)}. Give it the argument `train`: `linen.BatchNorm(use_running_average=not train)`."
            )
        return {"params": variables.get("params", {}), "batch_stats": variables["batch_stats"]}

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        if key is not None:
            return train(params, x, jnp.ones(len(x)), key)[0]
        variables = params if _has_collections(params) else {"params": params}
        return module.apply(variables, x, rngs={}, **flags(training=False))

    def train(params: Params, x: Array, weight: Array, key: Array) -> tuple[Array, Params]:
        call = functools.partial(module.apply, rngs={"dropout": key}, **flags(training=True))
        if not _has_collections(params):
            return call({"params": params}, x), _nothing_of(params)

        def exclude_filler(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if not isinstance(context.module, linen.BatchNorm) or context.method_name != "__call__":
                return call(*args, **kwargs)
            given = args[0] if args else kwargs["x"]
            mask, own = _counted(weight, given), kwargs.get("mask")
            return call(*args, **{**kwargs, "mask": mask if own is None else mask & own})

        with linen.intercept_methods(exclude_filler):
            outputs, new = call(params, x, mutable=["batch_stats"])
        return outputs, {**_nothing_of(params), "batch_stats": new["batch_stats"]}

    return Model(init, apply, train)


def _has_collections(params: Params) -> bool:
    """Return True for the parameters of a Linen module with batch normalization."""
    return set(params) == {"params", "batch_stats"}


@functools.cache
def _from_nnx(make: Callable[[Any], Any]) -> Model:
    from flax import nnx

    kinds = (nnx.Param, nnx.BatchStat)

    def init(key: Array, x: Array) -> Params:
        del x
        _, params, _, other = nnx.split(make(nnx.Rngs(key)), kinds, nnx.RngState, ...)
        _refuse_state({type(variable).__name__ for _, variable in nnx.to_flat_state(other)})
        return nnx.to_pure_dict(params)

    def made(params: Params, key: Array) -> Any:
        module = make(nnx.Rngs(0, dropout=key))
        state = nnx.state(module, kinds)
        nnx.replace_by_pure_dict(state, params)
        nnx.update(module, state)
        return module

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        if key is not None:
            return train(params, x, jnp.ones(len(x)), key)[0]
        module = made(params, jax.random.key(0))
        module.eval()
        return module(x)

    def train(params: Params, x: Array, weight: Array, key: Array) -> tuple[Array, Params]:
        module = made(params, key)
        module.train()
        for _, layer in nnx.iter_graph(module):
            if isinstance(layer, nnx.BatchNorm):
                layer.__class__ = _excluding_filler(type(layer))
        token = _WEIGHT.set(weight)
        try:
            outputs = module(x)
        finally:
            _WEIGHT.reset(token)
        return outputs, _spread(nnx.to_pure_dict(nnx.state(module, nnx.BatchStat)), params)

    return Model(init, apply, train)


_WEIGHT: ContextVar[Array] = ContextVar("weight")  # of the batch that an nnx module sees


@functools.cache
def _excluding_filler(kind: type) -> type:
    """Make a subclass of a batch normalization that ignores filler rows: nnx has no hook for a layer's arguments."""

    def call(self: Any, x: Array, *args: Any, mask: Array | None = None, **options: Any) -> Array:
        counted = _counted(_WEIGHT.get(), x)
        return kind.__call__(self, x, *args, mask=counted if mask is None else counted & mask, **options)

    return type(kind)(kind.__name__, (kind,), {"__call__": call})


def _spread(part: dict, tree: dict) -> dict:
    """Return a part of nested dicts in the structure of the whole, with None for missing entries."""
    spread = lambda name, leaf: _spread(part.get(name, {}), leaf) if isinstance(leaf, dict) else part.get(name)
    return {name: spread(name, leaf) for name, leaf in tree.items()}


@functools.cache
def _from_equinox(make: Callable[[Array], Any]) -> Model:
    import equinox as eqx

    from personax.models.equinox_state import Stateful

    with jax.ensure_compile_time_eval():  # the static part must not contain tracers, even if called inside a trace
        example = make(jax.random.key(0))
    if not isinstance(example, eqx.Module):
        raise TypeError(
            f"`make(key)` must return an equinox.Module, got {type(example).__name__}. "
            "For a module with state, return only the module: its state becomes part of the parameters."
        )
    stateful = Stateful(make) if Stateful.is_needed(example) else None
    whole = make if stateful is None else stateful.make
    with jax.ensure_compile_time_eval():
        static = eqx.partition(whole(jax.random.key(0)), eqx.is_inexact_array)[1]
    takes_key = "key" in inspect.signature(type(example).__call__).parameters

    def init(key: Array, x: Array) -> Params:
        del x
        return eqx.partition(whole(key), eqx.is_inexact_array)[0]

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        if key is not None:
            return train(params, x, jnp.ones(len(x)), key)[0]
        module = eqx.nn.inference_mode(eqx.combine(params, static))
        return jax.vmap(module)(x) if stateful is None else stateful.run(module, x)[0]

    def train(params: Params, x: Array, weight: Array, key: Array) -> tuple[Array, Params]:
        module = eqx.nn.inference_mode(eqx.combine(params, static), False)
        # Folding in the row number makes an example's mask independent of the size of the batch.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(x.shape[0])) if takes_key else None
        if stateful is not None:
            outputs, new = stateful.run(module, x, weight, keys)
            return outputs, stateful.statistics(params, new)
        if keys is None:
            return jax.vmap(module)(x), _nothing_of(params)
        return jax.vmap(lambda row, row_key: module(row, key=row_key))(x, keys), _nothing_of(params)

    return Model(init, apply, train)
