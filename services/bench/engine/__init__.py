"""The engine of this machine, measured. What loads torch is in `inside`."""
