"""A pipeline of its own whose processes are broken on purpose under clients that compare: `cohort chaos`, and the soak.

`kill_table` breaks one kind of process after the other, `soak` all of them for as long as wanted. `catalogue` holds the
requests whose answers are known from a quiet run, `answer_content` reads answers, `users` send and behave, `accounts`
judges every request, `faults` breaks processes, `census` samples /proc, `report` writes the result, `command` puts them
together.
"""
