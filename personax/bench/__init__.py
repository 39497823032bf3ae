"""The benchmarks of `personax bench`: the speed of a round, compared with the machine's limits and with peers."""
