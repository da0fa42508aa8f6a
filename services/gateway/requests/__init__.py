"""What a client asked for: fields of a body, checked, and put in the engine's terms. Starts nothing."""
