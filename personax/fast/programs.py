"""Evaluate traced programs, completely or in part."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

Values = list[Any]
Emit = Callable[[Any, Values], Values]  # computes the results of an equation from its operands
INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}


def inlined(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Inline all calls of `jit` in a program."""
    return retraced(closed, _inline)


def retraced(closed: core.ClosedJaxpr, emit: Emit) -> core.ClosedJaxpr:
    """Trace the evaluation of a program as a new program."""
    shape = lambda aval: jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
    shapes = [shape(variable.aval) for variable in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *values: run_program(closed, values, emit))(*shapes)


def run_program(closed: core.ClosedJaxpr, args: Sequence[Any], emit: Emit) -> Values:
    """Compute the outputs of a program."""
    known = dict(zip(closed.jaxpr.invars, args, strict=True))
    return evaluate(closed, known, closed.jaxpr.outvars, emit)


def evaluate(closed: core.ClosedJaxpr, known: Mapping[Any, Any], wanted: Sequence[Any], emit: Emit) -> Values:
    """Compute some variables of a program from others, evaluating only what is needed."""
    values = {**dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)), **known}
    is_unknown = lambda atom: not isinstance(atom, core.Literal) and atom not in values
    needed, between = set(filter(is_unknown, wanted)), []
    for equation in reversed(closed.jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            between.append(equation)
            needed.update(filter(is_unknown, equation.invars))
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]
    for equation in reversed(between):
        results = emit(equation, [read(atom) for atom in equation.invars])
        for variable, result in zip(equation.outvars, results, strict=True):
            values.setdefault(variable, result)
    return [read(atom) for atom in wanted]


def bind(equation: Any, values: Values) -> Values:
    """Compute the results of an equation unchanged."""
    given = {atom: own for atom, own in zip(equation.invars, values, strict=True) if not isinstance(atom, core.Literal)}
    names = core.DebugInfo("rewrite", equation.primitive.name, None, None)
    alone = core.Jaxpr((), list(given), equation.outvars, [equation], equation.effects, names)
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*given.values())


def _inline(equation: Any, values: Values) -> Values:
    inner = equation.params.get(INLINED.get(equation.primitive.name, ""))
    return bind(equation, values) if inner is None else run_program(inner, values, _inline)
