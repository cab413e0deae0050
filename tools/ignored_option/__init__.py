"""Folder for PYTHONPATH: an option planted as ignored."""
