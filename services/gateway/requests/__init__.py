"""What a client asked for: fields of a body, checked, and put in the engine's terms.

The room knows `text/` and `http/`; it starts nothing.
"""
