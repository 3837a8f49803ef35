"""Qwen2.5-VL, text: Qwen2-VL's."""

from dataclasses import replace

from minisgl_backend.models.families import qwen2_vl

FAMILY = replace(qwen2_vl.FAMILY, model_type="qwen2_5_vl")
