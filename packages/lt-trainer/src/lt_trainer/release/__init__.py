"""Open release of a run: make, verify and reproduce it."""
