"""Pre-run planning: memory by part, time, energy, and the nearest layout that fits.

Pure functions of the recipe and a device table; needs neither torch nor a device.
"""
