"""Runs from a recipe with transformers' models: resumed on two ranks, exported, read by transformers, continued.

The first loss of a run that begins with the export is transformers' own, in float64.
"""

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_models import CASES, NoFloat32, make_config, make_model

from lt_ckpt import list_steps
from lt_ckpt.formats import ConvertOptions, convert_checkpoint, open_source
from lt_test_helpers.family_runs import family_recipe, first_loss
from lt_test_helpers.runs import losses, run
from lt_trainer.config.recipe import load

SEQ_LEN, VOCAB, TODAY = 64, 102, datetime.date.today().toordinal()
LAYOUTS = (("parallel.tp=2", "parallel.sequence_parallel=true"), ("parallel.pp=2",))
DENSE = [name for name in CASES if not any(word in name for word in ("moe", "mixtral", "deepseek", "experts"))]


def start(recipe: dict[str, Any], ranks: int, last: int, *sets: str) -> int:
    return run(load(base=recipe, overrides=[*sets, f"engine.neuron.num_neuroncores={ranks}"]), stop_after_step=last)


def recipe_of(model: Path, out: Path) -> dict[str, Any]:
    return family_recipe({"init_from": str(model)}, out, SEQ_LEN, neuron={"backend": "cpu", "cpu_dtype": "float64"})


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one != DENSE[TODAY % len(DENSE)])) for one in DENSE]
)
def test_a_family_is_trained_resumed_and_exported(ranks, name: str, tmp_path: Path) -> None:
    with NoFloat32():
        theirs = make_model(make_config(name, vocab_size=VOCAB))
        theirs.save_pretrained(tmp_path / "theirs")
    recipe = recipe_of(tmp_path / "theirs", tmp_path / "run")
    ranks.run(start, recipe, 1, 1, ranks=1)
    loss, *_ = losses(recipe).values()
    assert loss == pytest.approx(first_loss(theirs, SEQ_LEN), rel=1e-10)
    assert ranks.run(start, recipe, 2, 0, *LAYOUTS[TODAY % 2], ranks=2) == [0, 0]
    (_, newest), *_ = list_steps(tmp_path / "run" / "checkpoints")
    convert_checkpoint(open_source(newest), tmp_path / "exported", ConvertOptions(format="hf"))
    with NoFloat32():
        exported = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "exported", dtype=torch.float64, attn_implementation="eager"
        ).eval()
    again = recipe_of(tmp_path / "exported", tmp_path / "again")
    ranks.run(start, again, 1, 1, ranks=1)
    assert losses(again)[1] == pytest.approx(first_loss(exported, SEQ_LEN), rel=1e-10)
    assert losses(again)[1] != pytest.approx(loss, rel=1e-2)
