"""`python -m lt_launch.agent`, and `python3 <out>/launch/agent` of the copy that is sent along with a job."""

import importlib
import os
import sys

if not __package__:  # run as a folder: make the folder a package of its own name
    sys.dont_write_bytecode = True  # many nodes share the folder
    _folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = os.path.dirname(_folder)
    __package__ = os.path.basename(_folder)

if __name__ == "__main__":
    sys.exit(importlib.import_module(".main", __package__).main(sys.argv[1:]))
