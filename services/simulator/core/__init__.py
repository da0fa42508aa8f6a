"""One simulation: a cluster under virtual time, its clients and traffic, and the report of the run.

The room knows `hardware/`; no comparison and no figure.
"""
