"""What a run will need before it is started: memory by part, time, energy, and what to change where it does not fit.

Pure functions of the recipe and of a table of devices; neither torch nor a device is needed.
"""
