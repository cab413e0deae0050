"""`lt train watch RUN`: what a run does, in the terminal, from the files in its run directory.

`reading` follows the files and says in one value what is known; `showing` draws it with rich. The run knows nothing of
its watchers and may be on another machine, or long over.
"""
