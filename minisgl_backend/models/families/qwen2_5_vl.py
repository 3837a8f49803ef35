"""Qwen2.5-VL, text: Qwen2-VL's."""

from dataclasses import replace
from functools import partial

from minisgl_backend.models.families import qwen2_vl
from minisgl_backend.models.families.eyes import qwen_vision

FAMILY = replace(qwen2_vl.FAMILY, model_type="qwen2_5_vl", encoder=partial(qwen_vision, generation="2.5"))
