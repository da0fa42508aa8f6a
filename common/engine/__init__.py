"""The engine: one step of the model after the other, in rooms from the device up to the worker's process."""
