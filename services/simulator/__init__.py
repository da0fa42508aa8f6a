"""The simulator: the machines and policies of the live services under virtual time, a cost model for the engine."""
