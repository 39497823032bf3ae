"""What the papers' theory says of one federation: measured, turned into limits and a configuration to start with."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version

from personax.experiment.build import build
from personax.experiment.config import Config
from personax.experiment.summaries import machine
from personax.experiment.suspicions import suspicions_of
from personax.inspection.advice import advise, limits_of
from personax.inspection.findings import INSPECTION, Inspection
from personax.inspection.measure import Effort, measure_federation

__all__ = ["INSPECTION", "Effort", "Inspection", "inspect_federation"]


def inspect_federation(
    config: Config, effort: Effort = Effort(), notify: Callable[[str], None] = lambda text: None
) -> Inspection:
    """Measure the federation of a resolved configuration, and what follows for its settings."""
    began, started = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    plan = build(config)
    measured = measure_federation(config, plan, effort, notify)
    return Inspection(
        schema_version=1,
        personax=version("personax"),
        name=config.name,
        started=started,
        seconds=time.perf_counter() - began,
        machine=machine(),
        federation=str(plan.federation),
        measured=measured,
        limits=limits_of(measured),
        advice=advise(config, measured),
        warnings=suspicions_of(plan),
    )
