"""What all processes share: nouns, messages, configuration, policies, machines, transport and the engine."""
