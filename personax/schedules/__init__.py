"""Schedules: tables, computed before a run, of which client reports when and which model it started from."""

from personax.schedules.arrivals import arrivals, uniform_arrivals
from personax.schedules.delays import Delays, persafl_delays
from personax.schedules.rounds import rounds
from personax.schedules.schedule import Schedule
from personax.schedules.timing import Timing
from personax.schedules.traces import DeviceDelays, Devices, VisitWork

__all__ = [
    "Delays",
    "DeviceDelays",
    "Devices",
    "Schedule",
    "Timing",
    "VisitWork",
    "arrivals",
    "persafl_delays",
    "rounds",
    "uniform_arrivals",
]
