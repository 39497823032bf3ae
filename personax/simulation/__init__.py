"""Simulation of a whole federation in one process."""
