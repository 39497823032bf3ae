"""The workloads of `personax bench`: how fast a round is, how near the machine's limit, how far from its peers."""
