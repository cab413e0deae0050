"""ZeRO-1 states made of ours: NxD's own files come back bit for bit, whatever the cut on the way."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nxd_trees import everything, load, same
from safetensors.torch import save_file

from lt_ckpt import CheckpointError
from lt_ckpt.formats import ConvertOptions, convert_checkpoint, open_source
from lt_ckpt.nxd.options import NxdOptions
from lt_model import ModelConfig, config_to_hf, param_specs

DATA = Path(__file__).parent / "data" / "nxd"
STEPS = DATA / "llama2-mha-tp2-dp2-zero1-steps"
CONFIG = STEPS / "hf-start" / "config.json"
CUT = NxdOptions(tp=2, tag="step_3")


@pytest.mark.parametrize("xser", [False, True], ids=["plain", "xser"])
@pytest.mark.parametrize("name", ["nxd-plain", "nxd-plain-fp32"])
def test_through_our_checkpoint_nxds_own_files_come_back(name, xser, tmp_path):
    folder = STEPS / name
    ours = convert_checkpoint(
        open_source(folder, config=CONFIG, optimizer=True),
        tmp_path / "run",
        ConvertOptions(format="lt", max_shard_bytes=10**4),
    )
    cut = replace(CUT, xser=xser)
    back = convert_checkpoint(open_source(ours), tmp_path / "back", ConvertOptions(format="nxd", nxd=cut, dp=2))
    for kind, n_files in (("optim", 4), ("model", 2)):
        wanted = sorted((folder / "step_3" / kind).glob("*.pt"))
        assert len(wanted) == n_files
        for path in wanted:
            same(load(back / "step_3" / kind / path.name), load(path))
    assert (back / "step_3" / "done").is_file()


@pytest.mark.parametrize(
    ("cut", "dp"),
    [
        (NxdOptions(tp=1, pp=2), 3),
        (NxdOptions(tp=2, pp=1, qkv="coalesced"), 7),
        (NxdOptions(tp=2), 41),  # more ranks than most tensors have rows: the last ones have padding alone
        (NxdOptions(tp=2, pp=2, xser=True, tag="t"), 5),
    ],
    ids=str,
)
def test_any_cut_holds_the_same_state(cut, dp, tmp_path):
    source = open_source(STEPS / "nxd-plain", config=CONFIG, optimizer=True)
    made = convert_checkpoint(source, tmp_path / "made", ConvertOptions(format="nxd", nxd=cut, dp=dp))
    again = open_source(made, config=CONFIG, optimizer=True)
    assert (again.format_info["dp"], again.format_info["step"], again.format_info["param_groups"]) == (
        dp,
        source.format_info["step"],
        source.format_info["param_groups"],
    )
    assert everything(again) == everything(source)


@pytest.mark.parametrize(("tied", "settings"), [(False, 1), (True, 2)], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "cut",
    [
        NxdOptions(tp=8, pp=2, kv_size_multiplier=2, qkv="gqa_fused"),
        NxdOptions(tp=4, kv_size_multiplier=1, qkv="gqa"),
        NxdOptions(tp=2, pp=2, virtual_pp=2),
    ],
    ids=str,
)
def test_grouped_heads_tied_heads_and_one_group(cut, tied, settings, tmp_path):
    """Moments that are the weights themselves: every row must come back to its place."""
    config = ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), tied),
    )
    weights = {p.name: torch.randn(p.shape) for p in param_specs(config)}
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config_to_hf(config, dtype="float32")), encoding="utf-8")
    source = open_source(tmp_path / "hf")
    group = source.weights
    if tied:
        names = [name for name in group.specs if name != "lm_head.weight"]
        group = replace(
            group, specs={n: group.specs[n] for n in names}, locations={n: group.locations[n] for n in names}
        )
    groups = {"weights": source.weights, "exp_avg": group, "exp_avg_sq": group}
    about = {"step": 7, "param_groups": [{"lr": 1e-3, "weight_decay": 0.1 * i} for i in range(settings)]}
    options = ConvertOptions(format="nxd", nxd=cut, dp=3)
    made = convert_checkpoint(replace(source, groups=groups, format_info=about), tmp_path / "made", options)
    again = open_source(made, config=tmp_path / "hf" / "config.json", optimizer=True)
    assert (again.format_info["step"], again.format_info["param_groups"]) == (7, about["param_groups"])
    found = everything(again)
    assert {kind for kind, _ in found} == {"weights", "exp_avg", "exp_avg_sq", "master"}
    tree = torch.load(made / "optim/dp_rank_00_tp_rank_00_pp_rank_00.pt", weights_only=True)
    assert settings == 1 or {len(tree["shape_info"][n]) for n in tree["param_groups"][0]["params"]} == {2}
    for (_, name), data in found.items():
        key = "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name
        assert data == ("F32", weights[key].numpy().tobytes()), name


def test_fp32_weights_are_their_own_masters(tmp_path):
    source = open_source(STEPS / "nxd-plain", config=CONFIG, optimizer=True)
    masters = source.groups["master"]
    ours = {"weights": masters, "exp_avg": source.groups["exp_avg"], "exp_avg_sq": source.groups["exp_avg_sq"]}
    made = convert_checkpoint(
        replace(source, groups=ours), tmp_path / "made", ConvertOptions(format="nxd", nxd=CUT, dp=2, dtype="BF16")
    )
    again = open_source(made, config=CONFIG, optimizer=True)
    assert {spec.dtype for spec in again.weights.specs.values()} == {"BF16"}
    wanted, found = everything(source), everything(again)
    assert {key: data for key, data in found.items() if key[0] != "weights"} == {
        key: data for key, data in wanted.items() if key[0] != "weights"
    }
    narrow = replace(source, groups={"weights": source.weights, **{k: v for k, v in ours.items() if k != "weights"}})
    made = convert_checkpoint(narrow, tmp_path / "narrow", ConvertOptions(format="nxd", nxd=CUT, dp=2))
    assert set(open_source(made, config=CONFIG, optimizer=True).groups) == {"weights", "exp_avg", "exp_avg_sq"}


def test_the_command_takes_a_state_there_and_back(tmp_path):
    from lt_ckpt.cli.convert import convert as command

    config = STEPS / "hf-start" / "config.json"
    command(str(STEPS / "nxd-plain"), tmp_path / "run", "lt", config, optimizer=True)
    command(str(tmp_path / "run"), tmp_path / "back", "nxd", tp=2, tag="step_3", optimizer=True, dp=2)
    command(str(tmp_path / "back"), tmp_path / "again", "nxd", config, tp=1, optimizer=True, dp=3)
    source = open_source(STEPS / "nxd-plain", config=CONFIG, optimizer=True)
    assert everything(open_source(tmp_path / "again", config=CONFIG, optimizer=True)) == everything(source)
    command(str(tmp_path / "run"), tmp_path / "weights", "nxd", tp=2)
    assert not (tmp_path / "weights" / "optim").exists()


def test_a_run_of_ours_tells_its_optimizers_settings(tmp_path):
    from lt_ckpt import Checkpoint
    from lt_ckpt.lt_format import open_lt

    source = open_source(STEPS / "nxd-plain", config=CONFIG, optimizer=True)
    bare = replace(source, format_info={"step": 3})
    made = Checkpoint.open(convert_checkpoint(bare, tmp_path / "run", ConvertOptions(format="lt")))
    recipe = {"optimizer": {"lr": 0.001, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "other": 1}}
    shared = {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-8, "initial_lr": 0.001}
    assert "param_groups" not in open_lt(made).format_info
    made.manifest = replace(made.manifest, recipe=recipe)
    found = open_lt(made).format_info["param_groups"]
    assert found == [{"weight_decay": 0.1, **shared}, {"weight_decay": 0.0, **shared}]


def test_what_cannot_be_made_is_refused_before_a_byte_is_written(tmp_path):
    source = open_source(STEPS / "nxd-plain", config=CONFIG, optimizer=True)
    groups = {kind: group for kind, group in source.groups.items() if kind != "exp_avg_sq"}
    about = {key: value for key, value in source.format_info.items() if key != "param_groups"}
    moment = source.groups["exp_avg"]
    short = replace(moment, specs={k: v for k, v in moment.specs.items() if k != "model.norm.weight"})
    settings, good = "settings of the optimizer", ConvertOptions(format="nxd", nxd=CUT, dp=2)
    for changed, options, words in (
        (replace(source, groups=groups), good, "has no exp_avg_sq"),
        (replace(source, format_info=about), good, settings),
        (replace(source, format_info={**about, "param_groups": [{"lr": 1.0}] * 3}), good, settings),
        (replace(source, format_info={**about, "step": None}), good, "has no step"),
        (source, replace(good, nxd=NxdOptions(tp=2, layout="v1")), "layout = v1: has no ZeRO-1 states"),
        (
            replace(source, groups={**source.groups, "exp_avg": short}),
            replace(good, allow_replica_mismatch=True),
            "exp_avg of model.norm.weight: is missing",
        ),
    ):
        with pytest.raises(CheckpointError, match=words):
            convert_checkpoint(changed, tmp_path / "out", options)
        assert not list(tmp_path.iterdir())
