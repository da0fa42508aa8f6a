"""The same pipeline on the nodes of a Ray cluster: `cohort serve --on ray`.

    serving ──▶ cluster (connects, looks at every node) ──▶ placement (who wants what, where) ──▶ actors
                                                                                                    │ of the supervisor
            node 1                        node 2                                                    ▼
    ┌────────────────────┐        ┌────────────────────┐      a placement group and an actor for each process:
    │ agent ─▶ gateway   │        │ agent ─▶ prefill-0 │      news, logs ─▶ console and log files, as on one machine
    │ agent ─▶ manager   │        │ agent ─▶ decode-0  │      addresses ─▶ every agent's run folder
    └────────────────────┘        └────────────────────┘

Ray finds nodes for the processes, starts their agents, and starts an agent anew on another node when its own is lost.
An agent (`agent.py`) is an actor that owns one process as the launcher owns its processes on one machine; the
supervisor begins it again. Everything between the processes is the pipeline's own: Ray sees no request.

Imported only when it is asked for; `ray` itself by `cluster` and `actors` alone, when they are called.
"""
