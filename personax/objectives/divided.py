"""An objective over a model that is divided into a shared, a personal and a frozen part."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from personax.objectives.objective import Objective, descend, first_extra
from personax.sharing import Sharing, join, names_of, only, statistics_at
from personax.typing import Batch, Extra, LossFn, Params, Personal, Scalar, Shared, StatisticsFn
from personax.values import value


class Own(NamedTuple):
    """The state of a client with a personal part of the model: that part, and the state of the objective."""

    part: Params
    state: Personal


def split(personal: Personal) -> tuple[Params, Personal]:
    """Return the personal part of the model (None if there is none) and the state of the objective."""
    return tuple(personal) if isinstance(personal, Own) else (None, personal)


def with_part(part: Params, state: Personal) -> Personal:
    """Return the client's state with a personal part, the inverse of `split`."""
    return state if part is None else Own(part, state)


@value
class Divided:
    """An objective on the trained part of a model; the personal part stays with its client.

    Its methods are those of `Objective` that depend on the client's state or models. `params` is always a whole model:
    the shared part, the frozen part, and the initial personal part, with which newcomers begin.
    """

    objective: Objective
    sharing: Sharing

    def init_personal(self, params: Params) -> Personal:
        """Return the state of a client before its first visit."""
        part = self.sharing.own(params) if self.sharing.personal else None
        return with_part(part, self.objective.init_personal(self.sharing.trained(params)))

    def init_shared(self, params: Params) -> Shared:
        """Return the state that is broadcast with the shared part."""
        return self.objective.init_shared(self.sharing.shared(params))

    def first_extra(self, params: Params) -> Extra:
        """Return an extra upload of the right shapes."""
        trained = self.sharing.trained(params)
        return first_extra(self.objective, trained, self.objective.init_personal(trained))

    def whole(self, params: Params, personal: Personal) -> Params:
        """Return the client's model: `params` with its own personal part."""
        return join(split(personal)[0], params)

    def models(self, params: Params, personal: Personal) -> dict[str, Params]:
        """Return the models that the client holds. If a part is personal, the shared part alone is not among them."""
        whole = self.whole(params, personal)
        found = self.objective.models(self.sharing.trained(whole), split(personal)[1])
        named = {name: join(model, whole) for name, model in found.items()}
        if not self.sharing.personal:
            return named
        shared = named.pop("global")
        return {"personal": shared, **named}

    def personalize(
        self,
        loss: LossFn,
        params: Params,
        personal: Personal,
        shared: Shared,
        batches: Batch,
        lr: Scalar,
        statistics: StatisticsFn | None = None,
    ) -> Params:
        """Compute the client's model from any shared part with fresh batches.

        The personal part takes a gradient step of size `lr` per batch while the shared part stays fixed. An objective
        with its own personal model (the adapted model of `Meta`, theta of `Moreau`) then computes it from there, on the
        same batches.
        """
        whole, of_whole = self.whole(params, personal), lambda part, batch: loss(join(part, whole), batch)
        if self.sharing.personal:
            own = only(whole, self.sharing.personal)
            part = descend(of_whole, own, batches, lr, statistics_at(statistics, whole))[0]
            whole = join(part, whole)
            if self.objective.is_at_iterate:  # its model is the iterate itself
                return whole
        trained, of_trained = self.sharing.trained(whole), lambda part, batch: loss(join(part, whole), batch)
        others = () if statistics is None else (statistics_at(statistics, whole),)
        made = self.objective.personalize(of_trained, trained, split(personal)[1], shared, batches, lr, *others)
        return join(made, whole)

    def default_scoring(self) -> dict[str, Any]:
        """Score the objective's model, or the client's own model if a part of it is personal or tuned."""
        scoring = self.objective.default_scoring()
        if self.sharing.tuned:
            return {"model": "adapted"}
        return {"model": "personal"} if self.sharing.personal and scoring["model"] == "global" else scoring

    def newcomer_model(self, scored: str) -> str | None:
        """Let a newcomer first train the personal or tuned part from the common initial values."""
        made = self.objective.newcomer_model(scored)
        if not self.sharing.is_completed_by_clients:
            return made
        able = made or self.objective.newcomer_model("adapted")
        return able and ("recomputed" if self.sharing.personal else "adapted")

    def require_division(self, params: Params) -> None:
        """Raise an error with the reason if this objective does not support this division of the model."""
        self.sharing.require_division(params)
        personal = names_of(self.sharing.own(params))
        if not personal:
            return
        listed, shapes = ", ".join(personal), self.sharing.trained(jax.eval_shape(lambda w: w, params))
        objective = self.objective
        if depends_on(self.uploads, shapes, self.sharing.own(shapes)):
            raise ValueError(
                f"{objective} uploads values for every trained parameter, including the personal {listed}, which must "
                "not leave its client. Share these parameters, or use another objective."
            )
        if objective.kept_model == "trained" and depends_on(objective.init_personal, shapes, self.sharing.own(shapes)):
            raise ValueError(
                f"{objective} already keeps a personal copy of every parameter, so a personal {listed} would be a "
                "second one. Leave out `sharing.personal`, or use another objective."
            )

    def require_phases(self, params: Params) -> None:
        """Raise an error with the reason if this objective does not support phases that train parts of the model."""
        trained = self.sharing.trained(jax.eval_shape(lambda w: w, params))
        if depends_on(self.uploads, trained, trained):
            raise ValueError(
                f"{self.objective} uploads values for every parameter and requires that each step trains all of them. "
                "Leave out `phases`, or use another objective."
            )
        if depends_on(self.memory, trained, trained):
            raise ValueError(
                f"{self.objective} updates values for every parameter at each step, including those that a phase does "
                "not train. Leave out `phases`, or use another objective."
            )

    def memory(self, trained: Params) -> Any:
        """Return what the steps of a visit update beside the iterate, for its shapes."""
        return self.objective.begin(trained, self.objective.init_personal(trained))[1]

    def uploads(self, trained: Params) -> tuple[Shared, Extra]:
        """Return the initial shared state and an extra upload, which are sent besides the model and its delta."""
        own = self.objective.init_personal(trained)
        return self.objective.init_shared(trained), first_extra(self.objective, trained, own)


def depends_on(of_params: Callable[[Params], Any], shapes: Params, part: Params) -> bool:
    """Return True if the shapes of a function's result change with the shapes of a part of the parameters."""
    larger = lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype)
    grown = join(jax.tree.map(larger, part), shapes)
    of = lambda params: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(jax.eval_shape(of_params, params))]
    return of(shapes) != of(grown)
