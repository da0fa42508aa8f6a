"""The API keys' file, what keys have used, and files that only their owner may read.

The room knows errors alone; who may do what is decided in the gateway.
"""
