"""Run directory: files, records, environment of a run."""
