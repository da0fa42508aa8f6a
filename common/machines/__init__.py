"""Pure state machines: messages and results in, effects out.

They hold what a process knows and speak its protocols; their hosts (live services, the simulator, tests) move bytes,
run forwards and pass the time. No asyncio, no clock, no sockets, no tensors.
"""
