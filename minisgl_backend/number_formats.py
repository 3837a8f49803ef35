"""Number formats, once: what options, model folders, attention backends and KV tensors call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# Of weights and computation: named as in config.json, and in torch.
DTYPES = ("bfloat16", "float16", "float32")

# Of the KV cache: the option's value -> the name in torch. FP8 is E4M3 of Micikevicius et al. 2022, without infinities.
FP8_E4M3 = "float8_e4m3fn"
KV_CACHE_DTYPES: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp8_e4m3": FP8_E4M3}
)


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """A number format of the weights of linear layers and experts. Weights in the model's own have none."""

    title: str  # what of it is served, in words
    factory: str  # MODULE:CLASS of its `weights.method.MethodFactory`, imported when a model first uses it
    capability: tuple[int, int]  # of a GPU, at least
    # quant_method of quantization_config -> MODULE:FUNCTION, which says whether a checkpoint is in this
    # format, and in which variant: a `weights.quantization_config.SchemeReader`, in a module without torch.
    readers: Mapping[str, str] = field(default_factory=dict)
    vocabulary: bool = False  # embeddings and LM heads are in it, too
    converts: bool = False  # 16-bit weights while they load: the option `quantization`; these take:
    number_bytes: float = 0  # of one number of a weight
    output_bytes: int = 0  # of the scales of one output


WEIGHT_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "fp8": WeightFormat(
            title="FP8 (e4m3) with a scale for each tensor, each output, or each block",
            factory="minisgl_backend.weights.fp8:Fp8Factory",
            capability=(8, 9),
            readers={
                "fp8": "minisgl_backend.weights.schemes.fp8:read_fp8",
                "modelopt": "minisgl_backend.weights.schemes.fp8:read_modelopt",
                "compressed-tensors": "minisgl_backend.weights.schemes.fp8:read_compressed_tensors",
            },
            converts=True,
            number_bytes=1,
            output_bytes=4,
        ),
        "int8": WeightFormat(
            title="8-bit integers with a scale for each output or tensor, activations with one for each token",
            factory="minisgl_backend.weights.int8:Int8Factory",
            capability=(7, 5),
            readers={"compressed-tensors": "minisgl_backend.weights.schemes.int8:read_compressed_tensors"},
        ),
        "int4": WeightFormat(
            title="4-bit weights with scales of groups of inputs (AWQ, GPTQ, AutoRound, pack-quantized)",
            factory="minisgl_backend.weights.int4:Int4Factory",
            capability=(8, 0),
            readers={
                "awq": "minisgl_backend.weights.schemes.int4:read_awq",
                "gptq": "minisgl_backend.weights.schemes.int4:read_gptq",
                "auto-round": "minisgl_backend.weights.schemes.int4:read_auto_round",
                "compressed-tensors": "minisgl_backend.weights.schemes.int4:read_compressed_tensors",
            },
        ),
        "mxfp4": WeightFormat(
            title="MXFP4 experts, as gpt-oss is published",
            factory="minisgl_backend.weights.mxfp4:Mxfp4Factory",
            capability=(8, 0),
            readers={"mxfp4": "minisgl_backend.weights.schemes.mxfp4:read_mxfp4"},
        ),
        "gguf": WeightFormat(  # of GGUF files, where `weights.schemes.gguf` says so
            title="GGUF's blocks (on CPUs Q4_0 to Q8_0 and Q4_K to Q6_K, on GPUs Q4_0, Q5_0, Q8_0, Q4_K, Q5_K, Q6_K)",
            factory="minisgl_backend.weights.gguf:GGUFFactory",
            capability=(8, 0),
            vocabulary=True,
        ),
    }
)
# Types of GGUF's blocks that kernels multiply as they lie in files, by ggml's numbers. Others become plain numbers.
GGUF_BLOCKS: Mapping[str, int] = MappingProxyType(
    {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
)
# What the option `quantization` may be.
CONVERTED_FORMATS = tuple(name for name, row in WEIGHT_FORMATS.items() if row.converts)
