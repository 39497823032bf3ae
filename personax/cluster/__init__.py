"""Studies on a cluster: jobs, and the engines (submitit, Ray) that run them. Runs on several hosts."""
