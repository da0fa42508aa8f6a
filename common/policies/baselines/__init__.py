"""The field's common ground: first come first served, continuous batching, paged allocation, P/D and colocation."""
