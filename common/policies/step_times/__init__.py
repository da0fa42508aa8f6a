"""What an iteration takes on a machine, learned from every one that ran; shared by the systems.

step_cost       the time of an iteration in closed form, and how much prefill fits a time
step_fit        the constants from measured iterations
profile_table   measured iterations by composition, and what follows from them for any other (D5)
lateness        how late iterations come, beside what was estimated (D5)
learned_times   table and lateness as one state that outlives the process
reported_times  the constants of a worker as its reports have them
"""
