"""A stage's processes: the job, its launch, watchdog, nodes, devices, and why one failed."""
