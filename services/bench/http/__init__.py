"""`cohort bench` against a server: drives any OpenAI-style URL with a stated workload and reports what a client saw.

Pure: `workload`, `prompts`, `sse`, `report`, `figures`, `capacity`.
Network: `target` (what serves there, and what it accepts), `client` (one request), `driver` (all of them).
Outside: `arguments` and `options` (command line), `harness` (one measurement), `modes/` (single, compare, sweep,
capacity), `render`, `plots`, `export`. Nothing here knows Cohort's insides: a server is a URL.
"""
