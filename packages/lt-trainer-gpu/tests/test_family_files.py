"""Files of every family, as transformers writes them, through every format and back: the same names, bits and logits.

Phi-3 and GPT-NeoX, with several of our tensors in one of theirs, and Mixtral, with one per expert, each time; of the
others one a day.
"""

import datetime
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.distributed.checkpoint as dcp  # noqa: E402
from family_models import CASES, make_config, make_model, our_tensors  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from lt_ckpt import CheckpointError, ConvertOptions, convert_checkpoint, laid_out_files, open_source  # noqa: E402
from lt_ckpt.comparison import compare  # noqa: E402
from lt_ckpt.dcp import format  # noqa: E402
from lt_ckpt.nxd.options import NxdOptions  # noqa: E402
from lt_ckpt.source import Source  # noqa: E402
from lt_model import config_from_hf  # noqa: E402

FUSED = ["phi3, partial", "gpt_neox, parallel", "gpt_neox, sequential", "mixtral, window"]
OTHERS = [case for case in CASES if case not in FUSED]
DRAWN = [*FUSED, OTHERS[datetime.date.today().toordinal() % len(OTHERS)]]
EACH = [*DRAWN, *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS if case not in DRAWN)]

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled", "ignore:.*TypedStorage is deprecated")


def save_theirs(case: str, folder: Path, **changes: object) -> torch.nn.Module:
    model = make_model(make_config(case, **changes)).float()
    model.save_pretrained(folder)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_reads(source: Source, theirs: dict[str, torch.Tensor], group: str = "weights") -> None:
    for name, tensor in our_tensors(theirs, source.model).items():
        assert source.read(name, group=group).tobytes() == tensor.contiguous().numpy().tobytes(), name


@pytest.mark.parametrize("case", EACH)
def test_a_family_through_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(format, "CHUNK_BYTES", 700)
    monkeypatch.setattr(laid_out_files, "BLOCK_BYTES", 500)
    model = save_theirs(case, tmp_path / "theirs")
    source, wanted = open_source(tmp_path / "theirs"), tensors_of(tmp_path / "theirs")
    assert_reads(source, model.state_dict())
    has_experts = source.model.has_experts  # which transformers' modules have fused, so that DCP is refused
    for kind in ("lt", "pt", "hf") if has_experts else ("lt", "dcp", "pt", "hf"):
        made = tmp_path / f"made.{kind}"
        convert_checkpoint(source, made, ConvertOptions(format=kind, max_shard_bytes=9000))
        again = open_source(made, config=tmp_path / "theirs" if kind == "pt" else None)
        assert all(found.is_equal for found in compare(source, again))
        back = convert_checkpoint(again, tmp_path / f"back-{kind}", ConvertOptions(format="hf"))
        assert_same(tensors_of(back), wanted)
    if not has_experts:
        loaded = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        dcp.load(loaded, checkpoint_id=tmp_path / "made.dcp", no_dist=True)
        assert_same(loaded, dict(model.state_dict()))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back-lt", **eager)
    ids = torch.arange(40)[None] % 101
    assert torch.equal(exported(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert config_from_hf(exported.config.to_dict()) == source.model


def test_moments_of_fused_tensors_are_taken_apart(tmp_path: Path) -> None:
    state = save_theirs("gpt_neox, parallel", tmp_path).state_dict()
    first, second = ({name: tensor * n for name, tensor in state.items()} for n in (2, 3))
    moments = {name: {"exp_avg": first[name], "exp_avg_sq": second[name]} for name in state}
    dcp.save({"model": state, "optimizer": {"state": moments}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = open_source(tmp_path / "dcp", config=tmp_path)
    for group, theirs in (("weights", state), ("exp_avg", first), ("exp_avg_sq", second)):
        assert_reads(source, theirs, group)


@pytest.mark.parametrize("tied", [False, True])
def test_old_and_new_names_and_buffers_of_gpt_neox(tmp_path: Path, tied: bool) -> None:
    model = save_theirs("gpt_neox, parallel", tmp_path, tie_word_embeddings=tied)
    weights = tensors_of(tmp_path)
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
