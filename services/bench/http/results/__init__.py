"""What a load's records say: the report, its tables and its file.

The room knows `load/` for the records.
"""
