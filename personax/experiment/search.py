"""The search of `--tune`: ranges of a recipe's numbers, their combinations, and extensions."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np

from personax.evaluation.scoring import Scoring
from personax.experiment.build import implies_scores, recipe_table
from personax.experiment.config import AlgorithmSection, TuneSection
from personax.keys import HostStream, host_generator
from personax.typing import Array
from personax.values import RECIPES, Axis, axis_of, options_of, tuned_as

FACTOR = 3  # between neighboring values of a number, or between the odds of a share
SHARES = (0.25, 0.5, 0.75)
SCORES = "scores"
ADAPTATION = tuple(f"{SCORES}.{number}" for number in ("num_steps", "lr", "batch_size"))  # of the first score
ADAPTED = ("adapted", "recomputed")
_SCORING = {field.name: field.default for field in dataclasses.fields(Scoring)}
Options = dict[str, Any]  # by dotted names
Kind = Literal["scale", "share"]


class Range(NamedTuple):
    """The values to try for one option, and the kind of extension; values listed by the user have no `kind`."""

    values: tuple[Any, ...]
    kind: Kind | None = None

    def edge(self, item: Any) -> Literal["smallest", "largest"] | None:
        """Return the end of the range at which `item` is, if the range could be extended there.

        >>> Range((0.1, 0.3)).edge(0.3), Range((0.0, 0.5), "share").edge(0.0)
        ('largest', None)
        """
        if not all(map(_is_number, self.values)) or (self.kind == "share" and item in (0, 1)):
            return None
        low, high = min(self.values), max(self.values)
        return None if low == high else "largest" if item == high else "smallest" if item == low else None

    def beyond(self, item: Any) -> float | None:
        """Return the next value beyond one at an edge; None elsewhere, and for values listed by the user.

        >>> Range((0.1, 0.3), "scale").beyond(0.3), Range((0.25, 0.5), "share").beyond(0.25)
        (0.9, 0.1)
        """
        edge = self.edge(item) if self.kind else None
        if edge is None:
            return None
        factor = FACTOR if edge == "largest" else 1 / FACTOR
        return _scaled(item, factor) if self.kind == "scale" else _with_odds(item, factor)


class OptionSearch(NamedTuple):
    """The ranges of an algorithm's options, and the initial combinations."""

    ranges: dict[str, Range]
    how: Literal["grid", "random"]
    choices: list[Options]

    @property
    def num_combinations(self) -> int:
        """Return the number of combinations of all values, of which a random search tries a part."""
        return math.prod(len(one.values) for one in self.ranges.values()) if self.ranges else 0

    @property
    def smallest(self) -> Options:
        """Return the smallest value of each numeric range, and the first value of others."""
        least = lambda values: min(values) if all(map(_is_number, values)) else values[0]
        return {name: least(one.values) for name, one in self.ranges.items()}

    def extended(self, best: Options) -> "OptionSearch":
        """Extend the ranges whose best value is at an edge; `choices` combine the new values with the best ones."""
        new = {name: one.beyond(best[name]) for name, one in self.ranges.items()}
        values = {name: [best[name], *([] if new[name] is None else [new[name]])] for name in new}
        ranges = {
            name: one if new[name] is None else Range((*one.values, new[name]), one.kind)
            for name, one in self.ranges.items()
        }
        return OptionSearch(ranges, self.how, _combinations(values)[1:])


def search_of(section: TuneSection, name: str, entry: AlgorithmSection, key: Array) -> OptionSearch:
    """Return the search for an algorithm's options: the lists of `[tune]`, or values around the recipe's own."""
    if section.options:
        ranges = {
            option: Range(tuple(values))
            for option, values in section.options.items()
            if has_option(name, entry, option)
        }
        own = None
    else:
        found = dict(_tuned_in(RECIPES, {**recipe_table(name, entry), **entry.options}, f"algorithms.{name}"))
        ranges = {option: _around(number, kind) for option, (kind, number) in found.items()}
        own = {option: number for option, (_, number) in found.items()}
    search = OptionSearch(ranges, "grid", [])
    is_random = section.search == "random" or (
        section.search == "auto" and search.num_combinations > section.num_trials
    )
    if not is_random:
        choices = _combinations({option: one.values for option, one in ranges.items()})
        return search._replace(choices=_first(own, choices))
    drawn = _draw(ranges, section.num_trials, key)
    return search._replace(how="random", choices=_first(own, drawn, section.num_trials))


