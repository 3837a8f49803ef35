"""Model folders of families that see, without weights: processors' files, a small tokenizer, a chat template."""

from __future__ import annotations

import io
import json

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from minisgl_backend.images.families import family_of
from minisgl_backend.images.placeholders import Placeholders
from minisgl_backend.text.tokenizer import Tokenizer as OurTokenizer

TEXTS = ["Hello world, what is in it?\n\nTwo cats.\n", "row_1_col_1 image pad <|im_start|>user assistant"] * 3
PINPOINTS = [[336, 672], [672, 336], [672, 672]]
FILES = {
    "qwen2_vl": {"max_pixels": 100_000},
    "glm4v": {"size": {"shortest_edge": 12544, "longest_edge": 100_000}},
    "gemma3": {},
    "mistral3": {"size": {"longest_edge": 200}, "patch_size": 16},
    "idefics3": {},
    "llava_onevision": {"image_grid_pinpoints": PINPOINTS},
    "smolvlm": {"size": {"longest_edge": 1024}, "max_image_size": {"longest_edge": 512}},
    "internvl": {"size": {"height": 448, "width": 448}},
    "llava": {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    "llava_next": {"size": {"shortest_edge": 336}, "image_grid_pinpoints": PINPOINTS},
}
# As the models' own: {% generation %} aside, what matters of them.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}BEFOREAFTER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AROUND = {"qwen2_vl": ("<|vision_start|>", "<|vision_end|>"), "glm4v": ("<|begin_of_image|>", "<|end_of_image|>")}


def _backend(kind, added):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind != "bytes"))
    special = ["<unk>", "<s>", *(f"<0x{n:02X}>" for n in range(256) if kind != "bytes")]
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        alphabet = [*"▁\n"]
        steps = [normalizers.Prepend("▁")] if kind == "prefix" else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        special += added[:2] if kind == "vocabulary" else []  # as Gemma's, whose vocabulary has them
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, "\n\n", "\n\n\n"], trainer)
    if kind != "bytes":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    for text in ("<|im_start|>", "<|im_end|>", *added, "<|behind|>"):
        tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
    return tokenizer


class SeeingModel:
    """A family's model with a tokenizer."""

    def __init__(self, model_type, kind, path):
        for name, values in (("config", {"model_type": model_type}), ("preprocessor_config", FILES[model_type])):
            (path / f"{name}.json").write_text(json.dumps({**values, "image_processor_type": "x"}))
        self.path, self.family = path, family_of(path)
        backend = _backend(kind, list(self.family.reserved))
        self.plain = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>" if kind != "bytes" else None, unk_token="<unk>"
        )
        before, after = AROUND.get(model_type, ("", ""))
        slot = before + self.family.slot + after
        self.plain.chat_template = TEMPLATE.replace("BEFOREAFTER", slot)
        self.plain.save_pretrained(path)
        self.tokenizer = OurTokenizer(path)
        self.placeholders = Placeholders(self.tokenizer, self.family)
        self.around = (before, after)

    def text(self, size):
        return "".join(part if isinstance(part, str) else self.family.vector * part for part in size.layout)

    def check(self, prompt, ids, sizes):
        assert prompt.token_ids.tolist() == ids
        vector = self.plain.convert_tokens_to_ids(self.family.vector)
        for span, size in zip(prompt.spans, sizes, strict=True):
            runs = span.runs or (0, span.length)
            assert sum(runs[1::2]) == size.num_vectors
            for start, length in zip(runs[::2], runs[1::2], strict=True):
                assert (prompt.token_ids[span.start + start :][:length] == vector).all()
            assert runs[0] == 0
            assert runs[-2] + runs[-1] == span.length


def picture(width: int, height: int, kind: str = "PNG", **options) -> bytes:
    """A file of coloured noise, the same for equal sizes."""
    rng = np.random.default_rng(width * 10_000 + height)
    pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), kind, **options)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
