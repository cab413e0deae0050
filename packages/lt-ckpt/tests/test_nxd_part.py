"""Training checkpoints whose files are NxD's: equal to NxD's own, and checkpoints of ours in every respect."""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from nxd_cuts import cut_models
from nxd_trees import everything, load, same, save_nxd

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    Shard,
    begin_save,
    commit_save,
    comparison,
    find_latest_valid,
    prune_checkpoints,
    verify,
    write_rank_files,
)
from lt_ckpt.dtypes import cast
from lt_ckpt.formats import ConvertOptions, convert_checkpoint, detect_format, open_source, read_config
from lt_ckpt.llama_tensors import HEAD, stored_shapes
from lt_ckpt.nxd.format import open_nxd
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.rank_writer import NxdRankWriter, optimizer_state_keys
from lt_ckpt.nxd.zero1 import shard_rows
from lt_ckpt.save import discard_save
from lt_model import ModelConfig, config_from_hf

DATA = Path(__file__).parent / "data" / "nxd"
STEPS = DATA / "llama2-mha-tp2-dp2-zero1-steps"
CONFIG = STEPS / "hf-start" / "config.json"
SETTINGS = tuple(
    {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": decay, "initial_lr": 0.1} for decay in (0.1, 0.0)
)
State = dict[str, dict[str, tuple[str, np.ndarray]]]
"""Group → tensor of the model → dtype and its bytes by row."""


def grid(options: NxdOptions, dp: int) -> Iterator[tuple[int, int, int]]:
    """(dp, tp, pp) of each rank, in NxD's order of ranks."""
    return ((d, t, p) for p in range(options.pp) for d in range(dp) for t in range(options.tp))


def local(tensor: Any, state: Mapping[str, tuple[str, np.ndarray]]) -> tuple[str, np.ndarray]:
    """A rank's tensor, put together of boxes of the model's; rows of bytes."""
    dtype, parts = "", []
    for piece in tensor.regions:
        dtype, whole = state[piece.name]
        box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
        parts.append(np.ascontiguousarray(whole[box]))
    return dtype, np.concatenate(parts)


def shard(group: str, key: str, dtype: str, shape: tuple[int, ...], first: int, rows: np.ndarray) -> Shard:
    data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    zeros = (0,) * (len(shape) - 1)
    return Shard(
        group=group,
        name=key,
        dtype=dtype,
        global_shape=shape,
        offset=(first, *zeros),
        shape=(len(rows), *shape[1:]),
        data=lambda: data,
    )


def shards_of(part: NxdRankWriter, state: State) -> list[Shard]:
    """What a rank at this place holds of a state of the whole model."""
    found: list[Shard] = []
    if part.dp_rank == 0:
        for tensor in part.model_tensors():
            dtype, rows = local(tensor, state["weights"])
            found.append(shard("weights", tensor.key, dtype, tensor.shape, 0, rows))
    if part.dp_rank and not part.zero1:
        return found
    for group in [kind for kind in state if kind != "weights"]:
        keys = {key for keys in part.param_group_keys for key in keys}
        for tensor in (tensor for tensor in part.model_tensors() if tensor.key in keys):
            dtype, rows = local(tensor, state[group])
            first, held, _ = shard_rows(tensor.shape[0], *((part.dp, part.dp_rank) if part.zero1 else (1, 0)))
            found.append(shard(group, tensor.key, dtype, tensor.shape, first, rows[first : first + held]))
    return found


def parts_of(config: ModelConfig, options: NxdOptions, dp: int, **more: Any) -> list[NxdRankWriter]:
    made: list[NxdRankWriter] = []
    for dp_rank, tp_rank, pp_rank in grid(options, dp):
        at = {"dp": dp, "dp_rank": dp_rank, "tp_rank": tp_rank, "pp_rank": pp_rank}
        keys = optimizer_state_keys(config, options, tp_rank, pp_rank)
        groups = ([k for k in keys if "norm" not in k], [k for k in keys if "norm" in k])
        named = {"param_group_settings": SETTINGS, "param_group_keys": groups, "config": config, "options": options}
        made.append(NxdRankWriter(**{**at, **named, **more}))
    return made


def save(root: Path, parts: list[NxdRankWriter], state: State, *, step: int = 3) -> Path:
    tmp = begin_save(root, step=step, world_size=len(parts))
    for rank, part in enumerate(parts):
        write_rank_files(tmp, rank=rank, shards=shards_of(part, state), writer=part)
    meta = CheckpointMetadata(step=step, model=parts[0].config.to_dict(), tokenizer_files={"tokenizer.json": b"{}"})
    return commit_save(tmp, world_size=len(parts), metadata=meta)


def random_state(config: ModelConfig, *, tied_head: bool, masters: bool, seed: int = 0) -> State:
    rng, shapes = np.random.default_rng(seed), stored_shapes(config, head_is_stored=True)
    kinds = ("weights", "exp_avg", "exp_avg_sq", *(["master"] if masters else []))
    state: State = {}
    for kind in kinds:
        dtype = "BF16" if kind == "weights" and masters else "F32"
        state[kind] = {}
        for name, shape in shapes.items():
            values = rng.standard_normal(shape).astype("<f4")
            if dtype == "BF16":
                values = cast(values.reshape(-1).view(np.uint8), "F32", "BF16").view("<u2").reshape(shape)
            state[kind][name] = (dtype, values)
        if tied_head:
            state[kind][HEAD] = state[kind]["model.embed_tokens.weight"]
    return state


def wanted(state: State) -> dict[tuple[str, str], tuple[str, bytes]]:
    return {
        (kind, name): (dtype, array.tobytes())
        for kind, tensors in state.items()
        for name, (dtype, array) in tensors.items()
    }


def nxds_own(folder: Path) -> tuple[list[NxdRankWriter], list[list[Shard]]]:
    """The four ranks of the reference run, each with what NxD's own files of it hold."""
    config = config_from_hf(read_config(CONFIG))
    tree = load(folder / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    given = tuple({k: v for k, v in group.items() if k != "params"} for group in tree["param_groups"])
    small = {"scheduler_state": load(folder / "scheduler.pt"), "user_content": load(folder / "user_content.pt")}
    parts = parts_of(config, NxdOptions(tp=2), 2, param_group_settings=given, step=3, **small)
    every: list[list[Shard]] = []
    for part in parts:
        found: list[Shard] = []
        names = f"tp_rank_{part.tp_rank:02d}_pp_rank_00.pt"
        if part.dp_rank == 0:
            for key, tensor in load(folder / "model" / f"dp_rank_00_{names}").items():
                found.append(of_torch("weights", key, tensor, tuple(tensor.shape), 0))
        tree = load(folder / "optim" / f"dp_rank_{part.dp_rank:02d}_{names}")
        for number, key in enumerate(key for keys in part.param_group_keys for key in keys):
            shape = tuple(tree["shape_info"][number])
            first, held, _ = shard_rows(shape[0], 2, part.dp_rank)
            kinds = {**tree["base_state"][number], "master": tree["sharded_master_weights"][number]}
            found += [of_torch(kind, key, kinds[kind][:held], shape, first) for kind in kinds if kind != "step"]
        every.append(found)
    return parts, every


def of_torch(group: str, key: str, tensor: Any, shape: tuple[int, ...], first: int) -> Shard:
    import torch

    dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype]
    raw = tensor.contiguous().view(torch.uint8).numpy().reshape(len(tensor), -1)
    return shard(group, key, dtype, shape, first, raw)


@pytest.mark.parametrize("xser", [False, True], ids=["plain", "xser"])
@pytest.mark.parametrize("name", ["nxd-plain", "nxd-plain-fp32"])
def test_our_checkpoint_holds_the_files_that_nxd_itself_writes(name, xser, tmp_path):
    folder = STEPS / name / "step_3"
    parts, given_shards = nxds_own(folder)
    tmp = begin_save(tmp_path, step=3, world_size=4)
    for rank, (part, shards) in enumerate(zip(parts, given_shards, strict=True)):
        cut = replace(part, options=replace(part.options, xser=xser))
        write_rank_files(tmp, rank=rank, shards=shards, writer=cut)
    made = commit_save(tmp, world_size=4, metadata=CheckpointMetadata(step=3, model=parts[0].config.to_dict()))
    assert verify(made).is_ok
    theirs = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert len(theirs) == 10
    for path in theirs:
        if path.suffix == ".pt":
            same(load(made / path), load(folder / path))
        else:
            assert (made / path).read_bytes() == (folder / path).read_bytes()
    assert xser == any(path.suffix == ".tensors" for path in (made / "model").iterdir())
    # Read by our manifest, by the layout of NxD, and from NxD's own files, it is one and the same state.
    read = by_nxds_names(everything(open_source(made)))
    opened = open_nxd(made, config=open_source(made).config, optimizer=True)
    assert (opened.format_info["xser"], opened.format_info["dp"], opened.format_info["step"]) == (xser, 2, 3)
    assert read == everything(opened) == everything(open_source(folder, config=CONFIG, optimizer=True))


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(run=cut_models(), dp=st.sampled_from([1, 2, 3, 7]), zero1=st.booleans(), masters=st.booleans())
def test_any_cut_of_any_model_comes_back_bit_for_bit(run, dp, zero1, masters, fast_path):
    config, options = run[0], replace(run[1], layout="v2", tag="")
    assume(dp * options.tp * options.pp <= 24)
    root = fast_path / "cut"
    shutil.rmtree(root, ignore_errors=True)
    state = random_state(config, tied_head=config.tie_word_embeddings, masters=masters)
    made = save(root, parts_of(config, options, dp, zero1=zero1, step=3), state)
    assert verify(made).is_ok
    source = open_source(made)
    read = own(by_nxds_names(everything(source)), config)
    assert read == own(wanted(state), config)
    assert (HEAD in Checkpoint.open(made).names("weights")) == (not config.tie_word_embeddings)
    plain = not zero1 and not masters
    by_layout = open_nxd(made, config=source.config, optimizer=not plain)
    kinds = {"weights"} if plain else set(state)
    assert own(everything(by_layout), config) == {k: v for k, v in read.items() if k[0] in kinds}
    # Masters are the weights, for whoever goes on from them.
    assert ("cast_weights" in source.groups) == masters
    assert Checkpoint.open(made).specs("weights")["model.norm.weight"].dtype == "F32"


def by_nxds_names(found: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """Kinds of state as NxD's files have them: where there are masters, the weights are the rounded ones."""
    cast_too = any(kind == "cast_weights" for kind, _ in found)
    names = {"weights": "master", "cast_weights": "weights"} if cast_too else {}
    return {(names.get(kind, kind), name): value for (kind, name), value in found.items()}


def own(found: Mapping[tuple[str, str], Any], config: ModelConfig) -> dict[tuple[str, str], Any]:
    """Without a tied head, which is the embedding."""
    return {at: value for at, value in found.items() if not (config.tie_word_embeddings and at[1] == HEAD)}


def test_it_is_a_checkpoint_of_ours_for_all_that_follows(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    paths = [save_nxd(root, step) for step in (1, 2, 3)]
    assert detect_format(tmp_path / "run") == detect_format(paths[0]) == "lt"
    found, rejected = find_latest_valid(root)
    assert (found and found.step, rejected) == (3, [])
    convert_checkpoint(open_source(paths[2]), tmp_path / "hf", ConvertOptions(format="hf"))
    exported = open_source(tmp_path / "hf")
    for name, spec in exported.weights.specs.items():
        assert spec.dtype == "F32"
        assert (exported.read(name).view("<f4") == 3).all()
    # A folder that somebody put something into is never removed.
    (paths[0] / "model" / "mine.txt").write_text("mine", encoding="utf-8")
    assert verify(paths[0]).extra_files == ("model/mine.txt",)
    assert prune_checkpoints(root, keep_last=1) == [paths[1]]
    assert sorted(os.listdir(root)) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("place", [0, -1])
def test_copies_that_have_drifted_apart_are_found_when_they_are_made_one(tmp_path, models, place, monkeypatch):
    monkeypatch.setattr(comparison, "BLOCK_BYTES", 4 * 4)  # some elements at a time
    config = open_source(models.make(tmp_path / "model")).model
    parts = parts_of(config, NxdOptions(tp=2), 1)
    state, other = (random_state(config, tied_head=False, masters=False) for _ in range(2))
    name = "model.layers.1.input_layernorm.weight"
    dtype, values = other["weights"][name]
    values[place] += np.float32(1)
    other["weights"][name] = (dtype, values)
    tmp = begin_save(tmp_path / "run", step=1, world_size=2)
    for rank, (part, held) in enumerate(zip(parts, (state, other), strict=True)):
        write_rank_files(tmp, rank=rank, shards=shards_of(part, held), writer=part)
    made = commit_save(tmp, world_size=2, metadata=CheckpointMetadata(step=1, model=config.to_dict()))
    with pytest.raises(CheckpointError, match=r"input_layernorm.*diverged"):
        convert_checkpoint(open_source(made), tmp_path / "hf", ConvertOptions(format="hf"))
    assert not (tmp_path / "hf").exists()


def test_a_rank_with_other_tensors_never_becomes_a_checkpoint(tmp_path, models):
    config = open_source(models.make(tmp_path / "model")).model
    (part,) = parts_of(config, NxdOptions(), 1)
    good = shards_of(part, random_state(config, tied_head=False, masters=True))
    embed, moment = (next(s for s in good if s.group == group) for group in ("weights", "exp_avg"))
    rows = replace(moment, shape=(31, 16), data=lambda: np.zeros(31 * 64, np.uint8))
    for shards in (
        [s for s in good if s is not embed],
        [s for s in good if s is not moment],
        [*good, replace(embed, name="model.surprise")],
        [*good, replace(embed, group="noise")],
        [*good, embed],
        [rows if s is moment else s for s in good],
    ):
        tmp = begin_save(tmp_path / "run", step=1, world_size=1)
        with pytest.raises((AssertionError, KeyError)):
            write_rank_files(tmp, rank=0, shards=shards, writer=part)
        assert [path.name for path in tmp.glob("*-0*")] == ["failed-00000"]
        discard_save(tmp)
