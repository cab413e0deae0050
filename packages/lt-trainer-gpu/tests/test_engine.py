"""One process: a step against plain torch in float64, state out and in, and what the engine refuses."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
)
from lt_model import ModelConfig, param_specs
from lt_model.decoder import Decoder
from lt_model.documents import DocumentBoundaries
from lt_model.init import init_model
from lt_test_helpers.layouts import save_checkpoint
from lt_trainer.engine import StepBatch, World
from lt_trainer.errors import RecipeError
from lt_trainer_gpu.checks import DeviceFacts, check_device
from lt_trainer_gpu.engine import GpuEngine
from lt_trainer_gpu.spec import SPEC


@pytest.fixture
def open_engine(open_on, device: str) -> Callable[..., GpuEngine]:
    """Engines on the CPU, and once more on a GPU."""
    return partial(open_on, device)


def plain_torch(
    config: ModelConfig, batches: list[StepBatch], lr: float, clip: float, *, embeddings: bool = False
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The same steps with one backward over all rows at once and torch's own clip and AdamW."""
    model = Decoder(config, attention="reference").to(torch.float64)
    init_model(model, seed=0)
    decays = {p.name for p in param_specs(config) if p.decay or (embeddings and p.role == "embed")}
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in decays], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if n not in decays], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)
    losses, norms = [], []
    for batch in batches:
        arrays = (batch.input_ids, batch.position_ids, batch.doc_ids, batch.labels)
        ids, positions, docs, labels = (torch.from_numpy(a).long().flatten(0, 1) for a in arrays)
        loss = model(ids, position_ids_BT=positions, doc_ids_BT=docs, labels_BT=labels) / batch.valid_tokens
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def weights(engine: GpuEngine) -> dict[str, np.ndarray]:
    return {s.name: s.bytes().view(np.float64).copy() for s in engine.state().shards if s.group == "weights"}


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize(("n_micro", "micro_batch_size"), [(1, 4), (4, 1), (2, 2)])
def test_steps_equal_plain_torch_with_and_without_accumulation(
    open_engine, device, config, batches, n_micro, micro_batch_size
) -> None:
    """A mean per micro-batch, a decayed norm or an unclipped gradient would all show here.

    A GPU adds up in another order than the CPU, so ten times (losses: a hundred times) as much is allowed there.
    """
    loss_near, norm_near, weight_near = (1e-12, 1e-10, 1e-10) if device == "cpu" else (1e-10, 1e-9, 1e-9)
    steps = batches(5, n_micro=n_micro, micro_batch_size=micro_batch_size)
    losses, norms, wanted = plain_torch(config, steps, lr=1e-2, clip=0.5)
    assert max(norms) > 0.5 > 0, "clipping must be at work"
    engine = open_engine(config, "optimizer.grad_clip=0.5")
    numbers = engine.fetch_metrics([engine.step(batch, 1e-2) for batch in steps])
    assert [n.loss for n in numbers] == pytest.approx(losses, rel=loss_near)
    assert [n.grad_norm for n in numbers] == pytest.approx(norms, rel=norm_near)
    found = weights(engine)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert relative(found[name], tensor.numpy().ravel()) < weight_near, name


def test_embeddings_decay_when_the_recipe_says_so(open_on, config, batches) -> None:
    steps = batches(3, n_micro=1, micro_batch_size=4)
    _, _, wanted = plain_torch(config, steps, lr=1e-2, clip=1.0, embeddings=True)
    _, _, other = plain_torch(config, steps, lr=1e-2, clip=1.0)
    engine = open_on("cpu", config, "optimizer.decay_embeddings=true")
    engine.fetch_metrics([engine.step(batch, 1e-2) for batch in steps])
    found = weights(engine)["model.embed_tokens.weight"]
    assert relative(found, wanted["model.embed_tokens.weight"].numpy().ravel()) < 1e-10
    assert relative(found, other["model.embed_tokens.weight"].numpy().ravel()) > 1e-5


@pytest.mark.parametrize(
    ("mode", "products", "attentions"), [("none", 3 * 7, 1), ("full", 3 * 7 + 6, 2), ("selective", 3 * 7 + 3, 1)]
)
def test_what_is_computed_a_second_time(open_on, config, batches, mode: str, products: int, attentions: int) -> None:
    """Matrix products of a block's 7 weights: one forward, two backward, and again what is not kept: all but the last,
    whose result the backward pass does not need, or every other one, and then not attention."""

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counted[func.name()] += 1
            return func(*args, **(kwargs or {}))

    (batch,) = batches(1, n_micro=1, micro_batch_size=2)
    engine = open_on("cpu", config, f"engine.gpu.activation_checkpointing={mode}", "engine.gpu.attention=sdpa")
    counted: Counter[str] = Counter()
    with Counting():
        engine.step(batch, 1e-2)
    assert counted["aten::mm"] + counted["aten::addmm.out"] == products * config.n_layers
    assert counted["aten::_scaled_dot_product_flash_attention_for_cpu"] == attentions * config.n_layers


