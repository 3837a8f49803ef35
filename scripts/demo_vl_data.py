"""What the demo model with eyes is trained on: its tokenizer, and batches of images with conversations about them."""

from __future__ import annotations

import argparse
import math
import mmap
import multiprocessing as mp
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks import demo_scenes, demo_sights
from minisgl_backend.images.decode import pixels_of
from minisgl_backend.images.families.qwen_vl import QwenVL
from minisgl_backend.images.processor_files import ProcessorFiles
from scripts.demo_vl_model import (
    CHANNELS,
    END,
    GRID_NUMBER,
    GRIDS,
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    MERGE,
    MOST,
    PAD,
    PATCH,
    PATCHES,
    PIXELS,
    SPECIAL_TOKENS,
    START,
    TEXT,
    VIDEO,
)
from scripts.train_demo_model import learn_tokenizer, write_json

CHAT_TEMPLATE = """\
{%- for message in messages %}
  {{- '<|im_start|>' + message['role'] + '\\n' }}
  {%- if message['content'] is string %}{{- message['content'] }}
  {%- else %}
    {%- for part in message['content'] or [] %}
      {%- if part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
      {%- elif part['text'] %}{{- part['text'] }}{%- endif %}
    {%- endfor %}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# A digit is a token of its own, and a word with the space before it.
PIECES = r"\p{N}| ?[\p{L}\p{M}]+|\n| ?[^\s\p{L}\p{N}]+|\s"

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "size": {"shortest_edge": 112 * 112, "longest_edge": 168 * 168},
    "image_mean": [0.5] * CHANNELS,
    "image_std": [0.5] * CHANNELS,
}

FAMILY = QwenVL.read(ProcessorFiles(config={}, image=PROCESSOR))
LAYOUTS = ("row", "row", "column", "scatter", "scatter", "number", "number", "number", "fields")


def write_tokenizer(folder: Path) -> None:
    """Learn a tokenizer from generated conversations and write tokenizer.json."""
    rng = Random("tokenizer")
    pool = [draw_scene(rng) for _ in range(256)]
    texts = ["user\n", "assistant\n", "system\n", "tool\n"] * 100
    for _ in range(1500):
        for sight in demo_sights.training_sights(pool, rng):
            texts += [*(part for part in sight.parts if isinstance(part, str)), sight.answer]
    learn_tokenizer(texts, PIECES, SPECIAL_TOKENS, TEXT.vocab_size).save(str(folder / "tokenizer.json"))


def write_texts(folder: Path) -> None:
    """tokenizer_config.json, with the chat template, and preprocessor_config.json."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen3VLProcessor",
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "unk_token": None,
        "image_token": SPECIAL_TOKENS[IMAGE],
        "video_token": SPECIAL_TOKENS[VIDEO],
        "vision_bos_token": SPECIAL_TOKENS[IMAGE_START],
        "vision_eos_token": SPECIAL_TOKENS[IMAGE_END],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": TEXT.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "preprocessor_config.json", PROCESSOR)


def draw_scene(rng: Random) -> demo_scenes.Scene:
    return demo_scenes.draw_scene(rng, LAYOUTS, held_out=False)


