"""A soak: a pipeline of its own under mixed traffic for as long as wanted, its processes killed now and then.

`catalogue` holds the requests whose answers are known from a quiet run, `said` reads answers, `clients` send and
behave, `accounts` judges every request, `faults` breaks processes, `census` samples /proc, `slopes` fits memory,
`leftovers` compares the end with the start, `report` writes the result, `command` puts them together.
"""
