"""Tiny checkpoints with the Hugging Face names and config fields of the real families, seeded, under 8 MiB each.

Widths are at least 32 per rank at tensor parallel 2 (128 for block fp8): on a CPU sglang pads narrower experts, and then
a rank holds other bytes than on a GPU. ``GPU`` sizes suit GPU kernels (head size 128, the real latent sizes of MLA).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]

YARN_DEEPSEEK = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_KIMI = {**YARN_DEEPSEEK, "factor": 32.0, "beta_fast": 1.0}


@dataclass(frozen=True)
class Sizes:
    """Widths of a tiny model."""

    vocab: int = 256
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    experts: int = 4
    expert_width: int = 64
    q_lora: int = 64
    kv_lora: int = 64
    nope: int = 32
    rope: int = 16
    v_head: int = 32
    block: tuple[int, int] = (128, 128)
    """Block of fp8 checkpoints."""


CPU = Sizes()
FP8 = Sizes(
    hidden=256, head_dim=128, intermediate=512, expert_width=256, q_lora=128, kv_lora=128, nope=64, rope=64, v_head=64
)  # fmt: skip
GPU = Sizes(
    vocab=512, hidden=512, heads=8, kv_heads=2, head_dim=128, intermediate=1024, expert_width=256, q_lora=256, kv_lora=512, nope=128,
    rope=64, v_head=128,
)  # fmt: skip


class Writer:
    """Collects named tensors from one seeded stream."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._dtype = dtype
        self.tensors: Tensors = {}

    def normal(self, name: str, *shape: int, mean: float = 0.0, scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
        """Gaussian values."""
        values = torch.randn(*shape, generator=self._random) * scale + mean
        self.tensors[name] = values.to(dtype or self._dtype)

    def linear(self, name: str, out: int, inp: int, *, bias: bool = False) -> None:
        """A projection's weight, scaled by its fan-in, and maybe its bias."""
        self.normal(f"{name}.weight", out, inp, scale=inp**-0.5)
        if bias:
            self.normal(f"{name}.bias", out, scale=0.1)

    def norm(self, name: str, size: int, *, mean: float = 1.0, bias: bool = False) -> None:
        """A normalisation's weight around ``mean``."""
        self.normal(f"{name}.weight", size, mean=mean, scale=0.1)
        if bias:
            self.normal(f"{name}.bias", size, scale=0.1)

    def mlp(self, prefix: str, hidden: int, width: int) -> None:
        """SwiGLU."""
        for name, out, inp in (("gate_proj", width, hidden), ("up_proj", width, hidden), ("down_proj", hidden, width)):
            self.linear(f"{prefix}.{name}", out, inp)

    def attention(self, prefix: str, s: Sizes, *, bias: bool = False, qk_norm: bool = False, mean: float = 1.0, gate: bool = False) -> None:
        """Grouped-query attention."""
        self.linear(f"{prefix}.q_proj", s.heads * s.head_dim * (2 if gate else 1), s.hidden, bias=bias)
        self.linear(f"{prefix}.k_proj", s.kv_heads * s.head_dim, s.hidden, bias=bias)
        self.linear(f"{prefix}.v_proj", s.kv_heads * s.head_dim, s.hidden, bias=bias)
        self.linear(f"{prefix}.o_proj", s.hidden, s.heads * s.head_dim)
        if qk_norm:
            self.norm(f"{prefix}.q_norm", s.head_dim, mean=mean)
            self.norm(f"{prefix}.k_norm", s.head_dim, mean=mean)

    def latent_attention(self, prefix: str, s: Sizes, *, indexer: bool) -> None:
        """Multi-head latent attention, maybe with the sparse indexer."""
        self.linear(f"{prefix}.q_a_proj", s.q_lora, s.hidden)
        self.norm(f"{prefix}.q_a_layernorm", s.q_lora)
        self.linear(f"{prefix}.q_b_proj", s.heads * (s.nope + s.rope), s.q_lora)
        self.linear(f"{prefix}.kv_a_proj_with_mqa", s.kv_lora + s.rope, s.hidden)
        self.norm(f"{prefix}.kv_a_layernorm", s.kv_lora)
        self.linear(f"{prefix}.kv_b_proj", s.heads * (s.nope + s.v_head), s.kv_lora)
        self.linear(f"{prefix}.o_proj", s.hidden, s.heads * s.v_head)
        if indexer:
            self.linear(f"{prefix}.indexer.wq_b", 4 * 128, s.q_lora)
            self.linear(f"{prefix}.indexer.wk", 128, s.hidden)
            self.norm(f"{prefix}.indexer.k_norm", 128, bias=True)
            self.linear(f"{prefix}.indexer.weights_proj", 4, s.hidden)

    def experts(
        self, prefix: str, s: Sizes, *, count: int, width: int, shared: str = "", shared_gate: bool = False, correction: bool = False
    ) -> None:
        """A router with its experts, maybe shared ones."""
        self.linear(f"{prefix}.gate", count, s.hidden)
        if correction:
            self.normal(f"{prefix}.gate.e_score_correction_bias", count, scale=0.1, dtype=torch.float32)
        for index in range(count):
            self.mlp(f"{prefix}.experts.{index}", s.hidden, width)
        if shared:
            self.mlp(f"{prefix}.{shared}", s.hidden, width)
        if shared_gate:
            self.linear(f"{prefix}.shared_expert_gate", 1, s.hidden)

    def block_norms(self, prefix: str, hidden: int, mean: float = 1.0) -> None:
        """The two norms of a decoder layer."""
        self.norm(f"{prefix}.input_layernorm", hidden, mean=mean)
        self.norm(f"{prefix}.post_attention_layernorm", hidden, mean=mean)

    def ends(self, s: Sizes, *, tied: bool = False, mean: float = 1.0) -> None:
        """Embedding, last norm, head. Tied embeddings are small, or every model would echo its last token."""
        self.normal("model.embed_tokens.weight", s.vocab, s.hidden, scale=0.03 if tied else 1.0)
        self.norm("model.norm", s.hidden, mean=mean)
        if not tied:
            self.linear("lm_head", s.vocab, s.hidden)

    def prediction_layer(self, prefix: str, s: Sizes, body: Callable[[str], None]) -> None:
        """A multi-token prediction layer (DeepSeek V3, GLM-4.5)."""
        for name in ("enorm", "hnorm", "shared_head.norm"):
            self.norm(f"{prefix}.{name}", s.hidden)
        self.linear(f"{prefix}.eh_proj", s.hidden, 2 * s.hidden)
        self.linear(f"{prefix}.shared_head.head", s.vocab, s.hidden)
        self.normal(f"{prefix}.embed_tokens.weight", s.vocab, s.hidden)
        body(prefix)


def _config(architecture: str, model_type: str, s: Sizes, **more: Any) -> Config:
    return {
        "architectures": [architecture], "model_type": model_type, "vocab_size": s.vocab, "hidden_size": s.hidden,
        "intermediate_size": s.intermediate, "num_hidden_layers": s.layers, "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads, "hidden_act": "silu", "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0, "attention_bias": False, **more,
    }  # fmt: skip


def qwen2(seed: int, s: Sizes, *, tied: bool = False) -> tuple[Config, Writer]:
    """Qwen2: biases on q, k, v."""
    w = Writer(seed)
    w.ends(s, tied=tied)
    for layer in range(s.layers):
        prefix = f"model.layers.{layer}"
        w.block_norms(prefix, s.hidden)
        w.attention(f"{prefix}.self_attn", s, bias=True)
        w.mlp(f"{prefix}.mlp", s.hidden, s.intermediate)
    return _config("Qwen2ForCausalLM", "qwen2", s, tie_word_embeddings=tied), w


def qwen3(seed: int, s: Sizes, *, tied: bool = False) -> tuple[Config, Writer]:
    """Qwen3: norms on q and k."""
    w = Writer(seed)
    w.ends(s, tied=tied)
    for layer in range(s.layers):
        prefix = f"model.layers.{layer}"
        w.block_norms(prefix, s.hidden)
        w.attention(f"{prefix}.self_attn", s, qk_norm=True)
        w.mlp(f"{prefix}.mlp", s.hidden, s.intermediate)
    return _config("Qwen3ForCausalLM", "qwen3", s, head_dim=s.head_dim, tie_word_embeddings=tied), w


def qwen3_moe(seed: int, s: Sizes) -> tuple[Config, Writer]:
    """Qwen3-MoE."""
    w = Writer(seed)
    w.ends(s)
    for layer in range(s.layers):
        prefix = f"model.layers.{layer}"
        w.block_norms(prefix, s.hidden)
        w.attention(f"{prefix}.self_attn", s, qk_norm=True)
        w.experts(f"{prefix}.mlp", s, count=s.experts, width=s.expert_width)
    more = {
        "head_dim": s.head_dim, "num_experts": s.experts, "num_experts_per_tok": 2, "moe_intermediate_size": s.expert_width, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.001,
    }  # fmt: skip
    return _config("Qwen3MoeForCausalLM", "qwen3_moe", s, **more), w


def glm4_moe(seed: int, s: Sizes) -> tuple[Config, Writer]:
    """GLM-4.5: a dense layer, a sparse one with a shared expert, a multi-token prediction layer."""
    w = Writer(seed)
    w.ends(s)

    def sparse(prefix: str) -> None:
        w.block_norms(prefix, s.hidden)
        w.attention(f"{prefix}.self_attn", s, bias=True)
        w.experts(f"{prefix}.mlp", s, count=s.experts, width=s.expert_width, shared="shared_experts", correction=True)

    w.block_norms("model.layers.0", s.hidden)
    w.attention("model.layers.0.self_attn", s, bias=True)
    w.mlp("model.layers.0.mlp", s.hidden, s.intermediate)
    sparse("model.layers.1")
    w.prediction_layer("model.layers.2", s, sparse)
    more = {
        "head_dim": s.head_dim, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": False, "n_routed_experts": s.experts,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": s.expert_width, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "rope_scaling": None,
    }  # fmt: skip
    return _config("Glm4MoeForCausalLM", "glm4_moe", s, **more), w


def latent_moe(
    architecture: str,
    model_type: str,
    seed: int,
    s: Sizes,
    *,
    indexer: bool = False,
    prediction: bool = False,
    experts: int = 0,
    **more: Any,
) -> tuple[Config, Writer]:
    """The DeepSeek line: latent attention, one dense layer, one sparse layer with a shared expert."""
    if indexer:
        s = replace(s, rope=64)
    count = experts or s.experts
    w = Writer(seed)
    w.ends(s)

    def sparse(prefix: str) -> None:
        w.block_norms(prefix, s.hidden)
        w.latent_attention(f"{prefix}.self_attn", s, indexer=indexer)
        w.experts(f"{prefix}.mlp", s, count=count, width=s.expert_width, shared="shared_experts", correction=True)

    w.block_norms("model.layers.0", s.hidden)
    w.latent_attention("model.layers.0.self_attn", s, indexer=indexer)
    w.mlp("model.layers.0.mlp", s.hidden, s.intermediate)
    sparse("model.layers.1")
    if prediction:
        w.prediction_layer("model.layers.2", s, sparse)
    settings: Config = {
        "num_key_value_heads": s.heads, "n_routed_experts": count, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": s.expert_width, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": int(prediction),
        "ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1, "q_lora_rank": s.q_lora, "kv_lora_rank": s.kv_lora,
        "qk_nope_head_dim": s.nope, "qk_rope_head_dim": s.rope, "v_head_dim": s.v_head, "rope_scaling": YARN_DEEPSEEK,
    }  # fmt: skip
    if indexer:
        settings.update(index_n_heads=4, index_head_dim=128, index_topk=64)
    settings.update(more)
    return _config(architecture, model_type, s, **settings), w


def qwen3_next(seed: int, s: Sizes) -> tuple[Config, Writer]:
    """Qwen3-Next: one linear-attention layer, one gated full-attention layer, shared experts with a gate."""
    key_heads, value_heads, width, kernel = 2, 4, 16, 4
    w = Writer(seed)
    w.ends(s, mean=0.0)
    prefix = "model.layers.0"
    w.block_norms(prefix, s.hidden, 0.0)
    linear = f"{prefix}.linear_attn"
    w.linear(f"{linear}.in_proj_qkvz", 2 * key_heads * width + 2 * value_heads * width, s.hidden)
    w.linear(f"{linear}.in_proj_ba", 2 * value_heads, s.hidden)
    w.normal(f"{linear}.conv1d.weight", 2 * key_heads * width + value_heads * width, 1, kernel, scale=0.3)
    w.normal(f"{linear}.A_log", value_heads, scale=0.1)
    w.normal(f"{linear}.dt_bias", value_heads, scale=0.1)
    w.norm(f"{linear}.norm", width)
    w.linear(f"{linear}.out_proj", s.hidden, value_heads * width)
    w.experts(f"{prefix}.mlp", s, count=s.experts, width=s.expert_width, shared="shared_expert", shared_gate=True)
    prefix = "model.layers.1"
    w.block_norms(prefix, s.hidden, 0.0)
    w.attention(f"{prefix}.self_attn", s, qk_norm=True, mean=0.0, gate=True)
    w.experts(f"{prefix}.mlp", s, count=s.experts, width=s.expert_width, shared="shared_expert", shared_gate=True)
    more = {
        "head_dim": s.head_dim, "partial_rotary_factor": 0.25, "num_experts": s.experts, "num_experts_per_tok": 2, "moe_intermediate_size": s.expert_width,
        "shared_expert_intermediate_size": s.expert_width, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "full_attention_interval": 2, "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "linear_key_head_dim": width,
        "linear_value_head_dim": width, "linear_conv_kernel_dim": kernel, "layer_types": ["linear_attention", "full_attention"],
        "output_router_logits": False, "router_aux_loss_coef": 0.001,
    }  # fmt: skip
    return _config("Qwen3NextForCausalLM", "qwen3_next", s, **more), w


def gemma2(seed: int, s: Sizes) -> tuple[Config, Writer]:
    """Gemma 2: norms that the engine keeps a second time as weight + 1, tied embeddings, soft caps."""
    w = Writer(seed)
    w.ends(s, tied=True, mean=0.0)
    for layer in range(s.layers):
        prefix = f"model.layers.{layer}"
        w.block_norms(prefix, s.hidden, 0.0)
        w.attention(f"{prefix}.self_attn", s)
        w.mlp(f"{prefix}.mlp", s.hidden, s.intermediate)
        w.norm(f"{prefix}.pre_feedforward_layernorm", s.hidden, mean=0.0)
        w.norm(f"{prefix}.post_feedforward_layernorm", s.hidden, mean=0.0)
    more = {
        "head_dim": s.head_dim, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": s.head_dim, "sliding_window": 512, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "pad_token_id": 0,
    }  # fmt: skip
    return _config("Gemma2ForCausalLM", "gemma2", s, **more), w


_KEPT = ("embed", "norm", "lm_head", ".gate.", "e_score", "bias", "eh_proj", "weights_proj", "shared_head")


def quantise_blocks(config: Config, tensors: Tensors, block: tuple[int, int]) -> tuple[Config, Tensors]:
    """Quantise the projections to fp8 with one scale per block, as the published checkpoints do (weight_scale_inv)."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or any(word in name for word in _KEPT):
            out[name] = tensor
            continue
        rows, columns = tensor.shape
        high, wide = -(-rows // block[0]), -(-columns // block[1])
        padded = torch.zeros(high * block[0], wide * block[1])
        padded[:rows, :columns] = tensor.float()
        blocks = padded.view(high, block[0], wide, block[1])
        scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-8) / 448.0
        quantised = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
        out[name] = quantised.to(torch.float8_e4m3fn).contiguous()
        out[f"{name.removesuffix('weight')}weight_scale_inv"] = scale
    quantisation = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block)}
    return {**config, "quantization_config": quantisation}, out


@dataclass(frozen=True)
class Family:
    """One entry of the zoo."""

    make: Callable[[int, Sizes], tuple[Config, Writer]]
    sizes: Sizes = CPU
    fp8: bool = False
    moe: bool = False
    forward: bool = True
    """Whether a CPU engine can generate with it."""
    draft: bool = False
    """Whether the checkpoint has a multi-token prediction layer."""
    arguments: tuple[str, ...] = ()
    """What a tiny engine of it needs besides."""


def _deepseek(seed: int, s: Sizes) -> tuple[Config, Writer]:
    return latent_moe("DeepseekV3ForCausalLM", "deepseek_v3", seed, s)


ZOO: dict[str, Family] = {
    "qwen2": Family(qwen2),
    "qwen2_tied": Family(lambda seed, s: qwen2(seed, s, tied=True)),
    "qwen3": Family(qwen3),
    "qwen3_8_heads": Family(qwen3, replace(CPU, heads=8, kv_heads=2)),
    "qwen3_tied": Family(lambda seed, s: qwen3(seed, s, tied=True)),
    "qwen3_moe": Family(qwen3_moe, moe=True),
    "glm4_moe": Family(glm4_moe, moe=True, draft=True),
    "glm4_moe_lite": Family(
        lambda seed, s: latent_moe("Glm4MoeLiteForCausalLM", "glm4_moe_lite", seed, s, rope_scaling=None, partial_rotary_factor=1.0, head_dim=16),
        moe=True,
    ),
    "deepseek_v3": Family(_deepseek, moe=True),
    "deepseek_v3_mtp": Family(lambda seed, s: latent_moe("DeepseekV3ForCausalLM", "deepseek_v3", seed, s, prediction=True), moe=True, draft=True),
    "kimi_k2": Family(lambda seed, s: latent_moe("DeepseekV3ForCausalLM", "kimi_k2", seed, s, experts=8, rope_scaling=YARN_KIMI), moe=True),
    "deepseek_v32": Family(lambda seed, s: latent_moe("DeepseekV32ForCausalLM", "deepseek_v32", seed, s, indexer=True), moe=True),
    "glm_moe_dsa": Family(
        lambda seed, s: latent_moe("GlmMoeDsaForCausalLM", "glm_moe_dsa", seed, s, indexer=True, rope_scaling=None), moe=True
    ),
    "gemma2": Family(gemma2),
    "qwen3_next": Family(qwen3_next, moe=True, forward=False, arguments=("--max-mamba-cache-size", "32")),
    "qwen3_fp8": Family(qwen3, FP8, fp8=True),
    "qwen3_fp8_64": Family(qwen3, replace(FP8, block=(64, 64)), fp8=True),
    "qwen3_moe_fp8": Family(qwen3_moe, FP8, fp8=True, moe=True),
    "qwen3_moe_fp8_64": Family(qwen3_moe, replace(FP8, block=(64, 64)), fp8=True, moe=True),
    "deepseek_v3_fp8": Family(_deepseek, FP8, fp8=True, moe=True, forward=False),
    "deepseek_v3_fp8_64": Family(_deepseek, replace(FP8, block=(64, 64)), fp8=True, moe=True, forward=False),
}  # fmt: skip


def make(name: str, seed: int, sizes: Sizes | None = None) -> tuple[Config, Tensors]:
    """Config and tensors of one zoo entry."""
    family = ZOO[name]
    chosen = sizes or family.sizes
    config, writer = family.make(seed, chosen)
    if family.fp8:
        return quantise_blocks(config, writer.tensors, chosen.block)
    return config, writer.tensors


def write(name: str, folder: Path, seed: int, *, sizes: Sizes | None = None, shards: int = 1) -> Path:
    """Write one checkpoint folder; with ``shards`` above one, as a sharded checkpoint with its index."""
    config, tensors = make(name, seed, sizes)
    return save(folder, config, tensors, shards=shards)


def save(folder: Path, config: Config, tensors: Tensors, *, shards: int = 1) -> Path:
    """Save a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return folder


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(sorted(ZOO))}.")],
    folder: Path,
    seed: Annotated[int, typer.Option(help="Other weights for each.")] = 1,
    shards: Annotated[int, typer.Option(min=1, help="safetensors files.")] = 1,
) -> None:
    """Write a tiny checkpoint of random weights."""
    if name not in ZOO:
        raise typer.BadParameter(f"no {name!r} here; expected one of {', '.join(sorted(ZOO))}")
    write(name, folder, seed, shards=shards)


if __name__ == "__main__":
    typer.run(main)
