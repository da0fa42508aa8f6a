"""The global monitor: who is alive, how are they, how much is coming.

    every process ── Heartbeat, Farewell ──▶ service.py ──▶ aggregate.py (state) ── ClusterFigures ──▶ manager
                                                                │
               person, Prometheus ◀── server.py ◀── page.py, exporter.py (federation.py)

Serving never depends on it: when it is gone, everybody goes on with the last figures.
"""
