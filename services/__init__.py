"""One folder a process, and the tools: `cli`, `launcher`, `bench`, `simulator`."""
