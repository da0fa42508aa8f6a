"""What a load's records say: the report, its tables, plots and files.

The room knows `load/` for the records.
"""
