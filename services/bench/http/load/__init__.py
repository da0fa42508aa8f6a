"""The load: clients, prompts and datasets, the connection to the server, a record of each request.

The room knows no report.
"""
