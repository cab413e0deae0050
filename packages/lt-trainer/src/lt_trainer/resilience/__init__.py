"""Watchdog, heartbeats, stop signals and rank synchronization."""
