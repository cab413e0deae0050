"""`lt train tune`: the fastest settings of a recipe on this machine, from short probes."""
