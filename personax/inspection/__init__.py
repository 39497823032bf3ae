"""Inspection of a federation: measured constants, the limits that theory derives from them, and advice."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version

from personax.experiment.build import build
from personax.experiment.config import Config
from personax.experiment.summaries import machine
from personax.experiment.suspicions import suspicions_of
from personax.inspection.advice import limits_of
from personax.inspection.findings import INSPECTION, Inspection
from personax.inspection.measure import Effort, measure_federation
from personax.inspection.validation import Setting, check, standardized, validated

__all__ = ["INSPECTION", "Effort", "Inspection", "inspect_federation"]


def inspect_federation(
    config: Config, effort: Effort = Effort(), notify: Callable[[str], None] = lambda text: None
) -> Inspection:
    """Measure the federation of a resolved configuration and derive limits and advice for its settings."""
    began, started = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    plan = build(config)
    given = Setting(config, plan)
    check(given)
    scaled = standardized(given)
    measured = measure_federation(*scaled, effort, notify)
    limits = limits_of(measured)
    return Inspection(
        schema_version=1,
        personax=version("personax"),
        name=config.name,
        started=started,
        seconds=time.perf_counter() - began,
        machine=machine(),
        federation=str(plan.federation),
        measured=measured,
        limits=[limit for limit in limits if not limit.problem],
        advice=validated(given, scaled, measured, notify),
        unusable=[
            f"{one.source} gives no usable limit for `{one.setting}`: {one.problem}." for one in limits if one.problem
        ],
        warnings=suspicions_of(plan),
    )
