"""Tokens that may follow a sequence, guessed without its model: what speculative decoding verifies."""
