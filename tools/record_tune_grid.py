"""Measure every setting that `lt train tune` could try on a small model, for the tests of its search.

    python tools/record_tune_grid.py --out packages/lt-trainer/tests/data/tune_grid_cpu.json

Each setting is a probe of the command itself; the fastest of `--repeats` is kept. Cost: about ten seconds a probe.
"""

import argparse
import json
import tempfile
from pathlib import Path

from lt_trainer.tuning import CHECKPOINTING_MODES, ProbeCommand, TunedSetting

RECIPE = """
[data]
synthetic = true
seq_len = 64

[model]
vocab_size = 512
hidden_size = 128
intermediate_size = 256
n_heads = 4
n_kv_heads = 2
n_layers = 2

[batch]
global_batch_size = 16
micro_batch_size = 1

[engine.gpu]
device = "cpu"
"""


def main() -> None:
    """Parse the command line and record the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(RECIPE, encoding="utf-8")
        command = ProbeCommand(arguments=[str(path), "--steps", "4", "--warmup", "2"])
        probes = []
        for mode in CHECKPOINTING_MODES:
            for size in (1, 2, 4, 8, 16):
                setting = TunedSetting(micro_batch_size=size, activation_checkpointing=mode, compile="auto")
                tried = [command.run(setting) for _ in range(options.repeats)]
                best = min(tried, key=lambda result: result.step_s or float("inf"))
                print(setting, best.outcome, best.step_s, flush=True)
                probes.append(best.to_dict())
    options.out.write_text(json.dumps({"recipe": RECIPE, "probes": probes}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
