"""The bucketing manager as a pure state machine: which workers live, which requests wait, where each attempt runs."""
