"""Faster programs with the same results."""
