"""A model of transformers of each family, trained on, resumed and exported: transformers' logits are ours.

It goes on in another layout, to the losses of a run in one process, and another run begins with the export. Also with a
longer context: the window lifted, the rotary base raised, yarn. The first loss is transformers' in float64; the logits
of the export go beyond the old context and every window.
"""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from family_models import CASES, SHAPE, NoFloat32, make_config, make_model, our_tensors  # noqa: E402
from hub_server import hub  # noqa: E402, F401 - a fixture

from lt_ckpt import Checkpoint, list_steps  # noqa: E402
from lt_ckpt.formats import ConvertOptions, convert_checkpoint, open_source  # noqa: E402
from lt_model import Decoder, ModelError, config_from_hf  # noqa: E402
from lt_test_helpers.family_runs import family_recipe, first_loss  # noqa: E402
from lt_test_helpers.run_files import read_losses  # noqa: E402
from lt_test_helpers.runs import run, run_recipe  # noqa: E402
from lt_trainer.config.recipe import load  # noqa: E402
from lt_trainer.errors import RecipeError  # noqa: E402
from lt_trainer.run_directory.jsonl import read_jsonl  # noqa: E402

SEQ_LEN = 32
LINEAR = ("model.rope_scaling.factor=4.0", "model.rope_scaling.kind=linear", "model.max_position_embeddings=256")
LLAMA3 = (*LINEAR, "model.rope_scaling.original_max_position_embeddings=64", "model.rope_scaling.kind=llama3")
YARN = (*LLAMA3, "model.rope_scaling.kind=yarn")
RUNS = {case: (case, ()) for case, (family, _) in CASES.items() if family != "gpt_oss"} | {
    "mistral, window lifted": ("mistral, window 7, head 16", ("model.sliding_window=0", "model.rope_theta=5000.0")),
    "mistral, wider window": ("mistral, window 7, head 16", ("model.sliding_window=20",)),
    "olmo3, yarn": ("olmo3, yarn in full layers", (*YARN, "model.rope_theta=700.0")),
    "qwen3, yarn": ("qwen3, yarn, head 12", YARN),
    "smollm3, yarn": ("smollm3, linear, window", YARN),
    "granite, linear": ("granite", LINEAR),
    "olmo2, llama3": ("olmo2", LLAMA3),
}


def base(folder: Path, out: Path, field: str = "init_from") -> dict[str, Any]:
    return family_recipe({field: str(folder)}, out, SEQ_LEN, gpu={"device": "cpu", "dtype": "float64"})


LAYOUTS = {
    "tp": ("parallel.tp=2", "parallel.sequence_parallel=true"),
    "pp": ("parallel.pp=2",),
    "cp": ("parallel.cp=2",),
    "fsdp": (),
    "hsdp": ("parallel.dp_replicate=2",),
    "ep": ("parallel.ep=2",),
}
LISTED = [
    ("gemma3_text", "tp"),
    ("olmo3, yarn", "pp"),
    ("mistral, window lifted", "cp"),
    ("gpt_neox, parallel", "fsdp"),
    ("qwen3_moe, head 12", "hsdp"),
    ("deepseek_v3, yarn, groups", "ep"),
]
"""Each layout, and each kind of block: the losses and gradients of all pairs are compared in `test_family_axes.py`."""
CASES_OF_RUNS = [
    pytest.param(name, layout, marks=() if (name, layout) in LISTED else pytest.mark.slow)
    for name, layout in itertools.product(RUNS, LAYOUTS)
    if layout != "ep" or name.startswith(("qwen2_moe", "qwen3_moe", "deepseek"))
]


def test_each_layout_has_a_listed_case() -> None:
    assert [layout for _, layout in LISTED] == list(LAYOUTS)


@pytest.mark.parametrize("case", [case for case, sets in RUNS.values() if not sets])
def test_the_first_loss_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    with NoFloat32():
        theirs = make_model(make_config(case))
        theirs.save_pretrained(tmp_path / "theirs")
    recipe = base(tmp_path / "theirs", tmp_path / "run")
    assert run(load(base=recipe, overrides=["schedule.max_steps=1"]), environ={}) == 0
    assert read_losses(tmp_path / "run")[1] == pytest.approx(first_loss(theirs, SEQ_LEN), rel=1e-10)


@pytest.mark.parametrize(("name", "layout"), CASES_OF_RUNS)
def test_a_family_is_trained_resumed_and_exported(ranks, name: str, layout: str, tmp_path: Path) -> None:
    (case, sets), folder = RUNS[name], tmp_path
    with NoFloat32():
        make_model(make_config(case)).save_pretrained(folder / "theirs")
    recipe = base(folder / "theirs", folder / "run")
    # Experts are balanced over the rows of a micro-step, which of two replicas are two.
    alone = (*sets, *(("batch.micro_batch_size=2",) if layout in ("fsdp", "hsdp", "ep") else ()))
    run(load(base=recipe, overrides=alone), environ={}, stop_after_step=1)
    assert ranks.run(run_recipe, recipe, (*sets, *LAYOUTS[layout]), ranks=2) == [0, 0]
    assert run(load(base=recipe, overrides=[*alone, f"run.dir={folder / 'alone'}"]), environ={}) == 0
    assert read_losses(folder / "run") == pytest.approx(read_losses(folder / "alone"), rel=1e-10)
    (_, newest), *_ = list_steps(folder / "run" / "checkpoints")
    convert_checkpoint(open_source(newest), folder / "exported", ConvertOptions(format="hf"))
    with NoFloat32():
        exported = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "exported", dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        ids = torch.randint(0, 101, (1, 150 if sets else 60), generator=torch.Generator().manual_seed(1))
        wanted = exported(input_ids=ids, use_cache=False).logits
    config = config_from_hf(exported.config.to_dict())
    ours = Decoder(config).double()
    state = our_tensors(exported.state_dict(), config)
    ours.load_state_dict({"lm_head.weight": state["model.embed_tokens.weight"], **state})
    found = ours(ids)
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < 1e-12
    assert config.family == exported.config.model_type == CASES[case][0]
    again = base(folder / "exported", folder / "again")
    assert run(load(base=again, overrides=["schedule.max_steps=1"]), environ={}) == 0
    assert read_losses(folder / "again")[1] == pytest.approx(first_loss(exported, SEQ_LEN), rel=1e-10)


