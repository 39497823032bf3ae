"""Studies on a cluster: the jobs of a run folder, and the engines (submitit, Ray) that run them."""
