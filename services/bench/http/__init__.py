"""`cohort bench` against a server: drives any OpenAI-style URL with a stated workload and reports what a client saw.

Pure: `workload`, `prompts`, `report`, `figures`.
Network: `target` (what serves there, and what it accepts), `client` (one request, and all of them on time).
Outside: `command` and `options` (command line), `measuring` (one run, of one server or of several in turn), `render`.
Nothing here knows Cohort's insides: a server is a URL.
"""