def test_a_config_json_gives_the_shape_with_random_weights(tmp_path: Path) -> None:
    config = make_config("gemma2, softcaps", vocab_size=160)
    config.save_pretrained(tmp_path)
    recipe = base(tmp_path, tmp_path / "run", "config")
    for place in (tmp_path, tmp_path / "config.json"):
        resolved = load(base=recipe, overrides=[f"model.config={place}"])
        assert resolved.origins["model.shape"] == f"config {place}"
    assert run(load(base=recipe, overrides=["schedule.max_steps=1"]), environ={}) == 0
    (tmp_path / "config.json").unlink()  # the run's recipe and checkpoint have it all
    assert run(load(base=recipe), environ={}) == 0
    (_, newest), *_ = list_steps(tmp_path / "run" / "checkpoints")
    assert Checkpoint.open(newest).manifest.model == config_from_hf(config.to_dict()).to_dict()


def test_the_shape_of_a_hub_is_asked_for_once(hub, tmp_path: Path) -> None:  # noqa: F811
    """Shape and commit are in the run's recipe from its start on: nothing asks again, before a checkpoint either."""
    window = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
    hub.files["config.json"] = json.dumps({"model_type": "qwen2", **SHAPE, **window}).encode()
    recipe = base(Path("unused"), tmp_path / "run", "config")
    recipe["model"] = {"config": "hf://org/name", "rope_theta": 700.0}
    assert load(base=recipe).origins["model.n_heads"] == "from hf://org/name"
    assert hub.log == [], "to show a recipe asks nothing"
    with pytest.raises(RecipeError, match="n_layers = 3: the model lists the kinds of its 4 layers one by one"):
        run(load(base=recipe, overrides=["model.n_layers=3"]), environ={})
    assert run(load(base=recipe, overrides=["schedule.max_steps=1"]), environ={}) == 0
    before = load(tmp_path / "run" / "recipe.toml").recipe.model
    assert before.config == f"hf://org/name@{hub.commit}"
    assert hub.fetched() == ["config.json"], "the refused run's is in the cache"
    n_requests = len(hub.log)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    resumed = load(base=recipe)
    assert resumed.recipe.model.model_dump() == before.model_dump()
    assert (resumed.pending, resumed.origins["model.shape"]) == (set(), "config hf://org/name")
    assert load(base=recipe, overrides=["model.config=hf://org/other"]).pending, "another model is another one's shape"
    for _ in range(2):  # without a checkpoint, and with one
        assert run(load(base=recipe), environ={}) == 0
    assert len(hub.log) == n_requests
    changes = [one["message"] for one in read_jsonl(tmp_path / "run" / "events.jsonl") if "model.config" in str(one)]
    assert changes == []


@pytest.mark.parametrize(
    ("case", "format", "message"),
    [
        ("gpt_neox, parallel", "nxd", "norm = 'layer' of family = 'gpt_neox' is not supported by the format nxd yet"),
        ("olmo2", "nxd", "norm_place = 'post' of family = 'olmo2' is not supported by the format nxd yet"),
    ],
)
def test_formats_name_what_they_lack(case, format, message, tmp_path) -> None:
    with NoFloat32():
        make_model(make_config(case)).save_pretrained(tmp_path / "theirs")
    with pytest.raises(ModelError, match=message):
        convert_checkpoint(open_source(tmp_path / "theirs"), tmp_path / "out", ConvertOptions(format=format))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("case", "changes", "sets", "message"),
    [
        ("olmo2", {"attention_dropout": 0.1}, (), "attention_dropout = 0.1: lt trains without dropout"),
        ("qwen2, window from layer 2", {}, ("model.n_layers=6",), "n_layers = 6: the model lists the kinds of its 4"),
        ("gpt_oss, window 6", {}, (), "sinks = True of family = 'gpt_oss' is not supported by training yet"),
        ("llama", {}, ("model.sliding_window=8",), "sliding_window = 8: no layer of this model has a window"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_run_starts(case, changes, sets, message, tmp_path) -> None:
    make_config(case, **changes).save_pretrained(tmp_path)
    recipe = base(tmp_path, tmp_path / "run", "config")
    with pytest.raises(RecipeError, match=message):
        run(load(base=recipe, overrides=sets), environ={})
    assert not (tmp_path / "run").exists()
