"""The part that loads torch: a worker process with an engine that costs nothing."""
