"""torch-xla on a Trainium node, as far as a rank's cores go; the node is the folder NEURON_NODE."""

import os
from pathlib import Path

from neuron_rules import configure, reserve_cores

configure(os.environ)
reserve_cores(os.environ, Path(os.environ["NEURON_NODE"]))
