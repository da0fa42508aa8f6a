"""A request from its parsed form to its last token: preparation, the machine's host, answers, timing.

The room knows `text/`, `http/`, `requests/` and `keys/`; not which API a request came by.
"""
