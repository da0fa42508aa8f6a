"""One process of the pipeline: started, forked from a template, asked whether it is ready, started again or given up.

The room knows the plan of a process and no other process; the supervisor has them all.
"""
