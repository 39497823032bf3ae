"""Evaluation of each client's model on that client's data."""