def test_gradients_below_grad_clip_are_left_alone(open_engine, config, batches) -> None:
    """AdamW hardly sees a factor; its first moment does."""
    (batch,) = batches(1, n_micro=1, micro_batch_size=2)

    def first_moment(clip: str) -> bytes:
        engine = open_engine(config, f"optimizer.grad_clip={clip}")
        (numbers,) = engine.fetch_metrics([engine.step(batch, 1e-2)])
        assert 0.5 < numbers.grad_norm < 1e4
        return b"".join(s.bytes().tobytes() for s in engine.state().shards if s.group == "exp_avg")

    assert first_moment("1e4") == first_moment("0") != first_moment("0.5")


def test_initial_weights_follow_the_seed_alone(open_engine, config) -> None:
    first = weights(open_engine(config))
    again = weights(open_engine(config))
    other = weights(open_engine(config, "run.seed=1"))
    assert all((first[name] == again[name]).all() for name in first)
    assert any((first[name] != other[name]).any() for name in first)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_state_out_and_in_goes_on_bit_equal(open_engine, config, batches, tmp_path: Path, dtype: str) -> None:
    steps = batches(6, n_micro=2, micro_batch_size=2)
    sets = (f"engine.gpu.dtype={dtype}", "engine.gpu.deterministic=true")  # a GPU needs to be asked for it
    engine = open_engine(config, *sets)
    numbers = engine.fetch_metrics([engine.step(batch, 1e-2) for batch in steps[:3]])
    path = save_checkpoint(engine, str(tmp_path), step=3)
    numbers = engine.fetch_metrics([engine.step(batch, 1e-2) for batch in steps[3:]])

    resumed = open_engine(config, "run.seed=7", *sets)  # another seed: everything must come from the checkpoint
    resumed.restore(Checkpoint.open(path))
    assert resumed.fetch_metrics([resumed.step(batch, 1e-2) for batch in steps[3:]]) == numbers


def test_restore_refuses_another_dtype_and_another_model(open_engine, config, tmp_path: Path) -> None:
    engine = open_engine(config)
    path = save_checkpoint(engine, str(tmp_path), step=0)
    with pytest.raises(CheckpointError, match=r"weights/\S+ is F64 .* instead of F32"):
        open_engine(config, "engine.gpu.dtype=float32").restore(Checkpoint.open(path))
    deeper = ModelConfig(**{**config.to_dict(), "n_layers": 3})
    with pytest.raises(CheckpointError, match=r"missing: model.layers.2"):
        open_engine(deeper).restore(Checkpoint.open(path))


def test_evaluate_sums_over_batches_and_changes_nothing(open_engine, config, batches) -> None:
    engine = open_engine(config)
    before = weights(engine)
    rounds = batches(3, n_micro=1, micro_batch_size=2)
    loss_sum, tokens = engine.validate(rounds)
    assert tokens == sum(batch.valid_tokens for batch in rounds)
    each = [engine.validate([batch])[0] for batch in rounds]
    assert loss_sum == pytest.approx(sum(each), rel=1e-12)
    assert all((before[name] == after).all() for name, after in weights(engine).items())
    training = engine.fetch_metrics([engine.step(rounds[0], 0.0)])[0]
    assert training.loss == pytest.approx(each[0] / rounds[0].valid_tokens, rel=1e-12)


def test_bfloat16_compute_keeps_float32_masters(open_engine, config, batches) -> None:
    engine = open_engine(config, "engine.gpu.dtype=bfloat16")
    steps = batches(3, n_micro=2, micro_batch_size=2)
    losses, _, _ = plain_torch(config, steps, lr=1e-3, clip=1.0)
    numbers = engine.fetch_metrics([engine.step(batch, 1e-3) for batch in steps])
    assert [n.loss for n in numbers] == pytest.approx(losses, rel=2e-2)
    assert {shard.dtype for shard in engine.state().shards} == {"F32"}


