"""Plain training step to compare with: torch's FSDP2, compiled blocks, SDPA, fused AdamW, as torchtitan puts together.

Written with torch alone, so that it runs wherever the engine does: a Llama of nn.Linear and nn.RMSNorm, `fully_shard`
per block in bfloat16 with float32 weights and reduction, `torch.compile` per block and of the loss over whole logits,
clipping and fused AdamW by torch's own functions. Frequencies are not scaled (Llama 3.1), which changes no cost. Names
of parameters are transformers', so that the test gives it the weights of lt's model and finds the same loss.

Shapes: B rows, T positions, D width, H query heads, G key and value heads, K numbers of a head, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from lt_model import ModelConfig

LEARNING_RATE, BETAS, WEIGHT_DECAY, MAX_NORM, INIT_STD = 3e-6, (0.9, 0.95), 0.1, 1.0, 0.02


class PlainAttention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_width
        self.q_proj = nn.Linear(config.hidden_size, config.n_heads * config.head_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.n_kv_heads * config.head_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.n_kv_heads * config.head_width, bias=False)
        self.o_proj = nn.Linear(config.n_heads * config.head_width, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """Return the attention's output [B, T, D]."""
        batch, length, _ = x_BTD.shape
        q, k, v = (
            project(x_BTD).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (x * cos_TK.to(x.dtype) + rotate_half(x) * sin_TK.to(x.dtype) for x in (q, k))
        out_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out_BHTK.transpose(1, 2).reshape(batch, length, -1))


class PlainMlp(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the layer's output [B, T, D]."""
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class PlainBlock(nn.Module):
    """Pre-norm decoder block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = PlainAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = PlainMlp(config)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """Return the block's output [B, T, D]."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TK, sin_TK)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class PlainDecoder(nn.Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)


class PlainLlama(nn.Module):
    """Llama with transformers' parameter names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = PlainDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the logits [B, T, V]."""
        cos_TK, sin_TK = rope_tables(self.config, ids_BT.shape[1], ids_BT.device)
        x_BTD = self.model.embed_tokens(ids_BT)
        for block in self.model.layers:
            x_BTD = block(x_BTD, cos_TK, sin_TK)
        return self.lm_head(self.model.norm(x_BTD))


def rotate_half(x: Tensor) -> Tensor:
    """Return the second half negated, then the first, of each head."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rope_tables(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [T, K] of all positions."""
    exponents = torch.arange(0, config.head_width, 2, device=device, dtype=torch.float32) / config.head_width
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), config.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the mean loss in float32."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten())


class PlainTrainer:
    """Process group of one, model under FSDP2 and fused AdamW; float32 weights, bfloat16 compute on CUDA."""

    def __init__(self, config: ModelConfig, device: torch.device, *, is_compiled: bool) -> None:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented as torch.distributed.HashStore
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
        torch.manual_seed(0)
        with torch.device(device):
            self._model = PlainLlama(config)
        for parameter in self._model.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=INIT_STD)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        mesh = init_device_mesh(device.type, (1,))
        self._loss = torch.compile(cross_entropy) if is_compiled else cross_entropy
        for block in self._model.model.layers:
            if is_compiled:
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self._model, mesh=mesh, mp_policy=policy)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=device.type == "cuda"
        )

    def step(self, ids_BT: Tensor) -> Tensor:
        """Train on rows of ids [B, T + 1]; return the loss, still on the device."""
        loss = self._loss(self._model(ids_BT[:, :-1]), ids_BT[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def close(self) -> None:
        """End the process group."""
        dist.destroy_process_group()