def patches_of(image: Image.Image) -> tuple[np.ndarray, int]:
    """uint8 [PATCHES, PIXELS], zero behind the image's own, as a server's workers make them; and its grid's number."""
    size = FAMILY.size(*image.size)
    pixels = pixels_of(image, size.views, size.shape, FAMILY.resample)[0]
    rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    blocks = pixels.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, CHANNELS)
    found = np.zeros((PATCHES, PIXELS), np.uint8)
    found[: rows * columns] = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, PIXELS)
    return found, GRID_NUMBER[rows // MERGE, columns // MERGE]


class Rows:
    """Conversations as rows of tokens, each as long as it fits.

    ids, weight [rows, tokens]: weight of each token as what is predicted; positions [rows, 3, tokens]; vector [rows,
    tokens]: number of the image's vector that stands there, image * MOST + its own, or -1.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int, tokens: int) -> None:
        self._encode = lru_cache(10_000)(lambda text: tokenizer.encode(text).ids)
        self._tokens = tokens
        self.ids = np.zeros((rows, tokens), np.int32)
        self.weight = np.zeros((rows, tokens), np.int32)
        self.positions = np.zeros((rows, 3, tokens), np.int32)
        self.vector = np.full((rows, tokens), -1, np.int32)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.ids, self.weight, self.positions, self.vector

    def fill(self, row: int, turns: Sequence[tuple[Sequence[Any], str]], grids: np.ndarray, system: str = "") -> None:
        """Turns: parts of the user's message, texts or numbers of images; and the answer."""
        for array, empty in zip(self.arrays, (PAD, 0, 0, -1), strict=True):
            array[row] = empty
        first = [START, *self._encode(f"system\n{system}"), END, *self._encode("\n")] if system else []
        filled = position = len(first)
        self.ids[row, :filled], self.positions[row, :, :filled] = first, np.arange(filled)
        for parts, answer in turns:
            ids, vectors, places = self._turn(parts, answer, position, grids)
            if filled + len(ids) > self._tokens:
                return
            span = slice(filled, filled + len(ids))
            answered = len(self._encode(answer)) + 1
            self.ids[row, span], self.vector[row, span], self.positions[row, :, span] = ids, vectors, places
            self.weight[row, span.stop - 1 - answered : span.stop - 1] = 1
            filled, position = span.stop, int(places.max()) + 1

    def _turn(
        self, parts: Sequence[Any], answer: str, position: int, grids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids: list[int] = [START, *self._encode("user\n")]
        spans: list[tuple[int, int, int]] = []  # of images: begin, number, grid
        for part in parts:
            if isinstance(part, str):
                ids += self._encode(part)
                continue
            rows, columns = GRIDS[grids[part]]
            spans.append((len(ids) + 1, part, grids[part]))
            ids += [IMAGE_START, *[IMAGE] * (rows * columns), IMAGE_END]
        ids += [END, *self._encode("\n"), START, *self._encode("assistant\n"), *self._encode(answer), END]
        ids += self._encode("\n")
        vectors = np.full(len(ids), -1, np.int32)
        steps = np.ones(len(ids), np.int32)
        for begin, image, grid in spans:
            rows, columns = GRIDS[grid]
            span = slice(begin, begin + rows * columns)
            vectors[span] = image * MOST + np.arange(rows * columns)
            steps[span] = 0
            steps[span.stop - 1] = max(rows, columns)
        places = np.repeat((position + np.cumsum(steps) - steps)[None], 3, axis=0).astype(np.int32)
        for begin, _, grid in spans:
            rows, columns = GRIDS[grid]
            span = slice(begin, begin + rows * columns)
            places[:, span] = places[0, begin] + np.stack(
                [np.zeros(rows * columns, np.int32), *np.divmod(np.arange(rows * columns, dtype=np.int32), columns)]
            )
        return np.array(ids, np.int32), vectors, places


def training_batch(rng: Random, tokenizer: Tokenizer, into: Sequence[np.ndarray]) -> None:
    """Images with conversations about them, written into the arrays of `batch_shapes`."""
    patches, grids, *arrays = into
    scenes = [draw_scene(rng) for _ in range(len(patches))]
    for number, scene in enumerate(scenes):
        patches[number], grids[number] = patches_of(demo_scenes.draw_image(scene, rng))
    rows = Rows(tokenizer, len(arrays[0]), arrays[0].shape[1])
    number_of = {id(scene): number for number, scene in enumerate(scenes)}
    for row in range(len(arrays[0])):
        sights = demo_sights.training_sights(scenes, rng)
        turns = [([_number(part, number_of) for part in sight.parts], sight.answer) for sight in sights]
        rows.fill(row, turns, grids, demo_sights.system_prompt(rng))
    for array, found in zip(arrays, rows.arrays, strict=True):
        array[:] = found


def _number(part: Any, number_of: dict[int, int]) -> Any:
    return part if isinstance(part, str) else number_of[id(part)]


def batch_shapes(images: int, rows: int, tokens: int) -> list[tuple[tuple[int, ...], type]]:
    row = (rows, tokens)
    return [
        *(((images, PATCHES, PIXELS), np.uint8), ((images,), np.int32)),
        *((row, np.int32), (row, np.int32), ((rows, 3, tokens), np.int32), (row, np.int32)),
    ]


def _fill(memory: mmap.mmap, shapes: Any, slots: Any, full: Any, tokenizer_path: str, seed: str) -> None:
    tokenizer, rng = Tokenizer.from_file(tokenizer_path), Random(seed)
    while True:
        slot = slots.get()
        training_batch(rng, tokenizer, _views(memory, shapes, slot))
        full.put(slot)


def _num_bytes(shapes: Sequence[tuple[tuple[int, ...], type]]) -> int:
    return sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in shapes)


def _views(memory: mmap.mmap, shapes: Sequence[tuple[tuple[int, ...], type]], slot: int) -> list[np.ndarray]:
    at = slot * _num_bytes(shapes)
    found: list[np.ndarray] = []
    for shape, kind in shapes:
        found.append(np.frombuffer(memory, kind, math.prod(shape), at).reshape(shape))
        at += found[-1].nbytes
    return found


class DataStream:
    """Batches from worker processes, through memory that is shared with them; `close` ends the workers."""

    def __init__(self, tokenizer_path: Path, options: argparse.Namespace) -> None:
        context = mp.get_context("fork")  # which shares memory that no file system bounds
        self._shapes = batch_shapes(options.images, options.rows, options.row_tokens)
        slots = options.workers + 6
        self._memory = mmap.mmap(-1, slots * _num_bytes(self._shapes))
        self._free, self._full = context.Queue(), context.Queue()
        for slot in range(slots):
            self._free.put(slot)
        stamp = f"{options.seed}/{time.time()}" if options.resume else str(options.seed)
        shared = (self._memory, self._shapes, self._free, self._full, str(tokenizer_path))
        self._workers = [
            context.Process(target=_fill, args=(*shared, f"{stamp}/{number}"), daemon=True)
            for number in range(options.workers)
        ]
        for worker in self._workers:
            worker.start()

    def next(self, device: torch.device) -> list[Tensor]:
        slot = self._full.get(timeout=300)
        found = [torch.from_numpy(one).to(device, copy=True) for one in _views(self._memory, self._shapes, slot)]
        self._free.put(slot)
        return found

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()
