"""Clients' data: federations, partitions and data sets."""
