"""docs/tensors.md lists the tensors of `serving/tensors.py`, in its order, with its types and its reasons to refuse."""

from __future__ import annotations

import re

import pytest

from minisgl_backend.serving import schema, tensors
from minisgl_backend.serving.fields import ALIASES
from tests.docs.blocks import ROOT

TEXT = (ROOT / "docs" / "tensors.md").read_text(encoding="utf-8")
OWN = next(ensemble for ensemble in schema.ENSEMBLES if ensemble.name == "tensorrt_llm")
SECTIONS = {
    "Inputs": tensors.INPUTS,
    "Images by NVIDIA's names": tensors.IMAGE_INPUTS,
    "Outputs": tensors.OUTPUTS,
    "Inputs of `tensorrt_llm`": (
        *tensors.TOKEN_OUTPUTS,
        *tensors.SEQUENCE_LENGTH,
        *(tensor for tensor in OWN.inputs if tensor not in tensors.INPUTS),
    ),
    "embedding": (*tensors.EMBEDDING_INPUTS, *tensors.VECTOR_OUTPUTS),
    "Inputs of `llmapi`": tensors.LLMAPI_INPUTS,
    "Outputs of `llmapi`": tensors.LLMAPI_OUTPUTS,
    "Between the models": (
        *tensors.ENGINE_INPUTS,
        *tensors.CHUNK,
        *tensors.PROMPT_OUTPUTS,
        *tensors.RENAMED_INPUTS,
    ),
}


def section(title: str) -> str:
    return TEXT.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_has_the_tensors_of_the_schema(title: str) -> None:
    lines = re.findall(r"^\| `(\w+)` \| (\w+) \[(.*?)\] \| (.+) \|$", section(title), re.M)
    assert [line[:3] for line in lines] == [
        (tensor.name, tensor.dtype, ", ".join(map(str, tensor.dims))) for tensor in SECTIONS[title]
    ]
    for (name, _, _, meaning), tensor in zip(lines, SECTIONS[title], strict=True):
        assert meaning.startswith("refused: ") == bool(tensor.refused), name
        assert not tensor.refused or meaning == f"refused: {tensor.refused}"


def test_every_model_is_named() -> None:
    assert {model for model in schema.MODELS if f"`{model}`" not in section("The models")} == set()


def test_a_vllm_model_takes_the_first_inputs() -> None:
    assert tensors.INPUTS[: len(tensors.COMMON_INPUTS)] == tensors.COMMON_INPUTS
    assert tensors.COMMON_INPUTS[-1].name == "embedding_request"


def test_every_other_name_of_a_field_is_told() -> None:
    assert {name for name in ALIASES if f"`{name}`" not in TEXT} == set()
