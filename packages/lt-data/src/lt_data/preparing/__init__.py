"""Documents to a token store, by one or several processes or machines, so that a kill at any moment loses nothing."""
