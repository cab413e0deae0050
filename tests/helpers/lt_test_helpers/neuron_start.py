"""What a run needs to start on a Trainium node that has none: a recipe, and a stand-in for torch-xla and the runtime.

With `START` on PYTHONPATH each rank writes its number into a file of its NeuronCore below NEURON_NODE, and ends.
"""

from pathlib import Path

START = Path(__file__).parents[3] / "packages" / "lt-trainer-neuron" / "tests" / "neuron_start"


def recipe(out: str | Path, nodes: int) -> str:
    """A recipe for two NeuronCores on each of some nodes."""
    return f"""
[run]
engine = "neuron"
dir = "{out}"
[model]
preset = "llama2-7b"
vocab_size = 32000
[data]
synthetic = true
document_mask = false
seq_len = 4096
[batch]
global_batch_size = 4
micro_batch_size = 1
[parallel]
tp = 2
n_nodes = {nodes}
[engine.neuron]
num_neuroncores = 2
"""
