"""The axes of meshes that the engine's tests multiply out, each by the recipe's overrides, and a model for `ep`."""

LATENTS = (
    'model.shape={"family": "deepseek_v3", "kv_rank": 8, "nope_width": 4, "rope_width": 4, "value_width": 8, '
    '"n_experts": 4, "experts_per_token": 2, "expert_size": 16, "shared_expert_size": 16, "router_score": "sigmoid", '
    '"selection_bias": true, "layers": [{"experts": true}]}',
    "model.n_kv_heads=4",
)
PIPELINES = {
    "": (),
    "1f1b": ("parallel.pp=2",),
    "interleaved": ("parallel.pp=2", "engine.gpu.pipeline_stages_per_rank=2"),
}
CONTEXTS = {"": (), "cp": ("parallel.cp=2",)}
TENSORS = {"": (), "tp": ("parallel.tp=2",), "sp": ("parallel.tp=2", "parallel.sequence_parallel=true")}
DATA = {
    "": (),
    "fsdp": ("parallel.dp_shard=2",),
    "ddp": ("parallel.dp_replicate=2",),
    "hsdp": ("parallel.dp_replicate=2", "parallel.dp_shard=2"),
}
DATA_RANKS = {"": 1, "fsdp": 2, "ddp": 2, "hsdp": 4}
MAX_RANKS = 8
