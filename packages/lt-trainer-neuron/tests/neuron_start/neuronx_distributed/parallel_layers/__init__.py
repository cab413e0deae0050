"""What tells NxD from a placeholder."""
