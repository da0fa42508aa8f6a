"""The bucketing manager as a pure state machine: which workers live, which requests wait, where each attempt runs.

It knows policies, messages and the ground that all machines share; neither the worker's room nor the gateway's.
"""
