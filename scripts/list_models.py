"""Writes the table of docs/models.md that says of every decoder type of transformers how it would be served.

Each type's default config, of a few layers, is read as a model folder's would be; nothing is downloaded or computed.
Run it with the newest transformers; tests/parity/test_every_type.py says when the table is stale.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import transformers  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from minisgl_backend.errors import ConfigError  # noqa: E402
from minisgl_backend.models.choose import load_model_config  # noqa: E402
from minisgl_backend.models.families import FAMILIES  # noqa: E402
from tests.parity.decoder_types import SERVED, small_config  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table types -->", "<!-- /table types -->"
NATIVE, FALLBACK = "a native family", "transformers' code"
# Served, but not equal within the tests' tolerance: many loops over the same layers, or no answer to compare with.
NOT_COMPARED = {"hrm_text", "dory", "moshi"}
_LONGEST_REASON = 150
LAYERS = 6  # enough for the patterns in which types of layers take turns


@dataclass(frozen=True)
class Row:
    """One type of transformers."""

    model_type: str
    architecture: str
    through: str  # NATIVE, FALLBACK or ""
    reason: str = ""  # why it is refused

    def text(self) -> str:
        compared = "not compared" if self.model_type in NOT_COMPARED else "compared"
        return (
            f"| `{self.model_type}` | `{self.architecture}` | {self.through or 'refused'} | {self.reason or compared} |"
        )


def default_config(model_type: str) -> Any:
    """As config.json would have it; None: transformers has no default for it, or it is no decoder alone."""
    config: Any = None
    attempts: tuple[dict[str, Any], ...] = ({"num_hidden_layers": LAYERS}, {})
    for changes in attempts:  # lists of one entry a layer may forbid the first
        try:
            config = config or CONFIG_MAPPING[model_type](**changes)
        except Exception:  # config classes raise errors of all kinds
            continue
    if config is None:
        return None
    if config.is_encoder_decoder or config.get_text_config().is_encoder_decoder:
        return None
    end, text = getattr(config, "eos_token_id", None), config.get_text_config()
    if isinstance(end, int) and end >= getattr(text, "vocab_size", end + 1):
        config.eos_token_id = None  # as some defaults have it
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    return config


def row(model_type: str) -> Row | None:
    """What is said of the type's default config; None: it has none."""
    config = default_config(model_type)
    if config is None:
        return None
    architecture = config.architectures[0]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        through, refusal = _through(folder)
        if not through and (
            model_type in SERVED or architecture in FAMILIES
        ):  # its default config lacks something that every checkpoint's has
            small = small_config(model_type)
            small.architectures = [architecture]
            small.save_pretrained(folder)
            through, refusal = _through(folder)
        return Row(model_type, architecture, through, _short(refusal))


def _through(folder: str) -> tuple[str, str]:
    """NATIVE or FALLBACK; or "" and why it is refused."""
    refusal = ""
    for model_impl, through in (("native", NATIVE), ("transformers", FALLBACK)):
        try:
            load_model_config(folder, model_impl)
            return through, ""
        except ConfigError as error:
            refusal = str(error)
    return "", refusal


def _short(reason: str) -> str:
    """Without what the table has in other columns."""
    reason = re.sub(r"^config\.json: \w+ is not served through transformers' code: it ", "", reason)
    reason = re.sub(r"^config\.json: ", "", reason).split("; allowed")[0].replace("|", "/").replace("\n", " ")
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON].rsplit(" ", 1)[0] + " ..."


def table(rows: list[Row]) -> str:
    """Markdown."""
    counts = {through: sum(one.through == through for one in rows) for through in (NATIVE, FALLBACK, "")}
    head = (
        f"Of the {len(rows)} types in transformers {transformers.__version__}, with the default config of each: "
        f"{counts[NATIVE]} run natively, {counts[FALLBACK]} through transformers' code, {counts['']} are refused.\n\n"
        "| `model_type` | class | runs through | compared with transformers, or why it is refused |\n"
        "| --- | --- | --- | --- |"
    )
    return "\n".join([head, *(one.text() for one in rows)])


def page(text: str, rows: list[Row]) -> str:
    """The page with the table in its place."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.split(END)[1]}"


def all_rows() -> list[Row]:
    found = (row(model_type) for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    return [one for one in found if one is not None]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), all_rows()), encoding="utf-8")
