"""The global monitor: which processes live, how they are, how much is coming.

    every process ── Heartbeat, Farewell ──▶ service.py ──▶ aggregate.py (state) ── ClusterStats ──▶ manager
                                                                │
               person, Prometheus ◀── server.py ◀── page.py, exporter.py (federation.py)

Serving never depends on it: when it is gone, the other processes continue with the last stats.
"""
