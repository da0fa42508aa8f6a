"""API keys: who asks, what a key may use, what it has used. Above `http/`, below `generation/`."""
