"""Schedules: tables, computed before a run, of which client reports when and which model it started from."""

from personax.schedules.arrivals import arrivals, uniform_arrivals
from personax.schedules.delays import Delays, persafl_delays
from personax.schedules.rounds import rounds
from personax.schedules.schedule import Schedule

__all__ = ["Delays", "Schedule", "arrivals", "persafl_delays", "rounds", "uniform_arrivals"]
