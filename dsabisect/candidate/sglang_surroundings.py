"""Honest torch versions of what surrounds sglang's indexer and its metadata backend.

Interfaces as in sgl-project/sglang: srt/layers/{linear,layernorm,rotary_embedding}, srt/mem_cache/memory_pool.py
(DSATokenToKVPool), srt/model_executor/{forward_batch_info,forward_context}.py, srt/utils. They compute what production
computes at this place, in torch; they know nothing of paths. An attribute that they lack is a MissingSurrounding.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsabisect.candidate.probes import HarnessFault
from dsabisect.candidate.sglang_finder import MissingSurrounding

PAGE, DIM, PAGE_BYTES = 64, 128, 8448
TRUE = ("1", "true", "yes", "on")


class Given:
    """A bag of attributes; one that is not there is our fault, unless the candidate merely asks for it."""

    def __init__(self, what: str, **values: Any) -> None:
        self.__dict__.update(values)
        self.__dict__["_what"] = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingSurrounding(
            f"our {self.__dict__.get('_what', 'stand-in')} has no attribute {name!r}",
            remedy="Give it to it in dsabisect/candidate/sglang_*.py",
        )


class ForwardMode(IntEnum):
    """srt/model_executor/forward_batch_info.py, every predicate of 2025-09 to 2026-07."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND = 6
    DRAFT_EXTEND_V2 = 7
    PREBUILT = 8
    SPLIT_PREFILL = 9
    DLLM_EXTEND = 10

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MissingSurrounding(f"our ForwardMode has no {name}", remedy="Add it in sglang_surroundings.py")

    def is_prefill(self, include_draft_extend_v2: bool = False) -> bool:
        return self.is_extend(include_draft_extend_v2)

    def is_extend(self, include_draft_extend_v2: bool = False) -> bool:
        if self is ForwardMode.DRAFT_EXTEND_V2:
            return include_draft_extend_v2
        return self.name in ("EXTEND", "MIXED", "DRAFT_EXTEND", "TARGET_VERIFY", "SPLIT_PREFILL", "DLLM_EXTEND")

    def is_context_parallel_extend(self, include_draft_extend_v2: bool = False) -> bool:
        return self.name in ("EXTEND", "MIXED", "DRAFT_EXTEND") or (
            include_draft_extend_v2 and self is ForwardMode.DRAFT_EXTEND_V2
        )

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self.name in ("DECODE", "IDLE")

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend(self, include_v2: bool = False) -> bool:
        return self is ForwardMode.DRAFT_EXTEND or (include_v2 and self is ForwardMode.DRAFT_EXTEND_V2)

    def is_draft_extend_v2(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_extend_or_draft_extend_or_mixed(self, include_draft_extend_v2: bool = False) -> bool:
        return self.name in ("EXTEND", "DRAFT_EXTEND", "MIXED", "SPLIT_PREFILL") or (
            include_draft_extend_v2 and self is ForwardMode.DRAFT_EXTEND_V2
        )

    def is_cuda_graph(self) -> bool:
        return self.name in ("DECODE", "TARGET_VERIFY", "IDLE", "DLLM_EXTEND")

    def is_cpu_graph(self) -> bool:
        return self is ForwardMode.DECODE

    def is_split_prefill(self) -> bool:
        return self is ForwardMode.SPLIT_PREFILL

    def is_extend_without_speculative(self) -> bool:
        return self.is_extend() and self.name not in ("TARGET_VERIFY", "DRAFT_EXTEND")

    def is_prebuilt(self) -> bool:
        return self is ForwardMode.PREBUILT

    def is_dllm_extend(self) -> bool:
        return self is ForwardMode.DLLM_EXTEND


# ---- layers ------------------------------------------------------------------------------------------------


class MultiPlatformOp(nn.Module):
    """srt/layers/utils: dispatches to forward_cuda; here the probe calls that itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_cuda(*args, **kwargs)  # type: ignore[operator]


class ReplicatedLinear(nn.Module):
    """y = x Wᵀ, no bias, in the dtype of x; gives (y, None). The weight is NaN until the probe sets it."""

    def __init__(self, input_size: int, output_size: int, bias: bool = True, **rest: Any) -> None:
        super().__init__()
        if bias:
            raise HarnessFault("our ReplicatedLinear has no bias", remedy="Give it one in sglang_surroundings.py")
        dtype = rest.get("params_dtype") or torch.bfloat16
        self.input_size, self.output_size = input_size, output_size
        self.weight = nn.Parameter(torch.full((output_size, input_size), torch.nan, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class LayerNorm(nn.Module):
    """srt/layers/layernorm.py: in fp32, out in the dtype of x."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, dtype: torch.dtype = torch.float32, **_: Any) -> None:
        super().__init__()
        self.hidden_size, self.variance_epsilon, self.dtype = hidden_size, eps, dtype
        self.weight = nn.Parameter(torch.full((hidden_size,), torch.nan, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.full((hidden_size,), torch.nan, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.to(self.dtype), (self.hidden_size,), self.weight, self.bias, self.variance_epsilon)
        return y.to(x.dtype)


class Rope(nn.Module):
    """srt/layers/rotary_embedding, forward_native: in fp32, out of place, rounded to the dtype of the input.

    ``cos_sin_cache`` [positions, 64] fp32 = cos | sin. Pairs (i, i + 32) for NeoX, (2i, 2i + 1) interleaved.
    """

    def __init__(self, cos_sin_cache: Tensor, is_neox_style: bool) -> None:
        super().__init__()
        self.cos_sin_cache: Tensor
        self.register_buffer("cos_sin_cache", cos_sin_cache, persistent=False)
        self.is_neox_style = is_neox_style
        self.head_size = self.rotary_dim = cos_sin_cache.shape[1]

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin_cache[positions.flatten()].float().unsqueeze(1).chunk(2, -1)
        return self._turn(query, cos, sin), self._turn(key, cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = x.reshape(len(x), -1, self.rotary_dim).float()
        a, b = y.chunk(2, -1) if self.is_neox_style else (y[..., 0::2], y[..., 1::2])
        first, second = a * cos - b * sin, b * cos + a * sin
        turned = torch.cat([first, second], -1) if self.is_neox_style else torch.stack([first, second], -1)
        return turned.reshape(x.shape).to(x.dtype)


def hadamard_transform(x: Tensor, scale: float = 1.0) -> Tensor:
    """H x · scale along the last dimension (Sylvester order, fp32, rounded to x's dtype): jit_kernel/hadamard.py."""
    y, size = x.float(), x.shape[-1]
    step = 1
    while step < size:
        a, b = y.reshape(*x.shape[:-1], size // (2 * step), 2, step).unbind(-2)
        y = torch.stack([a + b, a - b], -2).reshape(x.shape)
        step *= 2
    return (y * scale).to(x.dtype)


def store_index_k(key: Tensor, cache: Tensor, out_cache_loc: Tensor, page_size: int = PAGE) -> None:
    """Quantise key [T, 128] to e4m3 with one fp32 scale a token (amax / 448, amax ≥ 1e-4) into its slots of the cache.

    jit_kernel/csrc/dsa/fused_store_index_cache.cuh: the store of production, whose scale is not rounded to a power of
    two, unlike that of the Triton fallback.
    """
    x = key.reshape(-1, DIM).float()
    scale = x.abs().amax(-1).clamp(min=1e-4) / 448.0
    codes = (x / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    page, slot = out_cache_loc // page_size, out_cache_loc % page_size
    cache[:, : page_size * DIM].view(len(cache), page_size, DIM)[page, slot] = codes
    cache[:, page_size * DIM :].view(len(cache), page_size, 4)[page, slot] = scale.view(torch.uint8).view(-1, 4)


def seqlens_expand(extend_seq_lens: Tensor, seq_lens: Tensor, total_len: int, max_q_len: int) -> Tensor:
    """[total_len] i32: kv - q + 1 … kv of each sequence in turn (srt/layers/attention/utils.py, Triton there)."""
    pairs = zip(extend_seq_lens.tolist(), seq_lens.tolist(), strict=True)
    rows = [torch.arange(kv - q + 1, kv + 1, dtype=torch.int32) for q, kv in pairs]
    out = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int32)
    if len(out) != total_len:
        raise RuntimeError(f"seqlens_expand: {len(out)} rows for total_len {total_len}")
    return out.to(seq_lens.device)


def rearrange(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """The one pattern of einops that the indexer uses, for machines without einops."""
    if pattern.split() != ["l", "(h", "d)", "->", "l", "h", "d"] or set(sizes) != {"d"}:
        raise HarnessFault(f"einops is not installed, and we know no pattern {pattern!r}", remedy="pip install einops")
    return x.reshape(x.shape[0], -1, sizes["d"])


# ---- what a forward pass is given --------------------------------------------------------------------------


class Pool(Given):
    """The paged K cache of the indexer: ``buffer`` [pages, 8448] u8, written by the candidate's own store path.

    srt/mem_cache/memory_pool.py, DSATokenToKVPool: it only forwards to the candidate's index_buf_accessor.
    """

    def __init__(self, buffer: Tensor, accessor: Any) -> None:
        super().__init__(
            "KV pool", buffer=buffer, accessor=accessor, page_size=PAGE, index_head_dim=DIM, quant_block_size=DIM,
            device=buffer.device, start_layer=0, index_k_with_scale_buffer=[buffer], dsa_kv_cache_store_fp8=True,
            nsa_kv_cache_store_fp8=True, dtype=torch.float8_e4m3fn, kv_cache_dim=656, layer_num=1,
        )  # fmt: skip

    def get_index_k_with_scale_buffer(self, layer_id: int) -> Tensor:
        return self.buffer  # type: ignore[no-any-return]

    def get_index_k_continuous(self, layer_id: int, seq_len: int, page_indices: Tensor) -> Any:
        return self.accessor().GetK.execute(self, self.buffer, seq_len=seq_len, page_indices=page_indices)

    def get_index_k_scale_continuous(self, layer_id: int, seq_len: int, page_indices: Tensor) -> Any:
        return self.accessor().GetS.execute(self, self.buffer, seq_len=seq_len, page_indices=page_indices)

    def get_index_k_scale_buffer(
        self, layer_id: int, seq_len: Any, page_indices: Tensor, seq_len_sum: int | None = None,
        max_seq_len: int | None = None,
    ) -> Any:  # fmt: skip
        execute = self.accessor().GetKAndS.execute
        taken: Mapping[str, Any] = inspect.signature(self.accessor().GetKAndS.triton).parameters
        values = {
            "seq_len": seq_len, "seq_len_tensor": seq_len, "seq_lens": seq_len, "page_indices": page_indices,
            "seq_len_sum": seq_len_sum, "max_seq_len": max_seq_len,
        }  # fmt: skip
        return execute(self, self.buffer, **{name: value for name, value in values.items() if name in taken})

    def set_index_k_scale_buffer(self, layer_id: int, loc: Tensor, index_k: Tensor, index_k_scale: Tensor) -> None:
        self.accessor().SetKAndS.execute(
            pool=self, buf=self.buffer, loc=loc, index_k=index_k, index_k_scale=index_k_scale
        )


class Scene:
    """What the stand-in functions answer with at this moment. Filled by the probe before each call."""

    def __init__(self, *, device: str, arch: str) -> None:
        self.device, self.arch = device, arch
        self.cos_sin_cache: Tensor | None = None
        self.pool: Any = None
        self.attn_backend: Any = None

    @property
    def server_args(self) -> Given:
        return Given(
            "server arguments", device="cuda", pp_size=1, tp_size=1, mem_fraction_static=0.8,
            enable_dsa_prefill_context_parallel=False, enable_nsa_prefill_context_parallel=False,
            dsa_prefill_cp_mode="in-seq-split", nsa_prefill_cp_mode="in-seq-split", speculative_attention_mode="decode",
            dsa_paged_mqa_logits_backend="auto", get_attention_backends=lambda: ("dsa", "dsa"),
            dsa_prefill_backend="flashmla_sparse", dsa_decode_backend="fa3", dsa_topk_backend="sgl-kernel",
            nsa_prefill_backend="flashmla_sparse", nsa_decode_backend="fa3", speculative_eagle_topk=1,
            enable_deterministic_inference=False, disaggregation_mode="null",
        )  # fmt: skip

    @property
    def parallel(self) -> Given:
        return Given(
            "parallel layout", attn_cp_size=1, attn_cp_rank=0, attn_tp_size=1, attn_tp_rank=0, attn_dp_size=1,
            attn_dp_rank=0, tp_size=1, tp_rank=0, pp_size=1, pp_rank=0,
        )  # fmt: skip

    def rope(self, head_size: int, **kwargs: Any) -> Rope:
        if self.cos_sin_cache is None:
            raise HarnessFault("rope was asked for outside a case")
        return Rope(self.cos_sin_cache, bool(kwargs.get("is_neox_style", True)))


def env_flag(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in TRUE


def honest(scene: Scene) -> dict[str, dict[str, Any]]:
    """Module name → names with an honest version. The same name at its older and newer place."""
    sm = int(scene.arch[2:]) if scene.arch.startswith("sm") else 90
    one: Callable[..., int] = lambda *_, **__: 1  # noqa: E731
    asked: dict[str, Any] = {
        "is_cuda": lambda: True,  # on a CPU pretended: the CUDA branch is the one under test
        "is_hip": lambda: False, "is_npu": lambda: False, "is_xpu": lambda: False, "is_cpu": lambda: False,
        "is_blackwell": lambda: sm >= 100, "is_sm90_supported": lambda *_: 90 <= sm < 100,
        "is_sm100_supported": lambda *_: 100 <= sm < 120, "is_sm120_supported": lambda *_: sm >= 120,
        "is_blackwell_supported": lambda *_: sm >= 100, "get_device_sm": lambda: sm, "is_hopper": lambda: sm // 10 == 9,
        "get_bool_env_var": env_flag, "get_int_env_var": lambda name, default=0: int(os.environ.get(name) or default),
        "add_prefix": lambda name, prefix: f"{prefix}.{name}" if prefix else name,
        "ceil_align": lambda x, y: -(-x // y) * y, "align": lambda x, y: -(-x // y) * y,
        "ceil_div": lambda x, y: -(-x // y), "next_power_of_2": lambda n: 1 << max(0, n - 1).bit_length(),
    }  # fmt: skip
    context = {
        "get_attn_backend": lambda: scene.attn_backend, "get_token_to_kv_pool": lambda: scene.pool,
        "get_forward_context": lambda: None,
    }  # fmt: skip
    arguments = {
        "get_global_server_args": lambda: scene.server_args, "get_server_args": lambda: scene.server_args,
        "get_parallel": lambda: scene.parallel,
        "get_buffer": lambda name, shape=None, *args, **kwargs: None,
    }  # fmt: skip
    fp8 = {"fp8_dtype": torch.float8_e4m3fn, "is_fp8_fnuz": lambda: False}
    op = {"MultiPlatformOp": MultiPlatformOp, "CustomOp": MultiPlatformOp}
    expand = {"seqlens_expand_triton": seqlens_expand}
    return {
        "sglang.utils": {"is_in_ci": lambda: False},
        "sglang.srt.utils": asked, "sglang.srt.utils.common": asked,
        "sglang.srt.layers.linear": {"ReplicatedLinear": ReplicatedLinear},
        "sglang.srt.layers.layernorm": {"LayerNorm": LayerNorm},
        "sglang.srt.layers.rotary_embedding": {"get_rope_wrapper": scene.rope, "get_rope": scene.rope},
        "sglang.srt.layers.utils": op, "sglang.srt.layers.utils.multi_platform": op, "sglang.srt.custom_op": op,
        "sglang.srt.layers.quantization.fp8_kernel": fp8, "sglang.kernels.ops.quantization.fp8_kernel": fp8,
        "sglang.srt.layers.attention.utils": expand, "sglang.kernels.ops.attention.utils": expand,
        "sglang.srt.layers.dp_attention": {"get_attention_tp_size": one},
        "sglang.srt.configs.model_config": {
            "is_deepseek_dsa": lambda *_: True, "is_deepseek_nsa": lambda *_: True,
            "get_dsa_index_topk": lambda config: config.index_topk,
            "get_nsa_index_topk": lambda config: config.index_topk,
        },
        "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
        "sglang.srt.model_executor.forward_context": context,
        "sglang.srt.model_executor.runner": {"get_is_capture_mode": lambda: False},
        "sglang.srt.model_executor.cuda_graph_runner": {"get_is_capture_mode": lambda: False},
        "sglang.srt.model_executor.runner_utils": {"get_is_capture_mode": lambda: False},
        "sglang.srt.server_args": arguments, "sglang.srt.runtime_context": arguments,
        "sglang.srt.state_capturer.indexer_topk": {"maybe_capture_indexer_topk": lambda layer, topk: topk},
        "sglang.srt.layers.attention.indexer_topk_capturer": {"maybe_capture_indexer_topk": lambda layer, topk: topk},
    }  # fmt: skip


def only_on_cpu() -> dict[str, dict[str, Any]]:
    """Kernels that are CUDA code compiled on the spot, in torch. On a GPU the candidate's own run."""
    can: Callable[..., bool] = lambda *_, **__: True  # noqa: E731
    plan: Callable[..., Tensor] = lambda lens, *_: lens.new_zeros(len(lens) + 1, 2)  # noqa: E731
    return {
        "sglang.jit_kernel.dsv4.topk": {"plan_topk_v2": plan},  # read by the top-k kernel only, which is not run here
        "sglang.jit_kernel.hadamard": {"hadamard_transform": hadamard_transform},
        "sglang.jit_kernel.fused_store_index_cache": {
            "fused_store_index_k_cache": store_index_k, "can_use_dsa_fused_store": can, "can_use_nsa_fused_store": can,
        },
    }  # fmt: skip


def einops() -> dict[str, dict[str, Any]]:
    """einops where it is not installed."""
    try:
        importlib.import_module("einops")
    except ImportError:
        return {"einops": {"rearrange": rearrange}}
    return {}
