"""The API keys' file, the usage of keys, and files that only their owner may read. The gateway decides on requests."""
