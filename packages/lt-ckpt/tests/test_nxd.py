"""Checkpoints written by neuronx-distributed itself: read bit for bit, and written again key for key."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nxd_trees import everything, load, same
from safetensors.torch import save_file

from lt_ckpt import CheckpointError
from lt_ckpt.conversion import convert
from lt_ckpt.formats import open_source
from lt_ckpt.hf.format import hf_target
from lt_ckpt.nxd.format import nxd_target, open_nxd
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.torchfile.file import write_pt
from lt_model import config_from_hf, param_specs

DATA = Path(__file__).parent / "data" / "nxd"
MHA, GQA = DATA / "llama2-mha-tp2", DATA / "llama3-gqa-tp4-pp2-kv2"
MHA_CUT = NxdOptions(tp=2)
GQA_CUT = NxdOptions(tp=4, pp=2, kv_size_multiplier=2, qkv="gqa")

CASES = [
    pytest.param(MHA, "nxd-plain", MHA_CUT, id="mha-plain"),
    pytest.param(MHA, "nxd-xser", replace(MHA_CUT, xser=True, tag="step_7"), id="mha-xser"),
    pytest.param(MHA, "nxd-v1-layout", replace(MHA_CUT, layout="v1"), id="mha-v1"),
    pytest.param(GQA, "nxd-plain", GQA_CUT, id="gqa-plain"),
    pytest.param(GQA, "nxd-xser", replace(GQA_CUT, xser=True, tag="step_7"), id="gqa-xser"),
]


def model_files(folder):
    """Path → content of the model files, those that belong to them aside."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.name
        of_a_rank = "tp_rank_" in name or name == "checkpoint.pt"
        if path.is_file() and of_a_rank and not name.endswith(".info.pt"):
            found[path.relative_to(folder).as_posix()] = load(path)
    return found


def config_of(case):
    return json.loads((case / "hf" / "config.json").read_text())


