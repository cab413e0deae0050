"""Options of the Trainium engine, the recipe section `[engine.neuron]`.

Names and defaults follow the Llama recipes for neuronx-distributed (NxD): the Llama-2-7B recipes use separate
projections, the Llama-3 recipes `qkv_linear` with a kv replicator of 4.
"""

from typing import Literal, Self

from pydantic import model_validator

from lt_trainer.config.section import PathText, Section, option

SECTION = "engine.neuron"


class NeuronOptions(Section, table=SECTION):
    """Options of the Trainium engine; the parallel degrees are in `[parallel]`."""

    needs = (("kv_size_multiplier fuse_qkv", "qkv_linear"), ("cpu_dtype", "backend", "cpu"))

    backend: Literal["nxd", "xla", "cpu"] = option(
        "nxd",
        "nxd: neuronx-distributed on Trainium; xla: one rank on plain torch-xla; "
        "cpu: the same program over gloo, to compare numbers",
    )
    graph_scope: Literal["micro_batch", "step"] = option(
        "micro_batch",
        "scope of one compiled graph: a micro-batch, with the optimizer step apart; or the whole step, which grows "
        "with the number of micro-batches (one stage only; with stages each pass and transfer is a graph)",
    )
    cpu_dtype: Literal["float32", "bfloat16", "float64"] = option(
        "float32", "compute dtype of the cpu backend, in place of precision; its master weights are fp32 or wider"
    )
    num_neuroncores: int = option(
        32,
        "NeuronCores of one node, one rank each (trn1.32xlarge has 32, trn1.2xlarge 2)",
        hyperparameter="NUM_NEURONCORES",
        ge=1,
    )
    qkv_linear: bool = option(
        False, "one sharded layer for q, k and v, which can replicate key/value heads", hyperparameter="QKV_LINEAR"
    )
    kv_size_multiplier: int = option(
        1,
        "replicas of each key/value head; with qkv_linear, n_kv_heads * kv_size_multiplier = tp",
        hyperparameter="KV_REPLICATOR",
        ge=1,
    )
    fuse_qkv: bool = option(False, "store q, k and v of qkv_linear as one matrix", hyperparameter="FUSE_QKV")
    zero1: bool = option(True, "shard the optimizer state over data parallel ranks", hyperparameter="USE_ZERO_1")
    precision: Literal["bf16_sr", "downcast", "fp32_master_weights"] = option(
        "bf16_sr",
        "bf16_sr: bf16 with stochastic rounding; downcast: fp32 weights computed in bf16; "
        "fp32_master_weights: bf16 with fp32 master weights, as on GPUs",
    )
    nxd_grad_norm: bool = option(
        False, "count every replica of a key/value head in the gradient norm, as NxD does, to compare with it"
    )
    selective_checkpointing: bool = option(
        True, "recompute core attention in the backward pass", hyperparameter="USE_SELECTIVE_CHECKPOINT"
    )
    flash_attention: bool = option(False, "the NKI flash attention kernel", hyperparameter="USE_FLASH_ATTENTION")
    save_xser: bool = option(True, "NxD checkpoints with one file per tensor", hyperparameter="SAVE_LOAD_XSER")
    compile_key: Literal["warn", "error", "ignore"] = option(
        "warn", "reaction if lt train precompile has made no graphs for this recipe"
    )
    compile_cache: PathText = option("", "folder or s3:// URL of compiled graphs; empty = the compiler's default")
    cc_flags: str = option("--model-type=transformer", "flags of the compiler, NEURON_CC_FLAGS")
    max_inflight: int = option(3, "requests in flight to a core; the 70B recipe uses 7", ge=1)
    malloc_arenas: int = option(64, "MALLOC_ARENA_MAX; the 70B recipe uses 128", ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "--cache_dir" in self.cc_flags:
            remedy = "remove --cache_dir and set engine.neuron.compile_cache"
            raise self.wrong("cc_flags", "the compiler's cache is set by engine.neuron.compile_cache", remedy)
        return self
