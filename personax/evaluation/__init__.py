"""Evaluation: scoring each client's model on that client's data."""
