"""Client data: federations, partitions and data sets."""
