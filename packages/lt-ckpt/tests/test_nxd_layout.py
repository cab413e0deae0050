"""The layout of neuronx-distributed against arrays cut by hand, and the cuts that are refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from nxd_cuts import cut_models

from lt_ckpt import CheckpointError
from lt_ckpt.llama_tensors import tensor_shapes
from lt_ckpt.nxd.layout import layers_per_stage, nxd_layout
from lt_ckpt.nxd.options import NxdOptions
from lt_model import ModelConfig, config_from_hf

DATA = Path(__file__).parent / "data" / "nxd"


def model(config):
    """Every element of every tensor has its own number."""
    arrays, start = {}, 0
    for name, shape in tensor_shapes(config).items():
        size = int(np.prod(shape))
        arrays[name] = np.arange(start, start + size).reshape(shape)
        start += size
    return arrays


def box(offset, shape):
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def pieces(layout):
    return [(file, tensor, piece) for file in layout for tensor in file.tensors for piece in tensor.regions]


def stored(layout, arrays):
    """Path → key → array, made from the layout's pieces."""
    made = {}
    for file in layout:
        made[file.path] = {tensor.key: np.full(tensor.shape, -1) for tensor in file.tensors}
        assert len(made[file.path]) == len(file.tensors)
    for file, tensor, piece in pieces(layout):
        made[file.path][tensor.key][box(piece.stored_offset, piece.shape)] = arrays[piece.name][
            box(piece.offset, piece.shape)
        ]
    return made


@settings(max_examples=80, deadline=None)
@given(cut_models())
def test_cut_and_put_together_is_the_model_again(cut):
    config, options = cut
    layout, arrays = nxd_layout(config, options), model(config)
    made = stored(layout, arrays)
    assert all((array >= 0).all() for held in made.values() for array in held.values())
    back = {name: np.full(array.shape, -1) for name, array in arrays.items()}
    for file, tensor, piece in pieces(layout):
        back[piece.name][box(piece.offset, piece.shape)] = made[file.path][tensor.key][
            box(piece.stored_offset, piece.shape)
        ]
    assert all((back[name] == arrays[name]).all() for name in arrays)
    assert len(made) == options.tp * options.pp


