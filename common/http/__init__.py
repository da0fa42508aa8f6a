"""HTTP that several processes serve: the server, static pages, listeners, TLS, ports, who may ask. No endpoint."""
