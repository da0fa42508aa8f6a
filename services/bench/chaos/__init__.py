"""Processes of a pipeline killed one kind after the other under clients that compare: `cohort chaos`.

`clients` ask and compare, `strikes` kills or restarts, `report` holds the rows and writes the table, `command` is the
command line. What a soak has (the tiny model, the census of processes, the wait until all is whole) is the soak's.
"""
