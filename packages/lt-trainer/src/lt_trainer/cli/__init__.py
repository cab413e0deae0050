"""Commands of `lt train`."""
