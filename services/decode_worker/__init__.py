"""The decode worker: one role of the engine, as a process of its own."""
