"""API keys: who asks, what a key may use, what it has used.

The room knows `http/`; requests and their answers are not its business.
"""
