"""Low-rank adapters on the dense layers of a frozen network."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from personax.fast.low_rank import KernelAxes, Term, find_dense, with_terms
from personax.sharing import Patterns, as_patterns, by_name, names_of, selects
from personax.typing import Model, Params
from personax.values import require, require_count, require_positive

BASE = "base"


def lora(model: Model, rank: int, on: Patterns = "*.kernel", *, scale: float = 1.0) -> Model:
    """Add adapters A, B to a network's dense layers: x W becomes x W + scale (x A) B (Hu 2022, equation 3).

    The parameters are `base`, those of the model, and `lora`, with `a` and `b` for each kernel whose name matches `on`:
    `base.dense_0.kernel` has `lora.dense_0.kernel.a` of shape `[inputs, rank]` and `lora.dense_0.kernel.b` of shape
    `[rank, outputs]`. B starts at zero, so that the network starts as its base, and A at random, with standard
    deviation 1 / sqrt(inputs). W + A B is never formed: with the base frozen and the same for all clients, a cohort
    multiplies by one W.

    The products are found in the traced program, so a network may come from any library: in loops over stacked layers,
    with several axes of inputs or outputs (attention heads), stored transposed. Kernels that a program also reads in
    other ways, such as an embedding tied to the output layer, and convolutions get no adapters.

    Departures from the paper: it does not state the standard deviation of A; alpha / rank is `scale`.

    Args:
        model: the network.
        rank: the rank of A B.
        on: one or several patterns of the kernels' names, see `Sharing`: `"dense_0"` or `("*.kernel", "!dense_1")`.
        scale: the factor of all adapters, alpha / rank in the paper.

    >>> import jax, personax as px
    >>> model = px.lora(px.mlp((32,), 10), rank=4)
    >>> params = model.init(jax.random.key(0), jax.numpy.zeros((1, 64)))
    >>> jax.tree.map(jax.numpy.shape, params["lora"]["dense_0"])
    {'kernel': {'a': (64, 4), 'b': (4, 32)}}
    """
    require_positive("scale", scale)
    return _adapted(model, _rank(rank), _patterns(on), (("lora", float(scale)),))


def dual_lora(model: Model, rank: int, on: Patterns = "*.kernel", *, mix: float = 0.5, scale: float = 1.0) -> Model:
    """Add two adapters to each dense layer: x W + scale ((1 - mix) (x A) B + mix (x C) D).

    The first, `global`, is meant to be shared and the second, `local`, to be personal (Yang 2024, FedDPA). Names and
    initial values are those of `lora`: `global.dense_0.kernel.a`, `local.dense_0.kernel.a`.

    Departures from the paper: `mix` is one number; the paper computes one for each test sample, from the similarity of
    its features to those of the client's training samples.

    >>> import jax, personax as px
    >>> model = px.dual_lora(px.mlp((32,), 10), rank=4)
    >>> sorted(model.init(jax.random.key(0), jax.numpy.zeros((1, 64))))
    ['base', 'global', 'local']
    """
    require_positive("scale", scale)
    require(lambda v: (v > 0) & (v < 1), "mix", mix, "lie strictly between 0 and 1", "For one adapter, use `lora`.")
    return _adapted(model, _rank(rank), _patterns(on), (("global", float(scale * (1 - mix))), ("local", scale * mix)))


def _rank(given: int) -> int:
    require_count("rank", given)
    return int(given)


def _patterns(on: Patterns) -> tuple[str, ...]:
    patterns = as_patterns(on, "on")
    if not patterns:
        raise ValueError('`on` is empty. Name at least one kernel; the default is "*.kernel".')
    return patterns


@functools.cache
def _adapted(model: Model, rank: int, on: tuple[str, ...], adapters: tuple[tuple[str, float], ...]) -> Model:
    def init(key: Array, x: Array) -> Params:
        base_key, *keys = jax.random.split(key, 1 + len(adapters))
        base = model.init(base_key, x)
        leaves = by_name(base)
        layouts = _chosen(on, find_dense(_named(model.apply, base), leaves, x), leaves)
        starts = {
            name: _start(own_key, layouts, leaves, rank) for (name, _), own_key in zip(adapters, keys, strict=True)
        }
        return {BASE: base, **starts}

    def run(function: Callable[..., Any], params: Params, *given: Array) -> Any:
        base = params[BASE]
        found = [(_terms(params[name]), scale) for name, scale in adapters]
        terms = {name: tuple(Term(own[name].a * scale, own[name].b) for own, scale in found) for name in found[0][0]}
        return with_terms(_named(function, base), by_name(base), terms, *given)

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        return run(model.apply, params, x) if key is None else run(model.apply, params, x, key)

    if (train := model.train) is None:
        return Model(init, apply)

    def train_adapted(params: Params, x: Array, weight: Array, key: Array) -> tuple[Array, Params]:
        outputs, statistics = run(train, params, x, weight, key)
        return outputs, {**jax.tree.map(lambda _: None, params), BASE: statistics}

    return Model(init, apply, train_adapted)


def _named(function: Callable[..., Any], base: Params) -> Callable[..., Any]:
    """Convert a function of the base to a function of its leaves by name."""
    structure, names = jax.tree.structure(base), names_of(base)
    return lambda leaves, *given: function(jax.tree.unflatten(structure, [leaves[name] for name in names]), *given)


def _chosen(on: tuple[str, ...], layouts: Mapping[str, KernelAxes], leaves: Mapping[str, Any]) -> dict[str, KernelAxes]:
    """Select the dense kernels that match; each pattern must match at least one."""
    for pattern in on:
        if not any(selects(pattern.removeprefix("!"), name) for name in layouts):
            raise ValueError(
                f"No dense kernel matches {pattern!r} in `on`. Dense kernels: {', '.join(layouts) or 'none'}; "
                f"all parameters: {', '.join(leaves)}."
            )
    return {name: own for name, own in layouts.items() if selects(on, name)}


def _start(key: Array, layouts: Mapping[str, KernelAxes], leaves: Mapping[str, Array], rank: int) -> Params:
    """Initialize A at random and B at zero for each kernel, in a tree by the parts of its name."""
    tree: dict[str, Any] = {}
    keys = jax.random.split(key, len(layouts))
    for own_key, (name, layout) in zip(keys, layouts.items(), strict=True):
        kernel = leaves[name]
        shape_of_a, shape_of_b = layout.shapes(kernel.shape, rank)
        deviation = math.prod(kernel.shape[axis] for axis in layout.inputs) ** -0.5
        branch = tree
        for part in name.split("."):
            branch = branch.setdefault(part, {})
        branch["a"] = deviation * jax.random.normal(own_key, shape_of_a, kernel.dtype)
        branch["b"] = jnp.zeros(shape_of_b, kernel.dtype)
    return tree


def _terms(adapters: Params) -> dict[str, Term]:
    """Return the adapters by the names of their kernels."""
    leaves = by_name(adapters)
    return {
        name.removesuffix(".a"): Term(leaf, leaves[name[:-1] + "b"])
        for name, leaf in leaves.items()
        if name.endswith(".a")
    }
