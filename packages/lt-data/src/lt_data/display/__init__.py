"""Output for terminals and HTML reports."""