@settings(max_examples=80, deadline=None)
@given(cut_models())
def test_every_rank_has_what_its_layers_ask_for(cut):
    """Each tensor as NxD's layers take it, cut here with numpy from the whole ones and without the layout's rules."""
    config, options = cut
    arrays, tp, d = model(config), options.tp, config.head_width
    made = stored(nxd_layout(config, options), arrays)
    heads, kv_heads = config.n_heads, config.n_kv_heads
    for path, held in made.items():
        t, p = (int(path.split(f"{axis}_rank_")[1][:2]) for axis in ("tp", "pp"))
        layers = sorted({int(key.split(".")[2]) for key in held if ".layers." in key})
        assert ("model.embed_tokens.weight" in held) == (p == 0)
        assert ("model.norm.weight" in held) == ("lm_head.weight" in held) == (p == options.pp - 1)
        for layer in layers:
            at = f"model.layers.{layer}."
            q, k, v = (arrays[f"{at}self_attn.{x}_proj.weight"].reshape(-1, d, config.hidden_size) for x in "qkv")
            out = arrays[f"{at}self_attn.o_proj.weight"].reshape(config.hidden_size, heads, d)
            if options.is_gqa:
                # The ranks that share a key/value head take its query heads in turn, in the order of the ranks.
                owner = np.tile(np.arange(kv_heads), tp // kv_heads)
                kv = [int(owner[t])]
                turn = [r for r in range(tp) if owner[r] == owner[t]].index(t)
                group = [h for h in range(heads) if h * kv_heads // heads == owner[t]]
                mine = group[turn * (heads // tp) : (turn + 1) * (heads // tp)]
            else:
                kv = list(range(t * kv_heads // tp, (t + 1) * kv_heads // tp))
                mine = list(range(t * heads // tp, (t + 1) * heads // tp))
            rows = [a.reshape(-1, config.hidden_size) for a in (q[mine], k[kv], v[kv])]
            keys = {
                "separate": [f"{x}_proj.weight" for x in "qkv"],
                "gqa": [f"qkv_proj.weight_{x}" for x in "qkv"],
                "coalesced": ["qkv_proj.weight"],
                "gqa_fused": ["qkv_proj.weight_qkv"],
            }[options.qkv]
            wanted = rows if len(keys) == 3 else [np.concatenate(rows)]
            for key, array in zip(keys, wanted, strict=True):
                assert (held[f"{at}self_attn.{key}"] == array).all()
            assert (held[f"{at}self_attn.o_proj.weight"] == out[:, mine].reshape(config.hidden_size, -1)).all()
            gate, up = (np.split(arrays[f"{at}mlp.{x}_proj.weight"], tp)[t] for x in ("gate", "up"))
            assert (held[f"{at}mlp.gate_up_proj.weight"] == np.concatenate([gate, up])).all()
            down = np.split(arrays[f"{at}mlp.down_proj.weight"], tp, axis=1)[t]
            assert (held[f"{at}mlp.down_proj.weight"] == down).all()
            for norm in ("input_layernorm", "post_attention_layernorm"):
                assert (held[f"{at}{norm}.weight"] == arrays[f"{at}{norm}.weight"]).all()
        for key in ("model.embed_tokens.weight", "lm_head.weight"):
            if key in held:
                assert (held[key] == np.split(arrays[key], tp)[t]).all()
        assert len(held) == len(layers) * (len(keys) + 5) + (p == 0) + 2 * (p == options.pp - 1)


@pytest.mark.parametrize("qkv", ["gqa", "gqa_fused"])
def test_heads_of_each_rank(qkv):
    query, key_value = [(0, 1), (4, 5), (2, 3), (6, 7)], [0, 1, 0, 1]
    config = ModelConfig(vocab_size=4, hidden_size=16, intermediate_size=4, n_heads=8, n_kv_heads=2, n_layers=1)
    arrays = model(config)
    options = NxdOptions(tp=4, kv_size_multiplier=2, qkv=qkv)
    attention = "model.layers.0.self_attn."
    whole = {x: arrays[f"{attention}{x}_proj.weight"].reshape(-1, 2, 16) for x in "qkv"}
    for rank, held in enumerate(stored(nxd_layout(config, options), arrays).values()):
        keys = ["weight_q", "weight_k", "weight_v"] if qkv == "gqa" else ["weight_qkv"]
        rows = np.concatenate([held[f"{attention}qkv_proj.{key}"] for key in keys])
        heads = [*(whole["q"][h] for h in query[rank]), whole["k"][key_value[rank]], whole["v"][key_value[rank]]]
        assert (rows == np.concatenate(heads)).all()
        columns = arrays[f"{attention}o_proj.weight"].reshape(16, 8, 2)[:, list(query[rank])].reshape(16, -1)
        assert (held[f"{attention}o_proj.weight"] == columns).all()


def test_stages_give_the_remainder_to_the_last_and_interleave_chunks():
    assert layers_per_stage(5, 3) == ((0,), (1, 2), (3, 4))
    assert layers_per_stage(8, 2) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layers_per_stage(8, 2, 2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert layers_per_stage(10, 2, 2) == ((0, 1, 4, 5, 6), (2, 3, 7, 8, 9))
    assert layers_per_stage(80, 8)[7] == tuple(range(70, 80))


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        (NxdOptions(), ["model/dp_rank_00_tp_rank_00_pp_rank_00.pt"]),
        (NxdOptions(tag="step_7"), ["step_7/model/dp_rank_00_tp_rank_00_pp_rank_00.pt"]),
        (NxdOptions(layout="v1"), ["tp_rank_00_pp_rank_00/checkpoint.pt"]),
        (NxdOptions(layout="v1", xser=True), ["tp_rank_00_pp_rank_00"]),
        (NxdOptions(tp=101), None),
    ],
)
def test_paths(options, paths):
    config = ModelConfig(
        vocab_size=101, hidden_size=202, intermediate_size=101, n_heads=101, n_kv_heads=101, n_layers=1
    )
    found = [file.path for file in nxd_layout(config, options)]
    assert found == (paths or [f"model/dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt" for t in range(101)])
    assert paths or found[100].endswith("tp_rank_100_pp_rank_00.pt")


LLAMA = ModelConfig(vocab_size=96, hidden_size=96, intermediate_size=96, n_heads=24, n_kv_heads=6, n_layers=4)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"vocab_size": 97}, {"tp": 2}, r"model.embed_tokens.weight: dim 0 of shape .97, 96. does not divide into 2"),
        ({"intermediate_size": 97}, {"tp": 2}, r"mlp.gate_proj.weight: dim 0 of shape .97, 96. does not divide into 2"),
        ({}, {"tp": 16}, "q_proj.weight: 24 query heads do not divide by tp 16"),
        ({}, {"tp": 12}, r"k_proj.weight: 6 kv heads .* tp 12; choose qkv_linear with kv_size_multiplier 2"),
        ({}, {"tp": 4}, r"k_proj.weight: 6 kv heads .* a tp that is a multiple of 6, or a tp that divides 6"),
        ({}, {"tp": 6, "kv_size_multiplier": 2}, r"k_proj.weight: kv_size_multiplier 2 needs qkv_linear"),
        ({}, {"tp": 6, "qkv": "coalesced"}, r"k_proj.weight: coalesce_qkv .* not 6 and 24"),
        ({}, {"tp": 12, "qkv": "gqa"}, r"k_proj.weight: .* 6 x 1 is not 12; choose kv_size_multiplier 2"),
        ({}, {"tp": 6, "kv_size_multiplier": 2, "qkv": "gqa"}, r"6 x 2 is not 6; choose kv_size_multiplier 1"),
        (
            {},
            {"tp": 4, "kv_size_multiplier": 1, "qkv": "gqa_fused"},
            r"6 x 1 is not 4; choose a tp that is a multiple of 6",
        ),
        ({}, {"pp": 5}, r"model.layers.4: 5 stages of 1 chunks need at least 5 layers, the model has 4"),
        ({}, {"pp": 2, "virtual_pp": 3}, r"need at least 6 layers"),
    ],
)
def test_cuts_that_cannot_be_right_are_refused(changes, options, message):
    config = ModelConfig.from_dict({**LLAMA.to_dict(), **changes})
    with pytest.raises(CheckpointError, match=message):
        nxd_layout(config, NxdOptions(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 0},
        {"pp": True},
        {"qkv": "fused"},
        {"tag": "a/b"},
        {"tag": ".."},
        {"tag": "x", "layout": "v1"},
    ],
)
def test_options_are_checked(options):
    (name, value), *_ = options.items()
    with pytest.raises(CheckpointError, match=re.escape(f"{name} = {value!r}: ")):
        NxdOptions(**options)


def test_the_optimizers_names_are_the_keys_of_the_layout():
    case = DATA / "llama2-mha-tp2-dp2-zero1-steps"
    config = config_from_hf(json.loads((case / "hf-start" / "config.json").read_text()))
    groups = json.loads((case / "steps.json").read_text())["param_groups"]
    keys = [tensor.key for tensor in nxd_layout(config, NxdOptions(tp=2))[1].tensors]
    assert sorted(groups[0]["names"] + groups[1]["names"]) == sorted(keys)
