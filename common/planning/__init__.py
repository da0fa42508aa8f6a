"""Which workers suit the traffic of the last minutes: decided by replaying it, and learned from what then happened.

shape     how many workers of which role and degree; what may come next
traffic   the lengths and times that gateways tell, and whether a request was served in time
foresight what a simulation is asked and what it answers
machine   when to simulate, when to change, when to undo; what simulations may cost

Pure: the global monitor hosts it live, the simulator under virtual time.
"""