def values_of(entry: AlgorithmSection, name: str, options: Sequence[str]) -> Options:
    """Return the values of an entry's options by dotted names, without those that have no value or default."""
    parameters = RECIPES.parameters(recipe_table(name, entry), f"algorithms.{name}")
    given = {key: one.default for key, one in parameters.items() if one.default is not one.empty} | entry.options
    table = {**given, SCORES: {**_SCORING, **first_score(entry)}}
    found: Options = {}
    for option in options:
        item: Any = table
        for part in option.split("."):
            item = item.get(part) if isinstance(item, Mapping) else None
        if item is not None:
            found[option] = item
    return found


def first_score(entry: AlgorithmSection) -> dict[str, Any]:
    """Return the table of the score by which an algorithm is tuned."""
    return next(iter(entry.scores.values()), {})


def has_option(name: str, entry: AlgorithmSection, option: str) -> bool:
    """Return True if a recipe accepts an option, whose dotted name may refer to a nested table.

    `scores.lr` and the other numbers of an adaptation are options of algorithms with explicit scores: a default score
    uses the steps of the recipe.
    """
    if option in ADAPTATION:
        model = first_score(entry).get("model", Scoring.model)
        return model in ADAPTED and not implies_scores(name, entry)
    axis, table, where = RECIPES, {**recipe_table(name, entry), **entry.options}, f"algorithms.{name}"
    *outer, last = option.split(".")
    for part in outer:
        parameter, table = axis.parameters(table, where).get(part), table.get(part)
        inner = None if parameter is None else axis_of(parameter.annotation)
        if inner is None or not isinstance(table, Mapping):
            return False
        axis = inner
    return last in axis.parameters(table, where)


def put(table: Mapping[str, Any], option: str, item: Any) -> dict[str, Any]:
    """Return nested tables with a new value at a dotted name.

    >>> put({"lr": 0.1, "objective": {"strength": 1.0}}, "objective.strength", 2.0)
    {'lr': 0.1, 'objective': {'strength': 2.0}}
    """
    first, _, rest = option.partition(".")
    return {**table, first: put(table[first], rest, item) if rest else item}


def _tuned_in(
    axis: Axis, table: Mapping[str, Any], where: str, before: str = ""
) -> Iterator[tuple[str, tuple[Kind, Any]]]:
    """Yield the numbers of nested tables whose parameters are `Tuned` or `TunedShare`."""
    given = options_of(table)
    for name, parameter in axis.parameters(table, where).items():
        own: Any = given.get(name, parameter.default)
        inner, kind = axis_of(parameter.annotation), tuned_as(parameter.annotation)
        if isinstance(own, Mapping) and inner is not None:
            yield from _tuned_in(inner, own, f"{where}.{name}", f"{before}{name}.")
        elif kind is not None and _is_number(own) and (own > 0 or kind == "share"):
            yield before + name, (kind, own)


def _around(own: float, kind: Kind) -> Range:
    """Return the values to try for a number of a recipe."""
    others = SHARES if kind == "share" else (_scaled(own, 1 / FACTOR), _scaled(own, FACTOR))
    return Range(tuple(sorted({own, *others})), kind)


def _scaled(number: float, factor: float) -> float:
    return float(f"{number * factor:.3g}")


def _with_odds(share: float, factor: float) -> float:
    odds = factor * share / (1 - share)
    return float(f"{odds / (1 + odds):.3g}")


def _combinations(values: Mapping[str, Sequence[Any]]) -> list[Options]:
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())] if values else []


def _draw(ranges: dict[str, Range], num: int, key: Array) -> list[Options]:
    """Draw different combinations at random, or all of them if there are at most `num`."""
    sizes = [len(one.values) for one in ranges.values()]
    total = math.prod(sizes) if sizes else 0
    drawn = host_generator(key, HostStream.TRIALS).choice(total, min(num, total), replace=False) if total else []
    places = (np.unravel_index(number, sizes) for number in drawn)
    return [{name: one.values[at] for (name, one), at in zip(ranges.items(), chosen, strict=True)} for chosen in places]


def _first(own: Options | None, choices: list[Options], num: int | None = None) -> list[Options]:
    """Put the algorithm's own options first, so that they win ties."""
    return choices if own is None or not own else [own, *(one for one in choices if one != own)][:num]


def _is_number(item: Any) -> TypeGuard[float]:
    return isinstance(item, int | float) and not isinstance(item, bool)