@pytest.mark.parametrize(("case", "part", "cut"), CASES)
def test_what_nxd_wrote_is_the_model_it_was_made_from(case, part, cut, tmp_path):
    opened, model = open_nxd(case / part, config=config_of(case)), open_source(case / "hf")
    assert everything(opened) == everything(model)
    names = ("tp", "pp", "virtual_pp", "qkv", "kv_size_multiplier", "layout", "xser", "tag")
    assert {name: opened.format_info[name] for name in names} == {name: getattr(cut, name) for name in names}
    # Copies on other ranks hold the same bytes.
    group = opened.weights
    norms = [name for name in group.specs if "norm" in name]
    assert {name: len(group.replicas[name]) for name in norms} == dict.fromkeys(norms, cut.tp - 1)
    doubled = {name: len(stored) for name, stored in group.replicas.items() if name not in norms}
    keys = [name for name in group.specs if "k_proj" in name or "v_proj" in name]
    assert doubled == ({} if cut.kv_size_multiplier == 1 else dict.fromkeys(keys, cut.tp // 2))
    for name, copies in group.replicas.items():
        for stored in copies:
            copy = opened.read_slices((stored,), group.specs[name], stored.box, name)
            assert copy.tobytes() == opened.read(name, stored.box).tobytes()
    out = convert(opened, hf_target(opened), tmp_path / "hf")
    assert everything(open_source(out)) == everything(model)


@pytest.mark.parametrize(("case", "part", "cut"), CASES)
def test_we_write_what_nxd_wrote_key_for_key_and_bit_for_bit(case, part, cut, tmp_path):
    model = open_source(case / "hf")
    out = convert(model, nxd_target(model, cut), tmp_path / "out")
    theirs = model_files(case / part)
    same(model_files(out), theirs)
    if cut.tag:
        for marker in ("checkpoint", "done"):
            assert (out / cut.tag / marker).read_bytes() == (case / part / cut.tag / marker).read_bytes() == b"1"
    if cut.xser:
        for path in theirs:
            info = [torch.load(f"{folder / path}.info.pt", weights_only=True) for folder in (out, case / part)]
            assert info[0] == info[1]
    wanted = {path for path in folder_of(case / part) if not path.endswith("user_content.pt")}
    added = {f"{cut.tag}/{name}" if cut.tag else name for name in ("config.json", "SHA256SUMS")}
    assert folder_of(out) == wanted | added, "NxD's loader reads no other file than its own"
    assert everything(open_nxd(out, config=config_of(case))) == everything(model)


@pytest.mark.parametrize("qkv", ["gqa", "gqa_fused"])
def test_biases_and_head_norms_have_the_names_of_nxds_layers(qkv, tmp_path):
    """Rows as in trn1's order: of 2 key/value heads on 4 ranks, and 4 shares of the query heads."""
    config = {"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 8, "head_dim": 2}
    config |= {"num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 8, "attention_bias": True}
    tensors = {spec.name: torch.randn(spec.shape) for spec in param_specs(config_from_hf(config))}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    cut = NxdOptions(tp=4, kv_size_multiplier=2, qkv=qkv)
    out = convert(source, nxd_target(source, cut), tmp_path / "out")
    q, k, v, o = (tensors[f"model.layers.0.self_attn.{x}_proj.bias"] for x in "qkvo")
    for rank, (share, head) in enumerate(((0, 0), (2, 1), (1, 0), (3, 1))):
        held = load(out / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
        held = {name.removeprefix("model.layers.0.self_attn."): tensor for name, tensor in held.items()}
        wanted = {"q": q[4 * share :][:4], "k": k[2 * head :][:2], "v": v[2 * head :][:2]}
        if qkv == "gqa_fused":
            assert torch.equal(held["qkv_proj.bias_qkv"], torch.cat(list(wanted.values())))
        else:
            assert all(torch.equal(held[f"qkv_proj.bias_{x}"], rows) for x, rows in wanted.items())
        assert torch.equal(held["o_proj.bias"], o)
        assert torch.equal(held["q_norm.weight"], tensors["model.layers.0.self_attn.q_norm.weight"])
    assert everything(open_source(out)) == everything(source)


def folder_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("qkv", ["gqa", "gqa_fused"])
def test_options_of_the_gqa_layer_are_inferred(qkv, tmp_path):
    cut = replace(GQA_CUT, qkv=qkv, xser=True, virtual_pp=2, layout="v1")
    model = open_source(GQA / "hf")
    found = open_nxd(convert(model, nxd_target(model, cut), tmp_path / "out"), config=config_of(GQA))
    assert (found.format_info["qkv"], found.format_info["virtual_pp"]) == (qkv, 2)
    assert everything(found) == everything(model)


def test_a_cut_of_its_own_stages_is_read(tmp_path):
    cut = replace(MHA_CUT, pp=2, stage_layers=((0, 1, 2), (3,)))
    model = open_source(MHA / "hf")
    out = convert(model, nxd_target(model, cut), tmp_path / "out")
    found = open_nxd(out, config=config_of(MHA))
    assert found.format_info["stage_layers"] == [[0, 1, 2], [3]]
    assert everything(found) == everything(model)


def tied(tmp_path):
    """A tied model: the reference's, without its head."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "tied"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config_of(MHA), "tie_word_embeddings": True}))
    tensors = load_file(MHA / "hf" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    return folder, tensors


def test_a_tied_model_has_both_copies_in_nxd_and_one_in_hugging_face(tmp_path):
    folder, tensors = tied(tmp_path)
    model = open_source(folder)
    out = convert(model, nxd_target(model, replace(MHA_CUT, pp=2)), tmp_path / "nxd")
    for t in range(2):
        first, last = (load(out / "model" / f"dp_rank_00_tp_rank_0{t}_pp_rank_0{p}.pt") for p in (0, 1))
        share = tensors["model.embed_tokens.weight"].chunk(2)[t]
        assert torch.equal(first["model.embed_tokens.weight"], share)
        assert torch.equal(last["lm_head.weight"], share)
    opened = open_nxd(out, config=model.config)
    assert "lm_head.weight" in opened.weights.specs
    back = convert(opened, hf_target(opened), tmp_path / "back")
    assert (back / "model.safetensors").read_bytes()
    assert everything(open_source(back)) == everything(model)


def test_a_tied_checkpoint_without_the_second_copy_is_read(tmp_path):
    folder, _ = tied(tmp_path)
    (tmp_path / "nxd" / "model").mkdir(parents=True)
    for path, held in model_files(MHA / "nxd-plain").items():
        del held["lm_head.weight"]
        torch.save(held, tmp_path / "nxd" / path)
    opened = open_nxd(tmp_path / "nxd", config=json.loads((folder / "config.json").read_text()))
    assert everything(opened) == everything(open_source(folder))


def test_buffers_and_other_entries_are_left_out(tmp_path):
    for path, held in model_files(MHA / "nxd-v1-layout").items():
        (tmp_path / path).parent.mkdir()
        held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        torch.save({"model": held, "epoch": 3, "scheduler": {}}, tmp_path / path)
    opened = open_nxd(tmp_path, config=config_of(MHA))
    assert everything(opened) == everything(open_source(MHA / "hf"))


def test_what_nxds_converter_calls_xser_is_read(tmp_path):
    """Tensors in the file itself, and an empty folder for them beside it."""
    shutil.copytree(MHA / "nxd-plain", tmp_path / "fake")
    for t in range(2):
        (tmp_path / "fake" / "model" / f"dp_rank_00_tp_rank_0{t}_pp_rank_00.pt.tensors").mkdir()
    opened = open_nxd(tmp_path / "fake", config=config_of(MHA))
    assert opened.format_info["xser"] is False
    assert everything(opened) == everything(open_source(MHA / "hf"))


def test_xser_of_older_versions_has_no_description(tmp_path):
    shutil.copytree(GQA / "nxd-xser", tmp_path / "old")
    for path in (tmp_path / "old").rglob("*.info.pt"):
        path.unlink()
    assert everything(open_nxd(tmp_path / "old", config=config_of(GQA))) == everything(open_source(GQA / "hf"))


def tags(root, names, **markers):
    """A folder of tags that all hold the same checkpoint."""
    for name in names:
        shutil.copytree(MHA / "nxd-plain", root / name)
        for marker in markers.get(name, ("checkpoint", "done")):
            (root / name / marker).write_text("1")


def test_the_tag_of_the_highest_step_counts_not_the_newest_file(tmp_path):
    tags(tmp_path, ["step_9", "step_10", "step_11"], step_11=["checkpoint"])
    os.utime(tmp_path / "step_9" / "done", (2**31, 2**31))
    opened = open_nxd(tmp_path, config=config_of(MHA))
    assert opened.root == tmp_path / "step_10"
    assert opened.format_info["tag"] == "step_10"
    assert opened.format_info["skipped_tags"] == ["step_11", "step_9"]


@pytest.mark.parametrize("place", ["", "pretrained_weight", "pretrained_weight/model"])
def test_a_bare_model_folder_is_found_from_above_and_from_within(tmp_path, place, monkeypatch):
    tags(tmp_path, ["pretrained_weight"], pretrained_weight=[])
    opened = open_nxd(tmp_path / place, config=config_of(MHA))
    assert opened.root == tmp_path / "pretrained_weight"
    assert opened.format_info["tag"] == ""
    monkeypatch.chdir(tmp_path / place)
    assert open_nxd(".", config=config_of(MHA)).root == tmp_path / "pretrained_weight"


def refuse(path, match, config=None):
    with pytest.raises(CheckpointError, match=match):
        open_nxd(path, config=config or config_of(MHA))


def test_tags_that_cannot_be_chosen_from_are_refused(tmp_path):
    tags(tmp_path / "a", ["best", "last"])
    refuse(tmp_path / "a", r"tags last and best: neither is newer")
    tags(tmp_path / "b", ["step_1"], step_1=["checkpoint"])
    refuse(tmp_path / "b", r"no finished NxD checkpoint here: step_1 lack the marker 'done'")
    refuse(tmp_path / "b" / "step_1", r"the marker 'done' is missing: its save or its removal was not finished")
    (tmp_path / "c").mkdir()
    refuse(tmp_path / "c", r"no finished NxD checkpoint here; expected rank files in model/")
    refuse(tmp_path / "d", "looking for an NxD checkpoint failed: No such file")


@pytest.fixture
def copy(tmp_path):
    """Makes a copy of a case that may be changed."""

    def make(case, part="nxd-plain"):
        shutil.copytree(case / part, tmp_path / part)
        return tmp_path / part

    return make


RANK = "model/dp_rank_00_tp_rank_01_pp_rank_00.pt"


def change(folder, act, file=RANK):
    """Rewrites a rank's file."""
    held = load(folder / file)
    act(held)
    (folder / file).unlink()
    torch.save(held, folder / file)


def test_a_missing_rank_is_named(copy):
    folder = copy(GQA)
    (folder / "model" / "dp_rank_00_tp_rank_02_pp_rank_01.pt").unlink()
    refuse(folder, r"model/dp_rank_00_tp_rank_02_pp_rank_01.pt: is missing; .* tp 4 and pp 2", config_of(GQA))
    (folder / "model" / "dp_rank_00_tp_rank_1000000000_pp_rank_01.pt").touch()
    refuse(folder, r"tp_rank_02_pp_rank_01.pt: is missing; .* tp 1000000001 and pp 2", config_of(GQA))


def test_missing_and_unknown_keys_are_named(copy):
    folder = copy(MHA)
    change(folder, lambda held: held.pop("model.layers.3.mlp.down_proj.weight"))
    refuse(folder, rf"{RANK}: 1 missing: model.layers.3.mlp.down_proj.weight")
    change(folder, lambda held: held.update({"model.layers.3.mlp.down_proj.weight": torch.zeros(1, 2)}))
    refuse(folder, rf"{RANK}: model.layers.3.mlp.down_proj.weight has shape \[1, 2\], expected \[64, 64\]")
    change(folder, lambda held: held.update({"model.extra": torch.zeros(1)}))
    refuse(folder, rf"{RANK}: 1 not expected: model.extra")


def test_what_is_no_tensor_is_refused(copy):
    folder = copy(MHA)
    change(folder, lambda held: held.update({"epoch": 3}))
    refuse(folder, rf"{RANK}: 'epoch' is not a tensor but a int")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": 5}, r"no file has layer 4, but the configuration has 5 layers"),
        ({"num_hidden_layers": 3}, r"there is a layer 3, but the configuration has 3 layers"),
        ({"vocab_size": 128}, r"model.embed_tokens.weight has shape \[64, 64\], expected \[32, 64\]"),
        ({"num_key_value_heads": 8}, r"k_proj.weight: .* 8 x 1 is not 4"),
        ({"intermediate_size": 126}, r"gate_proj.weight: dim 0 of shape \[126, 64\] does not divide into 4"),
    ],
)
def test_another_models_configuration_is_noticed(changes, match):
    refuse(GQA / "nxd-plain", match, {**config_of(GQA), **changes})


def test_broken_xser_is_named(copy, tmp_path):
    folder = copy(MHA, "nxd-xser") / "step_7"
    tensors = folder / f"{RANK}.tensors"
    (tensors / "tensor_3.pt").rename(tmp_path / "kept")
    refuse(folder, r"tensor_3.pt: reading failed: No such file")
    shutil.copy(tensors / "tensor_5.pt", tensors / "tensor_3.pt")
    refuse(folder, r"tensor_3.pt: holds BF16 \[128, 64\], .*info.pt says BF16 \[32, 64\] .*v_proj.weight")
    (tensors / "tensor_3.pt").unlink()
    write_pt(tensors / "tensor_3.pt", {"a": 1})
    refuse(folder, r"tensor_3.pt: must hold a tensor \(model.layers.0.self_attn.v_proj.weight\), holds a dict")


def test_several_data_parallel_ranks_are_refused(copy):
    folder = copy(MHA)
    shutil.copy(folder / RANK, folder / "model" / "dp_rank_01_tp_rank_01_pp_rank_00.pt")
    refuse(folder, r"model files of several data-parallel ranks; keep only those of dp_rank_00 there")
