"""Conversions: files of every family, comparisons, refusals, and how little memory they take."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import transformers
from family_models import CASES, make_config, make_model, our_tensors
from safetensors.torch import load_file, save_file

from lt_ckpt import CheckpointError, laid_out_files
from lt_ckpt.comparison import compare
from lt_ckpt.dcp import format as dcp_format
from lt_ckpt.formats import ConvertOptions, convert_checkpoint, open_source
from lt_ckpt.nxd.layout import LACKS
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.records import TORCH_ADAMW
from lt_ckpt.source import Source
from lt_model import ModelConfig, ModelError, config_from_hf, config_to_hf, param_specs
from lt_model.families import FAMILIES

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled", "ignore:.*TypedStorage is deprecated")

TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3}


def make_hf(folder: Path, *, tied: bool = False, head: bool = False, dtype=torch.bfloat16, **changes) -> Path:
    """A random Llama as transformers writes it: config.json and one safetensors file."""
    config = ModelConfig(**{**TINY, **changes}, tie_word_embeddings=tied)
    generator = torch.Generator().manual_seed(0)
    weights = {p.name: torch.randn(p.shape, generator=generator).to(dtype) for p in param_specs(config)}
    if tied and head:
        weights[HEAD] = weights[EMBED].clone()
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    values = config_to_hf(config, bos_token_id=1, eos_token_id=2, dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    (folder / "tokenizer.json").write_text('{"made": "up"}', encoding="utf-8")
    return folder


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor, b[name]), name


def test_a_tied_head_that_is_stored_twice_is_written_once_and_one_that_differs_is_refused(tmp_path: Path) -> None:
    start = make_hf(tmp_path / "hf", tied=True, head=True)
    made, weights = (
        convert_checkpoint(open_source(start), tmp_path / "made", ConvertOptions(format="hf")),
        loaded(start),
    )
    assert_same(loaded(made), {name: t for name, t in weights.items() if name != HEAD})
    weights[HEAD][-1, -1] += 1
    save_file(weights, start / "model.safetensors")
    for kind in ("hf", "lt"):
        with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, but lm_head.weight .* differ"):
            convert_checkpoint(open_source(start), tmp_path / "out", ConvertOptions(format=kind))
    assert not (tmp_path / "out").exists()


CAUSES = {
    "compiled": (lambda w: {f"_orig_mod.{name}": t for name, t in w.items()}, r"'_orig_mod\.' \(of a compiled"),
    "wrapped": (lambda w: {f"module.{name}": t for name, t in w.items()}, r"begin with 'module\.': save"),
    "inner": (lambda w: {n.removeprefix("model."): t for n, t in w.items()}, r"names lack 'model\.'"),
    "no head": (lambda w: {n: t for n, t in w.items() if n != HEAD}, r"lm_head.*set tie_word_embeddings to true"),
    "other family": (lambda w: {n.replace("gate_proj", "w1"): t for n, t in w.items()}, "or of another family"),
    "quantized": (lambda w: {**w, "x.gate_up_proj_blocks": torch.zeros(2)}, "the weights are quantized, .* to bf16"),
    "bias": (lambda w: {**w, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, r"1 not expected: \S*bias"),
    "shape": (lambda w: {**w, "model.norm.weight": torch.zeros(31)}, r"model.norm.weight has shape \[31\]"),
    "lost": (lambda w: dict(list(w.items())[:-2]), r"2 missing: .*a file was not copied"),
}


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("kind", ["hf", "pt", "bin"])
def test_missing_and_misnamed_tensors_are_told_with_the_likely_cause(tmp_path: Path, kind: str, cause: str) -> None:
    start = make_hf(tmp_path / "hf")
    change, message = CAUSES[cause]
    weights = {name: t.clone() for name, t in change(loaded(start)).items()}
    (start / "model.safetensors").unlink()
    path = start / {"hf": "model.safetensors", "pt": "x.pt", "bin": "pytorch_model.bin"}[kind]
    save_file(weights, path) if kind == "hf" else torch.save(weights, path)
    with pytest.raises(CheckpointError, match=message):
        open_source(path if kind == "pt" else start)


def test_folders_of_pytorch_model_bin_are_read(tmp_path: Path) -> None:
    start = make_hf(tmp_path / "hf")
    weights = loaded(start)
    for name, files in (("one", 1), ("two", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((start / "config.json").read_bytes())
        names = [f"pytorch_model-{i + 1:05d}-of-00002.bin" for i in range(2)] if files > 1 else ["pytorch_model.bin"]
        where = {tensor: names[i % files] for i, tensor in enumerate(weights)}
        for file in names:
            torch.save({tensor: weights[tensor] for tensor in where if where[tensor] == file}, folder / file)
        if files > 1:
            index = {"metadata": {}, "weight_map": where}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
        made = convert_checkpoint(open_source(folder), tmp_path / f"{name}-out", ConvertOptions(format="hf"))
        assert_same(loaded(made), weights)


def test_an_index_may_list_the_tied_head_that_its_file_lacks(tmp_path: Path) -> None:
    start = make_hf(tmp_path / "hf", tied=True)
    where = dict.fromkeys([*loaded(start), HEAD], "model.safetensors")
    (start / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    made = convert_checkpoint(open_source(start), tmp_path / "out", ConvertOptions(format="hf"))
    assert_same(loaded(made), loaded(start))
    where["model.norm.bias"] = "model.safetensors"
    (start / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"disagree about tensor 'model\.norm\.bias'"):
        open_source(start)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_folder_of_two_models_is_refused(tmp_path: Path, kind: str) -> None:
    """transformers reads the single file, whatever an index beside it names."""
    start = make_hf(tmp_path / "hf")
    weights = loaded(start)
    name = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[kind]
    if kind == "bin":
        (start / "model.safetensors").unlink()
        torch.save(weights, start / name)
    shard = name.replace(".", "-00001-of-00001.", 1)
    (start / shard).write_bytes((start / name).read_bytes())
    (start / f"{name}.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(weights, shard)}), encoding="utf-8"
    )
    with pytest.raises(CheckpointError, match=rf"has {name}, which transformers reads, and {name}\.index\.json"):
        open_source(start)
    (start / name).unlink()
    assert open_source(start).weights.specs.keys() == weights.keys()


def test_quantized_weights_are_refused_with_the_file(tmp_path: Path) -> None:
    start = make_hf(tmp_path / "hf")
    config = json.loads((start / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8"}
    (start / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(
        ModelError, match=r"hf/config\.json: quantization_config: quantized \(fp8\) weights are not read"
    ):
        open_source(start)


def test_consolidated_safetensors_beside_the_model_are_not_read(tmp_path: Path) -> None:
    start = make_hf(tmp_path / "hf")
    weights = loaded(start)
    save_file({"norm.weight": torch.zeros(3)}, start / "consolidated.safetensors")
    made = convert_checkpoint(open_source(start), tmp_path / "out", ConvertOptions(format="hf"))
    assert_same(loaded(made), weights)


@pytest.mark.parametrize("to", ["hf", "lt", "nxd", "pt"])
@pytest.mark.parametrize("kind", ["nxd xser", "hf in shards", "dcp", "lt"])
def test_no_unverified_byte_leaves(tmp_path: Path, models, kind: str, to: str) -> None:
    made = models.output(models.make(tmp_path / "src"), tmp_path / "made", kind)
    made, config = (made / "step-00000000" if kind == "lt" else made), (made / "step_3" if kind == "nxd xser" else None)
    place = open_source(made, config=config).weights.locations["model.layers.3.mlp.up_proj.weight"][0]
    file = open_source(made, config=config).root / place.file
    raw = bytearray(file.read_bytes())
    raw[place.byte_offset + 5] ^= 4
    file.write_bytes(raw)
    options = ConvertOptions(format=to, nxd=NxdOptions(tp=2))
    with pytest.raises(CheckpointError, match=r"bytes (differ from their checksum|of .* have changed since)"):
        convert_checkpoint(open_source(made, config=config), tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
    if kind == "lt":  # whose whole slices are compared with their hashes whenever they are read
        with pytest.raises(CheckpointError, match=r"bytes of tensor .* have changed since the save"):
            convert_checkpoint(open_source(made), tmp_path / "out", replace(options, verify=False))
    else:
        convert_checkpoint(open_source(made, config=config), tmp_path / "out", replace(options, verify=False))


def test_nothing_is_written_over_and_nothing_is_left_behind(tmp_path: Path, monkeypatch) -> None:
    start = make_hf(tmp_path / "hf")
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        convert_checkpoint(open_source(start), out, ConvertOptions(format="hf"))
    with open(start / "model.safetensors", "r+b") as file:
        source = open_source(start)
        file.truncate(os.path.getsize(start / "model.safetensors") - 100)
    with pytest.raises(CheckpointError, match="truncated"):
        convert_checkpoint(source, tmp_path / "other", ConvertOptions(format="hf"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]
    (out / "thesis.txt").unlink()
    assert convert_checkpoint(open_source(make_hf(tmp_path / "new")), out, ConvertOptions(format="hf")) == out


def test_compare_says_what_differs_and_how_much(tmp_path: Path) -> None:
    a = make_hf(tmp_path / "a", dtype=torch.float32)
    weights = loaded(a)
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    changed["model.layers.1.mlp.down_proj.weight"][3, 4] += 0.5
    changed["model.norm.weight"][0] = float("nan")
    b = make_hf(tmp_path / "b", dtype=torch.float32)
    save_file(changed, b / "model.safetensors")
    found = {c.name: c for c in compare(open_source(a), open_source(b))}
    assert [name for name, c in found.items() if not c.is_equal] == [
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
    ]
    one = found["model.layers.1.mlp.down_proj.weight"]
    assert (one.n_different, one.n_elements) == (1, 32 * 80)
    assert one.max_abs_diff == pytest.approx(0.5)
    assert np.isnan(found["model.norm.weight"].max_abs_diff)


def test_compare_across_dtypes_and_shapes(tmp_path: Path) -> None:
    a = make_hf(tmp_path / "a", dtype=torch.bfloat16)
    wider = make_hf(tmp_path / "wider", dtype=torch.bfloat16)
    save_file({name: t.float() for name, t in loaded(a).items()}, wider / "model.safetensors")
    assert all(c.is_equal and c.dtypes == ("BF16", "F32") for c in compare(open_source(a), open_source(wider)))
    other = make_hf(tmp_path / "other", intermediate_size=96, n_layers=2)
    problems = [c.problem for c in compare(open_source(a), open_source(other)) if c.problem]
    assert sum("shapes" in p for p in problems) == 6
    assert sum(p.startswith("not in") for p in problems) == 9


MEASURE = """
import resource, sys
from lt_ckpt.formats import ConvertOptions, convert_checkpoint, open_source
convert_checkpoint(open_source(sys.argv[1]), sys.argv[2], ConvertOptions(format=sys.argv[3]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.parametrize("to", ["hf", "lt", pytest.param("dcp", marks=pytest.mark.slow)])
def test_memory_is_that_of_a_few_blocks(tmp_path: Path, to: str) -> None:
    """The model is ten times what may be held: base + twice the largest tensor + 64 MiB."""
    small = make_hf(tmp_path / "small")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "n_heads": 16, "n_kv_heads": 8, "n_layers": 16}
    large = make_hf(tmp_path / "large", vocab_size=4096, **sizes)
    n_bytes = (large / "model.safetensors").stat().st_size
    peaks = []
    for model in (small, large):
        command = [sys.executable, "-c", MEASURE, str(model), str(tmp_path / f"{model.name}-out"), to]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
        peaks.append(int(done.stdout))
    largest = 4096 * 1024 * 2
    assert n_bytes > 6 * (2 * largest + 64 * 2**20)
    assert peaks[1] - peaks[0] < 2 * largest + 64 * 2**20


LISTED = [
    *("phi3, partial", "gpt_neox, parallel", "gpt_neox, sequential", "mixtral, window", "gpt_oss, window 6"),
    *("gemma3_text", "qwen3, yarn, head 12", "starcoder2, window 6", "deepseek_v3, yarn, groups"),
    *("qwen2_moe, dense layers", "qwen3_moe, head 12"),
]
EACH = [*LISTED, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in LISTED)]


