"""HTTP that several processes serve: the server, static pages, listeners, TLS, ports, who may ask.

The room knows the configuration and errors; no endpoint.
"""
