"""What a load's records say: the report, its tables and files.

The room knows `load/` for the records.
"""
