"""Training on one client: steps, batches, optimizers and step sizes."""
