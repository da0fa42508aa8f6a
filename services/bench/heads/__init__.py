"""Heads that draft, trained for a model: texts that it answers, its states in them, and what goes on from these."""
