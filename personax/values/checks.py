"""Checks whose errors state the requirement, the given value and the remedy."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


class ConfigError(ValueError):
    """A configuration that cannot be run. The message states the problem and the remedy.

    >>> import personax as px
    >>> issubclass(px.values.ConfigError, ValueError)
    True
    """


def check_names(where: str, given: Iterable[str], known: Iterable[str], what: str = "setting") -> None:
    """Raise for an unknown name, and suggest the most similar known one.

    >>> import personax as px
    >>> px.values.check_names("model", ["width"], ["widths"])
    Traceback (most recent call last):
        ...
    personax.values.checks.ConfigError: `model` has no setting `width`. Did you mean `widths`? There are: widths.
    """
    known = set(known)
    for name in given:
        if name not in known:
            raise ConfigError(unknown_name(where, name, known, what))


def unknown_name(where: str, name: str, known: Iterable[str], what: str = "setting") -> str:
    """The message about an unknown name, with the most similar known one.

    >>> import personax as px
    >>> px.values.unknown_name("model", "width", ["widths", "activation"])
    '`model` has no setting `width`. Did you mean `widths`? There are: activation, widths.'
    """
    known = sorted(known)
    listed = f"There are: {', '.join(known)}." if known else "There are none."
    return f"`{where}` has no {what} `{name}`.{did_you_mean(name, known)} {listed}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A space and a question that suggests the most similar known name, ignoring case; "" if none is similar.

    >>> did_you_mean("MNST", ["mnist", "cifar10"])
    ' Did you mean `mnist`?'
    """
    by_lower = {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1, 0.5)
    return f" Did you mean `{by_lower[near[0]]}`?" if near else ""


def require(
    condition: Callable[[Any], Any],
    name: str,
    given: Any,
    must: str,
    hint: str = "",
    *,
    error: type[ValueError] = ValueError,
) -> None:
    """Raise an `error` that states the requirement, the given value and the remedy, unless `condition` holds.

    `given` may be an array of swept numbers; the condition must hold for all of them.

    >>> import personax as px
    >>> px.values.require(lambda v: v % 2 == 0, "num_folds", 3, "be even")
    Traceback (most recent call last):
        ...
    ValueError: `num_folds` must be even, got 3.
    """
    if given is None:
        return
    try:
        holds = bool(np.all(condition(np.asarray(given))))
    except TypeError:  # not a number
        holds = False
    if not holds:
        raise error(" ".join(filter(None, [f"`{name}` must {must}, got {given}.", hint])))


def require_positive(name: str, given: Any, hint: str = "") -> None:
    """Require a finite number above zero; `None` stands for a missing option.

    >>> import personax as px
    >>> px.values.require_positive("lr", -0.1)
    Traceback (most recent call last):
        ...
    ValueError: `lr` must be positive, got -0.1.
    """
    require(lambda v: np.isfinite(v) & (v > 0), name, given, "be positive", hint)


def require_nonnegative(name: str, given: Any, hint: str = "") -> None:
    """Require a finite number of at least zero; `None` stands for a missing option.

    >>> import personax as px
    >>> px.values.require_nonnegative("strength", -1.0)
    Traceback (most recent call last):
        ...
    ValueError: `strength` must not be negative, got -1.0.
    """
    require(lambda v: np.isfinite(v) & (v >= 0), name, given, "not be negative", hint)


def require_count(name: str, given: Any, least: int = 1, hint: str = "") -> None:
    """Require a whole number of at least `least`; `None` stands for a missing option.

    >>> import personax as px
    >>> px.values.require_count("num_steps", 2.5)
    Traceback (most recent call last):
        ...
    ValueError: `num_steps` must be a whole number of at least 1, got 2.5.
    """
    whole = lambda v: np.issubdtype(v.dtype, np.integer) & (v >= least)
    require(whole, name, given, f"be a whole number of at least {least}", hint)


def require_one_of(name: str, given: Any, options: tuple[str, ...]) -> None:
    """Require one of the named options.

    >>> import personax as px
    >>> px.values.require_one_of("clock", "steps", ("step", "round"))
    Traceback (most recent call last):
        ...
    ValueError: `clock` must be one of 'step', 'round', got 'steps'. Did you mean `step`?
    """
    if given not in options:
        hint = did_you_mean(str(given), options)
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, options))}, got {given!r}.{hint}")
