"""One virtual cluster, which is the simulator and the fault tester: the live machines under virtual time.

    cluster.py   the clock, nodes, messages, KV on its way, kills: the machines' effects, performed
    plugins.py   what a host brings: engine, network, clients, and how its machines are made

`services/simulator` plugs in a cost model, link latencies and a trace; the fault tests plug in an engine of digests
that notices every wrong byte, a network that delays, loses, repeats and cuts, and clients that check every token.
"""
