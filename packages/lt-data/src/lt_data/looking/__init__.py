"""What is in a store, a pack or a step of a run, in numbers and values."""
