"""Uploaded files and batch jobs: the store, the runner, the endpoints. An API answers their lines."""