def naming_of(case: str) -> tuple[object, ...]:
    """What decides how a family's tensors are named and laid out in files."""
    row = FAMILIES[CASES[case][0]]
    has_experts = "n_experts" in row.keys
    return row.renames, tuple(row.fused), row.has_transposed_experts, row.has_torchtitan_names, has_experts


def test_each_way_to_name_tensors_has_a_listed_case() -> None:
    assert {naming_of(case) for case in LISTED} == {naming_of(case) for case in CASES}


def save_theirs(case: str, folder: Path, **changes: object) -> torch.nn.Module:
    model = make_model(make_config(case, **changes)).float()
    model.save_pretrained(folder)
    return model


def assert_reads(source: Source, theirs: dict[str, torch.Tensor], group: str = "weights") -> None:
    for name, tensor in our_tensors(theirs, source.model).items():
        if group != "weights" and name.endswith("correction_bias"):
            continue  # which is not trained
        assert source.read(name, group=group).tobytes() == tensor.contiguous().numpy().tobytes(), name


@pytest.mark.parametrize("case", EACH)
def test_a_family_through_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(dcp_format, "CHUNK_BYTES", 700)
    monkeypatch.setattr(laid_out_files, "BLOCK_BYTES", 500)
    model = save_theirs(case, tmp_path / "theirs", vocab_size=102)
    source, wanted = open_source(tmp_path / "theirs"), loaded(tmp_path / "theirs")
    assert_reads(source, model.state_dict())
    nxd = () if source.model.features().keys() & set(LACKS) else ("nxd",)
    for kind in ("lt", "pt", "hf", "dcp", *nxd):
        made = tmp_path / f"made.{kind}"
        cut = NxdOptions(tp=2, pp=2, qkv=["gqa", "gqa_fused", "separate"][len(case) % 3])
        convert_checkpoint(source, made, ConvertOptions(format=kind, max_shard_bytes=9000, nxd=cut))
        again = open_source(made, config=tmp_path / "theirs" if kind == "pt" else None)
        assert all(found.is_equal for found in compare(source, again))
        back = convert_checkpoint(again, tmp_path / f"back-{kind}", ConvertOptions(format="hf"))
        assert_same(loaded(back), wanted)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back-lt", **eager)
    ids = torch.arange(40)[None] % 101
    assert torch.equal(exported(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert config_from_hf(exported.config.to_dict()) == source.model
    state = dict(model.state_dict())
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    torch_dcp.load(found, checkpoint_id=tmp_path / "made.dcp", no_dist=True)
    assert_same(found, state)
    groups = {kind: {name: n * tensor for name, tensor in state.items()} for n, kind in enumerate(TORCH_ADAMW.slots, 2)}
    trained = [name for name in state if not name.endswith("correction_bias")]
    moments = {name: {kind: groups[kind][name] for kind in groups} for name in trained}
    torch_dcp.save({"model": state, "optimizer": {"state": moments}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for group, tensors in {"weights": state, **groups}.items():
        assert_reads(open_source(tmp_path / "dcp", config=tmp_path / "theirs"), tensors, group)
    torch_dcp.save(wanted, checkpoint_id=tmp_path / "of files", no_dist=True)  # with a key for each expert
    assert_reads(open_source(tmp_path / "of files", config=tmp_path / "theirs"), state)


def test_a_type_without_a_class_in_transformers_is_written_as_its_family(tmp_path: Path) -> None:
    save_theirs("deepseek_v3, yarn, groups", tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), "auto_map": {"AutoConfig": "configuration_deepseek.A"}}
    path.write_text(json.dumps({**config, "model_type": "kimi_k2"}), encoding="utf-8")
    made = convert_checkpoint(open_source(tmp_path / "theirs"), tmp_path / "made", ConvertOptions(format="hf"))
    exported = transformers.AutoModelForCausalLM.from_pretrained(made, experts_implementation="eager")
    assert_same(loaded(made), loaded(tmp_path / "theirs"))
    assert type(exported).__name__ == config["architectures"][0]


def test_a_cast_leaves_what_is_not_trained_as_it_was(tmp_path: Path) -> None:
    save_theirs("deepseek_v3, yarn, groups", tmp_path / "theirs")
    out = convert_checkpoint(
        open_source(tmp_path / "theirs"), tmp_path / "out", ConvertOptions(format="hf", dtype="BF16")
    )
    found = open_source(out)
    dtypes = {name.endswith("correction_bias"): spec.dtype for name, spec in found.weights.specs.items()}
    assert (dtypes, found.config["torch_dtype"]) == ({True: "F32", False: "BF16"}, "bfloat16")


@pytest.mark.parametrize("tied", [False, True])
def test_old_and_new_names_and_buffers_of_gpt_neox(tmp_path: Path, tied: bool) -> None:
    model = save_theirs("gpt_neox, parallel", tmp_path, tie_word_embeddings=tied)
    weights = loaded(tmp_path)
    assert ("embed_out.weight" in weights) != tied
    layer = "gpt_neox.layers.0.attention"
    buffers = {f"{layer}.{name}": torch.ones(3) for name in ("bias", "masked_bias", "rotary_emb.inv_freq")}
    new = {("lm_head.weight" if name == "embed_out.weight" else name): tensor for name, tensor in weights.items()}
    for held in ({**weights, **buffers}, new):
        save_file(held, tmp_path / "model.safetensors")
        assert_reads(open_source(tmp_path), model.state_dict())
    new.pop(f"{layer}.dense.bias")
    save_file({**new, f"{layer}.query_key_value.scale": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"1 missing: {layer}\.dense\.bias; 1 not expected: {layer}\.query_key"):
        open_source(tmp_path)


@pytest.mark.parametrize("kind", ["hf", "dcp", "nxd"])
def test_parts_of_two_dtypes_are_not_stored_as_one(tmp_path: Path, kind: str) -> None:
    save_theirs("llama" if kind == "nxd" else "phi3, partial", tmp_path / "theirs")
    source, name = open_source(tmp_path / "theirs"), "model.layers.0.mlp.up_proj.weight"
    specs = {**source.weights.specs, name: replace(source.weights.specs[name], dtype="I32")}
    source = replace(source, groups={"weights": replace(source.weights, specs=specs)})
    with pytest.raises(CheckpointError, match=r"gate_up_proj\.weight: its parts are F32 and I32; cast them"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(format=kind, nxd=NxdOptions()))
    assert not (tmp_path / "out").exists()
