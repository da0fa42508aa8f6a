"""The load: clients and prompts, the connection to the server, a record of each request.

The room knows no report.
"""
