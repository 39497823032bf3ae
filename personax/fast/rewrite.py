"""Rewrite a traced program with faster forms of operations that are slow inside `scan` and `vmap`.

Convolutions become the matrix products of `fast.convolution`, and window pooling its fast form. Everything else is
emitted unchanged, including random bits, derivative rules and control flow.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core

from personax.fast.convolution import convolution, pooling
from personax.fast.loops import find_loop_products, scan_products
from personax.fast.programs import INLINED, Values, bind, retraced, run_program
from personax.fast.sums import is_two_sums, sum_in_two


class Rule(NamedTuple):
    """A rule that computes the results of an equation, or returns `NotImplemented` to leave it unchanged."""

    emit: Callable[[Any, Values], Any]
    applies: Callable[[Any], bool] = lambda equation: True


def _alone(function: Callable[..., Any], **options: Callable[[Any], bool]) -> Rule:
    """Make a rule for an equation with one result from a function of its operands and parameters."""

    def emit(equation: Any, values: Values) -> Any:
        result = function(*values, **equation.params)
        return result if result is NotImplemented else [result]

    return Rule(emit, **options)


RULES = {
    "conv_general_dilated": _alone(convolution),
    "reduce_window_max": _alone(functools.partial(pooling, "max")),
    "reduce_window_sum": _alone(functools.partial(pooling, "sum")),
    "reduce_sum": _alone(sum_in_two, applies=is_two_sums),
    "scan": Rule(scan_products, lambda equation: find_loop_products(equation) is not None),
}
# Calls that keep their own derivative rule, and the parameters whose programs are rewritten.
CALLS = {
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}


def rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    """Rewrite a function of arrays; it runs unchanged if there is nothing to rewrite."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        if not has_rule(closed.jaxpr):
            return function(*args)
        outputs = run_program(closed, jax.tree.leaves(args), _Rewriter())
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return run


def count_rewrites(function: Callable[..., Any], *args: Any) -> Counter[str]:
    """Count the equations of each primitive that are rewritten."""
    closed, rewriter = jax.make_jaxpr(function)(*args), _Rewriter()
    jax.eval_shape(lambda leaves: run_program(closed, leaves, rewriter), jax.tree.leaves(args))
    return rewriter.counts


def has_rule(jaxpr: Any) -> bool:
    """Return True if a rule applies anywhere in a program, including nested programs."""
    return any(_applies(equation) or _has_rule_inside(equation) for equation in jaxpr.eqns)


def _applies(equation: Any) -> bool:
    name = equation.primitive.name
    return name in RULES and RULES[name].applies(equation)


def _has_rule_inside(equation: Any) -> bool:
    return any(map(has_rule, core.jaxprs_in_params(equation.params)))


class _Rewriter:
    """An emitter of equations that applies the rules and counts the rewrites."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, equation: Any, values: Values) -> Values:
        name, params = equation.primitive.name, equation.params
        if _has_rule_inside(equation):
            if name in INLINED:
                return run_program(params[INLINED[name]], values, self)
            inside = {key: self._rewrite(params[key]) for key in CALLS.get(name, ())}
            equation = equation.replace(params=params | inside)
        results = RULES[name].emit(equation, values) if _applies(equation) else NotImplemented
        if results is NotImplemented:
            return bind(equation, values)
        self.counts[name] += 1
        return results

    def _rewrite(self, given: Any) -> Any:
        """Rewrite a program or a tuple of programs, keeping its type."""
        if isinstance(given, tuple):
            return tuple(map(self._rewrite, given))
        closed = given if isinstance(given, core.ClosedJaxpr) else core.ClosedJaxpr(given, ())
        new = retraced(closed, self)
        if closed is given:
            return new
        return given if new.consts else new.jaxpr  # an open jaxpr cannot hold constants
