"""Kernels that compute an attention as a whole: one small adapter each, all registered here.

An adapter makes an `AttentionCall` of a kernel's arguments. `docs/adapters.md` shows how to add one.
"""

from __future__ import annotations

from attn_monitor.capture.kernels import flash, flex, operators, registered, varlen, xformers
from attn_monitor.capture.kernels.registry import KernelCall, register_kernel, register_operator

__all__ = ["KernelCall", "register_kernel", "register_operator"]

FLASH_ATTENTION_3 = "flash_attn_interface"
for _home in ("flash_attn", "flash_attn.flash_attn_interface", FLASH_ATTENTION_3):
    register_kernel(f"{_home}:flash_attn_func")(flash.read_dense)
    register_kernel(f"{_home}:flash_attn_varlen_func")(flash.read_varlen)
    register_kernel(f"{_home}:flash_attn_qkvpacked_func")(flash.read_packed_qkv)
    register_kernel(f"{_home}:flash_attn_kvpacked_func")(flash.read_packed_kv)
    register_kernel(f"{_home}:flash_attn_varlen_qkvpacked_func")(flash.read_varlen_packed_qkv)
    register_kernel(f"{_home}:flash_attn_varlen_kvpacked_func")(flash.read_varlen_packed_kv)
    register_kernel(f"{_home}:flash_attn_with_kvcache")(flash.read_cached)
for _home in ("xformers.ops", "xformers.ops.fmha"):
    register_kernel(f"{_home}:memory_efficient_attention")(xformers.read)
register_operator("flex_attention")(flex.read)
register_operator("torch_attn::_varlen_attn")(varlen.read)
for _name in operators.FUSED:
    register_operator(f"aten::{_name}")(operators.read)
registered.install()
