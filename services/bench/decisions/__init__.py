"""The time of one decision of a policy, at any length of queue: pure policies on one core, no model, no processes."""
