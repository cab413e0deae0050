"""Runs from a recipe with transformers' models: resumed on two ranks, exported, read by transformers, continued.

The first loss of a run that begins with the export is transformers' own, in float64.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_models import CASES, NoFloat32, make_config, make_model

from lt_ckpt import list_steps
from lt_ckpt.formats import ConvertOptions, convert_checkpoint, open_source
from lt_model.families import FAMILIES
from lt_test_helpers.family_runs import family_recipe, first_loss
from lt_test_helpers.runs import losses, run_recipe

SEQ_LEN, VOCAB = 64, 102
LAYOUTS = {"sp": ("parallel.tp=2", "parallel.sequence_parallel=true"), "pp": ("parallel.pp=2",)}
DENSE = [name for name, (family, _) in CASES.items() if "n_experts" not in FAMILIES[family].keys]
LISTED = [("gemma3_text", "sp"), ("qwen3, yarn, head 12", "pp")]
REST = [(name, layout) for name in DENSE for layout in LAYOUTS if (name, layout) not in LISTED]


def cores(ranks: int) -> str:
    return f"engine.neuron.num_neuroncores={ranks}"


def recipe_of(model: Path, out: Path) -> dict[str, Any]:
    return family_recipe({"init_from": str(model)}, out, SEQ_LEN, neuron={"backend": "cpu", "cpu_dtype": "float64"})


@pytest.mark.parametrize(("name", "layout"), [*LISTED, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in REST)])
def test_a_family_is_trained_resumed_and_exported(ranks, name: str, layout: str, tmp_path: Path) -> None:
    with NoFloat32():
        theirs = make_model(make_config(name, vocab_size=VOCAB))
        theirs.save_pretrained(tmp_path / "theirs")
    recipe = recipe_of(tmp_path / "theirs", tmp_path / "run")
    ranks.run(run_recipe, recipe, [cores(1)], 1, ranks=1)
    loss, *_ = losses(recipe).values()
    assert loss == pytest.approx(first_loss(theirs, SEQ_LEN), rel=1e-10)
    assert ranks.run(run_recipe, recipe, [*LAYOUTS[layout], cores(2)], ranks=2) == [0, 0]
    (_, newest), *_ = list_steps(tmp_path / "run" / "checkpoints")
    convert_checkpoint(open_source(newest), tmp_path / "exported", ConvertOptions(format="hf"))
    with NoFloat32():
        exported = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "exported", dtype=torch.float64, attn_implementation="eager"
        ).eval()
    again = recipe_of(tmp_path / "exported", tmp_path / "again")
    ranks.run(run_recipe, again, [cores(1)], 1, ranks=1)
    assert losses(again)[1] == pytest.approx(first_loss(exported, SEQ_LEN), rel=1e-10)
    assert losses(again)[1] != pytest.approx(loss, rel=1e-2)
