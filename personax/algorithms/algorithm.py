"""An algorithm: one value on each axis."""

from dataclasses import fields
from typing import Any

import jax

from personax.client.local import Local
from personax.objectives import Objective
from personax.objectives.divided import Divided
from personax.objectives.objective import require_objective
from personax.server import Server, ServerState
from personax.sharing import Sharing
from personax.typing import Params
from personax.values import short_repr, to_dict, value
from personax.values.notebook import html_table, settings


@value
class Algorithm:
    """An objective, the local training that minimizes it, the server that applies updates, and the model's division.

    By default all parameters are shared.

    >>> import personax as px
    >>> algorithm = px.Algorithm(px.Meta(adapt_lr=0.1), px.Local(0.05, num_steps=5, batch_size=10), px.buffered(4))
    >>> algorithm.server.buffer_size
    4
    """

    objective: Objective
    local: Local
    server: Server
    sharing: Sharing = Sharing()

    def __post_init__(self) -> None:
        require_objective(self.objective)
        self.local.draws(self.objective)  # raises if the batch sizes do not fit the objective's batches

    @property
    def divided(self) -> Divided:
        """The objective over a whole model, as `sharing` divides it."""
        return Divided(self.objective, self.sharing)

    def require_model(self, params: Params) -> None:
        """Raise unless the model has the parameters that this algorithm names, and they can be used in this way."""
        if self.sharing.divides:
            self.divided.require_division(params)
        if self.local.phases:
            self.local.require_parts(self.sharing.trained(params))
            self.divided.require_phases(params)

    def default_scoring(self) -> dict[str, Any]:
        """Return the fields of `Scoring` by default. Tuning takes as many steps as a visit, of the same size."""
        scoring = self.divided.default_scoring()
        if not self.sharing.tuned:
            return scoring
        num_steps, lr = self.local.usual_steps()
        return {**scoring, "num_steps": num_steps, "lr": lr}

    def init_server(self, params: Params) -> ServerState:
        """Return the server's initial state, given a whole model."""
        extra = jax.eval_shape(self.divided.first_extra, params)
        return self.server.init(self.objective, self.sharing.shared(params), extra)

    def __repr__(self) -> str:
        """Show the constructor without defaults; `print` shows them too."""
        return short_repr(self)

    def __str__(self) -> str:
        return f"Algorithm({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in fields(self))})"

    def _repr_html_(self) -> str:
        return html_table("Algorithm", settings(to_dict(self)))
