"""`lt train watch RUN`: live terminal view of a run from the files in its run directory.

`follower` follows the files and returns a view; `terminal` renders it with rich. The run may be on another machine, or
have ended.
"""
