"""What one decision of a policy costs, whatever is queued: pure policies on one core, no model, no processes."""
