"""Builds a model of transformers on its device, with the weights of its checkpoint."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.select import select_kernels, select_ops
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.fallback import attention, describe
from minisgl_backend.models.fallback.fuse import fuse
from minisgl_backend.models.fallback.independence import mixes_tokens
from minisgl_backend.models.fallback.module import TransformersCausalLM, base_name
from minisgl_backend.models.fallback.probe import attention_calls, refusal
from minisgl_backend.models.fallback.rope import fix_rope
from minisgl_backend.models.fallback.source import Source, UnservedError, find_source, reasons
from minisgl_backend.models.json_files import read_json
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.weights.shards import hint_at_prefix, some

log = logging.getLogger(__name__)

# Names of the text model in checkpoints with encoders.
_TEXT_NAMES = {r"^(model\.)?language_model\.(model\.)?(?!lm_head)": "model.", r"^language_model\.lm_head": "lm_head"}


def build_fallback(config: ModelConfig, folder: str | Path, load: LoadConfig) -> TransformersCausalLM:
    """Raises ConfigError naming tensors that are missing or have another shape than in config.json, or computations of
    the model that do not work with batches."""
    folder, dtype, device = Path(folder), load.dtype, load.device
    source = find_source(folder, read_json(folder / "config.json"), trust_remote_code=load.trust_remote_code)
    probed = describe.build_on_meta(source, dtype)
    base = base_name(probed)
    if base is None or config.implementation != "transformers":
        raise RuntimeError("describe() refuses such models")
    sinks = [call.sinks for call in attention_calls(probed, getattr(probed, base))[0]]
    del probed
    attention.register()
    model = _load(source, None if load.dummy_weights else folder, dtype, device)
    total = sum(parameter.nbytes for parameter in model.parameters())
    load.on_progress(total, total)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    fix_rope(model, load.max_seq_len)
    if mixes_tokens(model, getattr(model, base), config.vocab_size):
        reason = UnservedError(
            "mixes tokens outside of attention, so that sequences in a batch would change each other"
        )
        raise refusal(source.name, reason)
    ops = select_ops(device, int(source.config.hidden_size), dtype)
    others = fuse(model.eval(), ops, select_kernels(ops, device).mixtures)
    if others and device.type == "cuda" and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"dtype is {name}; allowed on a GPU for the experts of {source.name}: bfloat16, in which torch multiplies "
            "them without waiting for the device"
        )
    return TransformersCausalLM(model, base, sinks)


def _load(source: Source, folder: Path | None, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """`folder`: None: random weights, as transformers initialises them."""
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {}
    if source.model_class._can_set_experts_implementation():
        options["experts_implementation"] = "grouped_mm" if device.type == "cuda" else "eager"
    if device.type != "cpu" and importlib.util.find_spec("accelerate") is not None:
        options["device_map"] = {"": device}  # each tensor is moved there once it is read
    if source.is_part:
        options["key_mapping"] = _TEXT_NAMES
    if folder is None:
        options["state_dict"] = {}
        torch.manual_seed(0)
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # tensor names are checked here
    try:
        with reasons(f"cannot load {source.name}"):
            loaded: Any = source.model_class.from_pretrained(
                folder and str(folder),
                config=source.config,
                dtype=dtype,
                attn_implementation=attention.IMPLEMENTATION,
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=True,
                **options,
            )
    finally:
        transformers.utils.logging.set_verbosity(level)
    model, report = loaded
    if folder is not None:
        _check_names(source, report)
    moved: PreTrainedModel = model.to(device)
    return moved


def _check_names(source: Source, report: dict[str, Any]) -> None:
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    mismatched = sorted(str(one[0]) for one in report["mismatched_keys"])
    if missing or mismatched:
        what = "lacks" if missing else "has in another shape"
        found = missing or mismatched
        raise ConfigError(
            f"the checkpoint {what} {len(found)} tensors that {source.name} with this config.json has: {some(found)}"
            f"{hint_at_prefix(missing, unexpected)}"
        )
    if unexpected and source.is_part:
        log.warning("%d tensors of the checkpoint are of no use for text and left out", len(unexpected))
    elif unexpected:
        raise ConfigError(
            f"the checkpoint has {len(unexpected)} tensors that {source.name} with this config.json does not have: "
            f"{some(unexpected)}"
        )
