"""ZeRO-1 states written by neuronx-distributed itself: assembled, and weights from the master weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from nxd_trees import load

from lt_ckpt import CheckpointError
from lt_ckpt.conversion import convert
from lt_ckpt.dtypes import cast
from lt_ckpt.formats import ConvertOptions, convert_checkpoint
from lt_ckpt.hf.format import hf_target
from lt_ckpt.nxd.format import open_nxd
from lt_ckpt.nxd.layout import nxd_layout
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.zero1 import has_decay
from lt_ckpt.tensorfile import TensorSpec
from lt_model import config_from_hf, param_specs

DATA = Path(__file__).parent / "data" / "nxd"
ZERO, STEPS = DATA / "llama2-mha-tp2-dp2-zero1", DATA / "llama2-mha-tp2-dp2-zero1-steps"
CASES = [
    pytest.param(ZERO / "nxd-plain", id="plain"),
    pytest.param(ZERO / "nxd-xser", id="xser"),
    pytest.param(STEPS / "nxd-plain", id="steps"),
    pytest.param(STEPS / "nxd-plain-fp32", id="steps-fp32"),
]
ORDER = [name for group in json.loads((STEPS / "steps.json").read_text())["param_groups"] for name in group["names"]]
CONFIG = json.loads((STEPS / "hf-start" / "config.json").read_text())
HIDDEN = 32


def name(d, t):
    return f"dp_rank_{d:02d}_tp_rank_{t:02d}_pp_rank_00.pt"


def by_hand(folder, kind):
    """Model tensor → its state, put together with torch: over DP, less the padding, then over TP."""
    local = []
    for t in range(2):
        shards = [load(folder / "optim" / name(d, t)) for d in range(2)]
        local.append({})
        for i, key in enumerate(ORDER):
            parts = [s["sharded_master_weights"][i] if kind == "master" else s["base_state"][i][kind] for s in shards]
            local[t][key] = torch.cat(parts)[: shards[0]["shape_info"][i][0]]
    made = {}
    for key in ORDER:
        both = [rank[key] for rank in local]
        if "gate_up" in key:
            gates, ups = zip(*(tensor.chunk(2) for tensor in both), strict=True)
            made[key.replace("gate_up", "gate")] = torch.cat(gates)
            made[key.replace("gate_up", "up")] = torch.cat(ups)
        elif "o_proj" in key or "down_proj" in key:
            made[key] = torch.cat(both, 1)
        else:
            made[key] = both[0] if "norm" in key else torch.cat(both)
    return made


def read(opened, group, key):
    return opened.read(key, group=group)


@pytest.mark.parametrize("folder", CASES)
def test_the_models_state_is_that_of_all_shards(folder):
    opened = open_nxd(folder, config=CONFIG, optimizer=True)
    assert set(opened.groups) == {"weights", "exp_avg", "exp_avg_sq", "master"}
    assert opened.format_info["dp"] == 2
    for kind in ("exp_avg", "exp_avg_sq", "master"):
        wanted = by_hand(opened.root, kind)
        assert list(opened.groups[kind].specs) == list(opened.weights.specs)
        assert set(opened.groups[kind].specs) == set(wanted)
        for key, tensor in wanted.items():
            assert opened.groups[kind].specs[key] == TensorSpec("F32", tuple(tensor.shape))
            assert read(opened, kind, key).tobytes() == tensor.contiguous().numpy().tobytes(), (kind, key)


def unlike_copies(opened, kind):
    """The tensors of which two ranks hold different bytes."""
    group, unlike = opened.groups[kind], set()
    norms = {key: 2 for key in group.specs if "norm" in key}
    assert {key: len(stored) for key, stored in group.replicas.items()} == norms
    for key, copies in group.replicas.items():
        for stored in copies:
            box = stored.offset, stored.shape
            copy = opened.read_slices((stored,), group.specs[key], box, key)
            if copy.tobytes() != opened.read(key, box, group=kind).tobytes():
                unlike.add(key)
    return unlike


def test_copies_of_replicated_tensors_hold_the_same_bytes():
    """But not in the other case, which was trained with gradients that lack the sum over tensor-parallel ranks."""
    for part in ("nxd-plain", "nxd-plain-fp32"):
        opened = open_nxd(STEPS / part, config=CONFIG, optimizer=True)
        assert not any(unlike_copies(opened, kind) for kind in ("exp_avg", "exp_avg_sq", "master"))
    opened = open_nxd(ZERO / "nxd-plain", config=CONFIG, optimizer=True)
    assert "model.layers.0.input_layernorm.weight" in unlike_copies(opened, "exp_avg")


@pytest.mark.parametrize("folder", CASES)
def test_masters_cast_to_the_weights_dtype_are_the_weights(folder, tmp_path):
    saved, masters = open_nxd(folder, config=CONFIG), open_nxd(folder, config=CONFIG, master_weights=True)
    assert set(masters.groups) == {"weights"}
    for key, spec in saved.weights.specs.items():
        assert masters.weights.specs[key] == TensorSpec("F32", spec.shape)
        recovered = cast(read(masters, "weights", key), "F32", spec.dtype)
        assert recovered.tobytes() == read(saved, "weights", key).tobytes(), key
    outs = [
        convert(opened, hf_target(opened, dtype="BF16"), tmp_path / kind)
        for kind, opened in (("saved", saved), ("masters", masters))
    ]
    files = [out / "model.safetensors" for out in outs]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_checkpoint_that_has_its_weights_in_masters_alone(tmp_path):
    """As NxD saves with avoid_saving_lower_precision_weights: references and descriptions, and no tensors."""
    folder = tmp_path / "step_3"
    shutil.copytree(ZERO / "nxd-xser" / "step_3", folder)
    for path in (folder / "model").glob("*.tensors"):
        shutil.rmtree(path)
    with pytest.raises(CheckpointError, match=r"pp_rank_00.pt: its tensors were not saved .* master weights"):
        open_nxd(folder, config=CONFIG)
    masters, whole = open_nxd(folder, config=CONFIG, master_weights=True), open_nxd(ZERO / "nxd-xser", config=CONFIG)
    for key, spec in whole.weights.specs.items():
        recovered = cast(read(masters, "weights", key), "F32", spec.dtype)
        assert recovered.tobytes() == read(whole, "weights", key).tobytes()


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ZERO / "nxd-plain" / "step_3", tmp_path / "step_3")
    return tmp_path / "step_3"


def change(folder, act, ranks=((1, 1),)):
    for d, t in ranks:
        path = folder / "optim" / name(d, t)
        tree = torch.load(path, weights_only=True)
        act(tree)
        path.unlink()
        torch.save(tree, path)


EVERY = [(d, t) for d in range(2) for t in range(2)]


def refuse(folder, match, **changes):
    with pytest.raises(CheckpointError, match=match):
        open_nxd(folder, config={**CONFIG, **changes}, optimizer=True)


def test_a_missing_shard_is_named(copy):
    (copy / "optim" / name(0, 1)).unlink()
    refuse(copy, rf"optim/{name(0, 1)}: is missing; the other files are of dp 2, tp")
    (copy / "optim" / name(1, 1)).unlink()
    refuse(copy, rf"optim/{name(0, 1)}: reading failed: No such file")
    shutil.rmtree(copy / "optim")
    refuse(copy, r"has no optimizer state")
    assert open_nxd(copy, config=CONFIG)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda tree: tree["base_state"][3].update(exp_avg=torch.zeros(9, 32)),
            r"exp_avg of model.layers.0.self_attn.v_proj.weight has shape \[9, 32\], .* \[8, 32\]",
        ),
        (lambda tree: tree["sharded_master_weights"].pop(4), "has master for only some of its 19 tensors"),
        (lambda tree: tree.pop("sharded_master_weights"), rf"other tensors or kinds of state than optim/{name(0, 1)}"),
        (lambda tree: tree["base_state"][0].update(exp_avg=3), "exp_avg of tensor 0 is a int, not a tensor"),
        (lambda tree: tree["base_state"].update({0: 3}), "is damaged"),
        (lambda tree: tree["param_groups"][0]["params"].append(19), "number the tensors differently"),
        (lambda tree: tree.pop("shape_info"), "shape_info"),
        (lambda tree: tree.pop("base_state"), "is not an NxD ZeRO-1 optimizer state"),
        (
            lambda tree: tree["base_state"][5].update(step=torch.tensor(4.0)),
            rf"different steps, from different saves: 3\.0 in optim/{name(0, 0)}, 4\.0 in optim/{name(1, 1)}",
        ),
    ],
)
def test_a_shard_that_is_not_like_the_others_is_named(copy, act, message):
    change(copy, act)
    refuse(copy, rf"{name(1, 1)}: .*{message}" if "saves" not in message else message)


def test_another_models_optimizer_is_noticed(copy):
    def swap(tree):
        tree["shape_info"][0], tree["shape_info"][1] = tree["shape_info"][1], tree["shape_info"][0]

    change(copy, swap, EVERY)
    refuse(copy, r"the shapes of its 19 tensors match the model's in no known order")


def test_masters_that_are_not_there(copy):
    change(copy, lambda tree: tree.pop("sharded_master_weights"), EVERY)
    with pytest.raises(CheckpointError, match="its optimizer has no master weights"):
        open_nxd(copy, config=CONFIG, master_weights=True)
    assert set(open_nxd(copy, config=CONFIG, optimizer=True).groups) == {"weights", "exp_avg", "exp_avg_sq"}


def renumber(tree, numbers, groups):
    """Gives the tensors other numbers: new number → old one."""
    for part in ("base_state", "shape_info", "sharded_master_weights"):
        tree[part] = {new: tree[part][old] for new, old in enumerate(numbers)}
    for group, params in zip(tree["param_groups"], groups, strict=True):
        group["params"] = params


def test_a_program_that_decays_the_norms_numbers_in_model_order(copy):
    model_order = sorted(ORDER, key=[t.key for t in nxd_layout(config(), NxdOptions(tp=2))[0].tensors].index)
    numbers = [ORDER.index(key) for key in model_order]
    change(copy, lambda tree: renumber(tree, numbers, [list(range(19)), []]), EVERY)
    opened, before = (open_nxd(path, config=CONFIG, optimizer=True) for path in (copy, ZERO / "nxd-plain"))
    for key in opened.weights.specs:
        assert read(opened, "exp_avg", key).tobytes() == read(before, "exp_avg", key).tobytes()
    assert "param_groups" not in opened.format_info
    assert len(before.format_info["param_groups"]) == 2


def test_norms_and_biases_are_left_out_of_decay():
    keys = ("mlp.down_proj.weight", "self_attn.qkv_proj.bias_q", "self_attn.q_norm.weight", "input_layernorm.weight")
    assert [has_decay(key) for key in keys] == [True, False, False, False]


@pytest.mark.parametrize("groups", [[[0], list(range(1, 19))], [list(range(18)), [18]]], ids=["model", "decay"])
def test_other_groups_than_those_of_decay_are_not_handed_on(copy, groups):
    """Which tensor had which settings would be lost: a state made of it would decay others."""
    model_order = sorted(ORDER, key=[t.key for t in nxd_layout(config(), NxdOptions(tp=2))[0].tensors].index)
    numbers = [ORDER.index(key) for key in (model_order if groups[0] == [0] else ORDER)]
    change(copy, lambda tree: renumber(tree, numbers, groups), EVERY)
    opened = open_nxd(copy, config=CONFIG, optimizer=True)
    assert "param_groups" not in opened.format_info
    with pytest.raises(CheckpointError, match="settings of the optimizer"):
        convert_checkpoint(
            opened, copy / "out", ConvertOptions(format="nxd", nxd=NxdOptions(tp=2), dp=2, allow_replica_mismatch=True)
        )


def test_a_tied_head_has_no_number_of_its_own(copy):
    numbers = [i for i, key in enumerate(ORDER) if key != "lm_head.weight"]
    change(copy, lambda tree: renumber(tree, numbers, [list(range(13)), list(range(13, 18))]), EVERY)
    tied = {**CONFIG, "tie_word_embeddings": True}
    opened = open_nxd(copy, config=tied, optimizer=True)
    for kind in ("exp_avg", "master"):
        embed = read(opened, kind, "model.embed_tokens.weight").tobytes()
        assert read(opened, kind, "lm_head.weight").tobytes() == embed
    refuse(copy, "the shapes of its 18 tensors match the model's in no known order")


def config(**changes):
    return config_from_hf({**CONFIG, **changes})


@pytest.mark.parametrize("folder", CASES)
def test_a_checkpoint_of_ours_gets_moments_masters_and_step(folder, tmp_path):
    """What a run goes on from: strictly the groups and tensors that a trainer expects, at the step of the optimizer."""
    from lt_ckpt import Checkpoint
    from lt_ckpt.cli.convert import convert as command
    from lt_ckpt.records import TORCH_ADAMW

    config = STEPS / "hf-start" / "config.json"
    apart = ZERO in folder.parents  # its norms' gradients lack the sum over ranks, so the copies differ
    if apart:
        with pytest.raises(CheckpointError, match=r"its replica of model\.\S+ differs .*--allow-replica-mismatch"):
            command(str(folder), tmp_path / "no", "lt", config, master_weights=True, optimizer=True)
        assert not (tmp_path / "no").exists()
    command(
        str(folder), tmp_path / "ck", "lt", config, master_weights=True, optimizer=True, allow_replica_mismatch=apart
    )
    made = Checkpoint.open(tmp_path / "ck" / "step-00000003")
    assert made.manifest.optimizer == TORCH_ADAMW
    specs = {p.name: TensorSpec("F32", p.shape) for p in param_specs(config_from_hf(CONFIG))}
    made.check_specs(dict.fromkeys(("weights", *TORCH_ADAMW.slots), specs))
    assert made.step == 3
    root = open_nxd(folder, config=CONFIG).root
    for group, kind in (("weights", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        for key, tensor in by_hand(root, kind).items():
            assert made.read(group, key).tobytes() == tensor.contiguous().numpy().tobytes(), (group, key)


def test_moments_go_where_they_can_be_kept_and_from_one_step_only(copy, tmp_path):
    from lt_ckpt.cli.convert import convert as command

    config = STEPS / "hf-start" / "config.json"
    for to in ("hf", "dcp", "pt"):
        with pytest.raises(CheckpointError, match=f"--optimizer: no effect with --to {to}, .* use --to lt or nxd"):
            command(str(copy), tmp_path / "out", to, config, optimizer=True)
    for dp, optimizer in ((0, True), (2, False)):
        with pytest.raises(CheckpointError, match="--dp: number of data parallel ranks"):
            command(str(copy), tmp_path / "out", "nxd", config, tp=2, optimizer=optimizer, dp=dp)
    with pytest.raises(CheckpointError, match="--optimizer and --master-weights have no effect on hf"):
        command(str(DATA / "llama2-mha-tp2" / "hf"), tmp_path / "out", "lt", optimizer=True)
    change(copy, lambda tree: tree["base_state"][5].update(step=torch.tensor(4.0)), EVERY)
    refuse(copy, r"its optimizer's tensors have different steps, .*: 3\.0 in .*, 4\.0 in")
    change(copy, lambda tree: [state.update(step=torch.tensor(2.5)) for state in tree["base_state"].values()], EVERY)
    refuse(copy, "its optimizer has the invalid step 2.5")
    change(copy, lambda tree: [state.update(step="3") for state in tree["base_state"].values()], EVERY)
    refuse(copy, "the step of tensor 0 is a str")
    change(copy, lambda tree: [state.pop("step") for state in tree["base_state"].values()], EVERY)
    assert "step" not in open_nxd(copy, config=CONFIG, optimizer=True).format_info
    assert not (tmp_path / "out").exists()
