"""The engine of this machine, measured. Modules that load torch are in `inside`."""
