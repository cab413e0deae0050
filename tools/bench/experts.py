"""A layer of experts and a step of a little model with them, on one CPU thread: lt, transformers and torchtitan.

    uv run python tools/bench/experts.py      # the table of docs/benchmarks/training.md; minutes

The layer: 1,024 tokens of width 512, 32 experts 512 wide, 4 for each token; forward and backward. The step: a row of
1,024 tokens of tiny-30m-a9m with each one's balancing loss, gradients clipped, AdamW. transformers computes experts by
its grouped product (`grouped_mm`), which does not follow torch's autocast: so in bfloat16 its weights and moments are
bfloat16 too, unlike lt's. torchtitan has a layer alone; its grouped products are bfloat16 whatever the rest is. Layers
have the same weights; each round has other tokens, so that experts get other numbers of them. All run eager and take
turns; medians of CPU milliseconds. Each dtype has a process of its own. torchtitan is installed into a temporary
environment, in which all run, with torch of the running one.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import train
from results import describe_machine

from lt_model import ModelConfig, preset
from lt_model.feed_forward import MoE
from lt_model.hf import config_to_hf

LAYER = {"hidden_size": 512, "n_experts": 32, "experts_per_token": 4, "expert_size": 512}
TOKENS = 1024
ROUNDS = {"layer": 32, "step": 12}


def run(layer: torch.nn.Module, rounds: torch.Tensor, number: int) -> torch.Tensor:
    """Run a layer forward and backward on the tokens of a round; return its output, float32."""
    layer.zero_grad()
    out = layer(rounds[number].detach().requires_grad_())
    out.backward(rounds[number - 1])
    return out.detach().float()


def peer_config(config: ModelConfig) -> Any:
    """Return transformers' configuration of a model, whose experts are computed by grouped products."""
    from transformers import Qwen3MoeConfig

    fields: dict[str, Any] = {**config_to_hf(config), "experts_implementation": "grouped_mm"}
    return Qwen3MoeConfig(**fields)


def make_layers(dtype: torch.dtype) -> dict[str, Callable[[int], Any]]:
    """Return a forward and backward pass of each one's layer, checked to give the same."""
    import torchtitan.models.common.moe as titan_moe  # pyright: ignore[reportMissingImports] - in its environment
    from torchtitan.models.common.linear import Linear  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = preset("tiny-30m-a9m", **LAYER)
    n, k, width = config.n_experts, config.experts_per_token, config.hidden_size
    inner = titan_moe.GroupedExperts.Config(dim=width, hidden_dim=config.expert_size, num_experts=n)
    dispatcher = titan_moe.LocalTokenDispatcher.Config(num_experts=n, top_k=k)
    experts = titan_moe.RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher)
    choice: dict[str, Any] = {"num_experts": n, "top_k": k, "score_func": "softmax", "route_norm": True}
    router = titan_moe.TokenChoiceTopKRouter.Config(gate=Linear.Config(in_features=width, out_features=n), **choice)
    titan = titan_moe.MoE.Config(num_experts=n, routed_experts=experts, router=router, load_balance_coeff=None).build()
    ours = MoE(config)
    theirs: Any = Qwen3MoeSparseMoeBlock(peer_config(config))
    gate, up, down = ours.experts.state_dict().values()
    theirs.experts.load_state_dict({"gate_up_proj": torch.cat((gate, up), dim=1), "down_proj": down})
    titan.routed_experts.inner_experts.load_state_dict({"w1_EFD": gate, "w3_EFD": up, "w2_EDF": down})
    theirs.gate.weight, titan.router.gate.weight = ours.gate.weight, ours.gate.weight
    rounds = torch.randn(ROUNDS["layer"], 1, TOKENS, width).to(dtype)
    layers = {"lt": ours.to(dtype), "transformers": theirs.to(dtype), "torchtitan": titan.to(dtype)}
    passes: dict[str, Callable[[int], Any]] = {name: partial(run, layer, rounds) for name, layer in layers.items()}
    wanted = passes["lt"](0)
    assert all((one(0) - wanted).norm() < 0.1 * wanted.norm() for one in passes.values())
    return passes


def make_steps(dtype: torch.dtype) -> dict[str, Callable[[int], Any]]:
    """Return a training step of each one's model."""
    from transformers import Qwen3MoeForCausalLM

    config = preset("tiny-30m-a9m")
    shape: dict[str, Any] = {"preset": "tiny-30m-a9m", "vocab": config.vocab_size}
    ours = train.make_lt_step(TOKENS, compiled=False, dtype=str(dtype).removeprefix("torch."), **shape)
    model: Any = Qwen3MoeForCausalLM(peer_config(config))
    model.to(dtype)

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = model(input_ids=ids, use_cache=False, output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(found.logits.float().flatten(0, 1), labels.flatten())
        return loss + 0.03 * found.aux_loss

    theirs = train.make_peer_step(model.train(), loss_of, autocast=False)

    def step(one: Any, number: int) -> float:
        row = np.random.default_rng(number).integers(0, config.vocab_size, TOKENS + 1)
        return one(row, train.LR)

    return {"lt": partial(step, ours), "transformers": partial(step, theirs)}


def take_turns(passes: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, float]:
    """Return the median CPU milliseconds of each without the first two rounds."""
    found: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(rounds):
        for name in passes if number % 2 else reversed(passes):
            start = time.process_time()
            passes[name](number)
            found[name].append(1e3 * (time.process_time() - start))
    return {name: round(statistics.median(times[2:]), 1) for name, times in found.items()}


def main() -> None:
    """Measure and print the rows of a table, each dtype in a process of its own in an environment with the peers."""
    dtypes = sys.argv[1:]
    if not dtypes:
        print(describe_machine("torch", "transformers"), train.TITAN_REQUIREMENTS.split()[0], flush=True)
        with tempfile.TemporaryDirectory(prefix="lt-bench-env-") as folder:
            python = train.create_environment(Path(folder) / "env", train.TITAN_REQUIREMENTS)
            for dtype in ("bfloat16", "float32"):
                subprocess.run([python, "-W", "ignore", __file__, dtype], check=True)
    for dtype in dtypes:
        torch.set_num_threads(1)
        for kind, make in (("layer", make_layers), ("step", make_steps)):
            found = take_turns(make(getattr(torch, dtype)), ROUNDS[kind])
            print(f"| {kind}, {dtype} | {json.dumps(found)} |", flush=True)


if __name__ == "__main__":
    main()
