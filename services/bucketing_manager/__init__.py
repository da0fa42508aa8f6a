"""The bucketing manager: the control plane."""