def test_memory_of_a_cpu_is_the_most_that_was_resident_in_bytes(open_on, config) -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc here")
    told = open_on("cpu", config).peak_memory_bytes()
    (kib,) = (int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    assert told == pytest.approx(kib * 1024, rel=0.05)


def test_without_the_mask_positions_see_the_documents_before(open_on, config, batches) -> None:
    (batch,) = batches(1, n_micro=1, micro_batch_size=2)
    model = Decoder(config, attention="reference").to(torch.float64)
    init_model(model, seed=0)
    ids, positions, docs, labels = (
        torch.from_numpy(a[0]).long() for a in (batch.input_ids, batch.position_ids, batch.doc_ids, batch.labels)
    )
    whole_rows = replace(batch, cu_seqlens=np.arange(3, dtype=np.int32)[None] * ids.shape[1])
    for mask, seen, masked in (("false", None, whole_rows), ("true", docs, batch)):
        wanted = model(ids, position_ids_BT=positions, doc_ids_BT=seen, labels_BT=labels).item()
        loss_sum, tokens = open_on("cpu", config, f"data.document_mask={mask}").validate([masked])
        assert tokens == batch.valid_tokens
        assert loss_sum == pytest.approx(wanted, rel=1e-12)
    assert wanted != pytest.approx(model(ids, position_ids_BT=positions, labels_BT=labels).item(), rel=1e-9)


def test_fsdp_leaves_document_boundaries_on_the_host() -> None:
    from torch.distributed.utils import _to_kwargs

    boundaries = DocumentBoundaries(torch.zeros(3, dtype=torch.int32), 1, 4)
    (moved, *_), _ = _to_kwargs((boundaries,), {"also": boundaries}, torch.device("meta"), False)
    assert moved[0] is boundaries


def test_device_says_what_its_peak_is(open_on, config) -> None:
    device = open_on("cpu", config).device
    assert device.kind == "cpu"
    assert device.peak_flops > 1e6
    assert "measured" in device.peak_source
    assert "float64" in device.peak_source


TWO, FOUR, EIGHT = (World(size=n, local_size=n) for n in (2, 4, 8))
INTERLEAVED = ("parallel.pp=2", "engine.gpu.pipeline_stages_per_rank=2", "model.n_layers=4")
RAMP = ("batch.micro_batch_size=1", "batch.ramp.start=3", "batch.ramp.increment=1", "batch.ramp.steps=3")
CP, SP, GRAPHS = "parallel.cp=2", "parallel.sequence_parallel=true", "engine.gpu.cuda_graphs=true"
FP8_MODEL = ("model.hidden_size=128", "model.n_heads=16", "model.n_kv_heads=4", "model.intermediate_size=96")
FP8_SETS = (*FP8_MODEL, "model.n_layers=4", "data.seq_len=32", "engine.gpu.fp8=rowwise")


@pytest.mark.parametrize(
    ("sets", "world", "message"),
    [
        (["parallel.n_nodes=2"], World(), r"parallel.n_nodes = 2: the ranks were started on 1 node"),
        (["parallel.dp_shard=2"], World(), r"parallel.dp_shard = 2.*need 2 ranks"),
        (["parallel.tp=4", "model.n_kv_heads=2"], FOUR, r"tp = 4, model.n_kv_heads = 2: .* to a divisor of 2,"),
        (["parallel.tp=2", SP, "data.seq_len=31"], TWO, r"seq_len = 31, parallel.tp = 2: .* a multiple of 2, or lower"),
        ([CP, "data.seq_len=30"], TWO, r"seq_len = 30, parallel.cp = 2: .* \(SEQ_LEN\) to a multiple of 4, or lower"),
        ([CP, "parallel.tp=4", SP, "data.seq_len=20"], EIGHT, r"seq_len = 20, .* over its tensor-parallel ranks; .* 8"),
        ([CP, "engine.gpu.attention=cudnn"], TWO, r'attention = "cudnn", parallel.cp = 2: .* one of auto, varlen'),
        (["engine.gpu.attention=flash"], World(), r'attention = "flash", data.document_mask = true: .* takes no mask'),
        (["engine.gpu.reduce_each_micro_batch=true"], World(), r"= true: has no effect: there is one data-par"),
        (["parallel.pp=4", "model.n_layers=3"], FOUR, r"n_layers = 3: each pipeline stage needs a layer; .* at most 3"),
        ([*INTERLEAVED, *RAMP], TWO, r"ramp.start = 3, batch.ramp.increment = 1: .* needs a multiple of 2 rows"),
        (["batch.global_batch_size=6", "batch.micro_batch_size=2"], TWO, r"ranks need a multiple of 4 rows"),
        (["engine.gpu.activation_offload=true", "model.n_layers=1"], World(), r"n_layers = 1, .*: activations of a"),
        ([*FP8_SETS, "engine.gpu.fp8_skipped_blocks=2"], World(), r"skipped_blocks = 2: none of the 4 blocks.*; lower"),
        ([*FP8_SETS, "model.intermediate_size=88"], World(), r"size = 88, .* multiples of 16 features, and .* has 88"),
        ([*FP8_SETS, "data.seq_len=24"], World(), r"data.seq_len = 24, .* multiples of 16 tokens, and a rank has 24"),
        (["optimizer.weights_dtype=bfloat16"], World(), r'= "float64": weights in bfloat16 need a forward'),
        ([GRAPHS], TWO, r"cuda_graphs = true: collectives .* 2 ranks could wait .*; leave"),
        ([GRAPHS, "engine.gpu.optimizer_offload=true"], World(), r"offload = true: the host .* graph .*; leave"),
        ([GRAPHS, "engine.gpu.attention=flex"], World(), r'attention = "flex", .* on the host.* auto, varlen, flash'),
    ],
)
def test_check_refuses_with_field_value_and_remedy(recipe, sets, world, message) -> None:
    with pytest.raises(RecipeError, match=message):
        SPEC.check(recipe(*sets), world)


FP8 = ("engine.gpu.fp8=rowwise", "model.preset=llama-160m", "data.seq_len=2048")
GOOD = DeviceFacts(type="cuda", capability=(9, 0), torch_version="2.15.0+cu132")


@pytest.mark.parametrize(
    ("sets", "facts", "message"),
    [
        (["engine.gpu.compile=true"], {"torch_version": "2.13.0"}, r"compile = true: .* torch 2.13.0; set .* 2.11 or"),
        (FP8, {"capability": (8, 0)}, r'fp8 = "rowwise": .* capability 8.9, and this is cuda .* 8.0; set .* off'),
        (FP8, {"capability": (9, 4), "is_rocm": True}, "and this is ROCm"),
        ([GRAPHS], {"type": "cpu"}, r"cuda_graphs = true: .* torch 2.15 or .* this is cpu and"),
        ([GRAPHS], {"torch_version": "2.14.1"}, "and this is cuda and torch 2.14.1; leave"),
        (["engine.gpu.optimizer_offload=true"], {"type": "neuron"}, "optimizer_offload = true: .* not from neuron"),
        (["engine.gpu.activation_offload=true"], {"type": "mps"}, "activation_offload = true: .* not from mps"),
        (["optimizer.weights_dtype=bfloat16"], {"dtype": "float32"}, 'weights_dtype = "bfloat16".* not float32; set'),
        (["metrics.memory_snapshot_step=3"], {"type": "mps"}, "CUDA memory only, and this run computes on mps"),
        (["metrics.memory_snapshot_on_oom=true"], {"type": "cpu"}, "CUDA memory only, and this run computes on cpu"),
    ],
)
def test_what_a_device_cannot_do_is_refused(recipe, sets, facts: dict, message: str) -> None:
    made = recipe(*sets, "engine.gpu.dtype=auto", "engine.gpu.device=auto")
    SPEC.check(made, World())
    check_device(made, GOOD)
    check_device(recipe(), replace(GOOD, **facts))
    with pytest.raises(RecipeError, match=message):
        check_device(made, replace(GOOD, **facts))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["engine.gpu.activation_memory_budget=0.3"], r"budget = 0.3.*: has no effect with activation_ch"),
        (["engine.gpu.activation_memory_budget=1.5"], r'activation_memory_budget = "?1.5.*: must be at most 1'),
        (["engine.gpu.activation_checkpointing=memory_budget"], r"memory_budget requires torch.compile; set"),
        (["engine.gpu.compile=true", "engine.gpu.attention=split"], r"recompiled for every batch; set .* sdpa"),
        (["engine.gpu.fp8_skipped_blocks=0"], r'fp8_skipped_blocks = 0.*: has no effect with fp8 = "off"'),
        (["engine.gpu.compile=on"], r'engine.gpu.compile = "on".*: must be "auto", true or false'),
    ],
)
def test_options_that_contradict_are_refused(recipe, sets, message) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(*sets)


def test_cuda_that_is_not_there_is_refused(open_on, config) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ValueError, match="finds no CUDA device; set it to 'cpu'"):
        open_on("cuda", config)


def test_restored_weights_are_used_after_an_evaluation(open_engine, config, batches, tmp_path: Path) -> None:
    """A forward without a backward must not leave gathered copies of the weights behind."""
    rounds = batches(1, n_micro=1, micro_batch_size=2)
    engine = open_engine(config, "engine.gpu.dtype=bfloat16")
    wanted = engine.validate(rounds)
    path = save_checkpoint(engine, str(tmp_path), step=0)
    other = open_engine(config, "engine.gpu.dtype=bfloat16", "run.seed=7")
    assert other.validate(rounds) != wanted
    other.restore(Checkpoint.open(path))
    assert other.validate(rounds) == wanted
