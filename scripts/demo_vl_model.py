"""The demo model with eyes as it is trained: Qwen3-VL in small, images and conversations in batches of one shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scripts.train_demo_model import Attention, Layer, RMSNorm, Shape, rotate, write_json

SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
PAD, START, END, IMAGE_START, IMAGE_END, IMAGE, VIDEO = range(len(SPECIAL_TOKENS))
TEXT = Shape(vocab_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, rope_theta=10000.0)
SECTIONS = (12, 10, 10)  # of a head's 32 angles: by time, row and column, interleaved
TABLES = ("embed_tokens.weight", "pos_embed.weight")  # parameters of which a step uses some rows
PATCH, MERGE, CHANNELS = 14, 2, 3
MOST = 36  # tokens of an image
PATCHES = MOST * MERGE**2
PIXELS = CHANNELS * PATCH**2  # values of a patch
# Rows and columns of tokens that images of usual shapes have.
GRIDS = [(rows, columns) for rows in range(1, MOST + 1) for columns in range(1, MOST // rows + 1)]
GRID_NUMBER = {grid: number for number, grid in enumerate(GRIDS)}


@dataclass(frozen=True)
class Eyes:
    """The encoder, under the names that Qwen3-VL's config.json uses."""

    depth: int = 4
    hidden_size: int = 128
    intermediate_size: int = 256
    num_heads: int = 4
    num_position_embeddings: int = 144
    deepstack_visual_indexes: tuple[int, ...] = (1,)


class CausalAttention(Attention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: None) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class CausalLayer(Layer):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.self_attn = CausalAttention(shape)


class EyesAttention(nn.Module):
    def __init__(self, eyes: Eyes) -> None:
        super().__init__()
        self.num_heads = eyes.num_heads
        self.qkv = nn.Linear(eyes.hidden_size, 3 * eyes.hidden_size)
        self.proj = nn.Linear(eyes.hidden_size, eyes.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(heads[0], cos, sin), rotate(heads[1], cos, sin)
        out = F.scaled_dot_product_attention(q, k, heads[2], attn_mask=mask)
        return self.proj(out.transpose(1, 2).flatten(2))


class EyesMLP(nn.Module):
    def __init__(self, eyes: Eyes) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(eyes.hidden_size, eyes.intermediate_size)
        self.linear_fc2 = nn.Linear(eyes.intermediate_size, eyes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, eyes: Eyes) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(eyes.hidden_size, eps=1e-6) for _ in range(2))
        self.attn, self.mlp = EyesAttention(eyes), EyesMLP(eyes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, mask)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Four patches become one vector."""

    def __init__(self, eyes: Eyes, joined: bool) -> None:
        super().__init__()
        size = eyes.hidden_size * MERGE**2
        self.norm = nn.LayerNorm(size if joined else eyes.hidden_size, eps=1e-6)
        self.linear_fc1, self.linear_fc2 = nn.Linear(size, size), nn.Linear(size, TEXT.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        size = self.linear_fc1.in_features
        joined = self.norm(x.reshape(*x.shape[:-2], -1, self.norm.normalized_shape[0])).reshape(*x.shape[:-2], -1, size)
        return self.linear_fc2(F.gelu(self.linear_fc1(joined)))


class PatchEmbedding(nn.Module):
    def __init__(self, eyes: Eyes) -> None:
        super().__init__()
        self.proj = nn.Linear(PIXELS, eyes.hidden_size)


class Visual(nn.Module):
    # By grid: `cos` and `sin` [grids, PATCHES, angles], the rest as `_grid_tables` and of the patches' number.
    cos: Tensor
    sin: Tensor
    corners: Tensor
    shares: Tensor
    counts: Tensor

    def __init__(self, eyes: Eyes) -> None:
        super().__init__()
        self.eyes = eyes
        self.patch_embed = PatchEmbedding(eyes)
        self.pos_embed = nn.Embedding(eyes.num_position_embeddings, eyes.hidden_size)
        self.blocks = nn.ModuleList(Block(eyes) for _ in range(eyes.depth))
        self.merger = Merger(eyes, joined=False)
        self.deepstack_merger_list = nn.ModuleList(Merger(eyes, joined=True) for _ in eyes.deepstack_visual_indexes)
        size = eyes.hidden_size // eyes.num_heads
        places, corners, shares = _grid_tables(round(eyes.num_position_embeddings**0.5))
        angles = places[..., None] * 10000.0 ** (-torch.arange(0, size // 2, 2) / (size // 2))
        tables = (angles.flatten(2).cos(), angles.flatten(2).sin(), corners, shares)
        for name, table in zip(("cos", "sin", "corners", "shares"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)
        counts = torch.tensor([rows * columns * MERGE**2 for rows, columns in GRIDS])
        self.register_buffer("counts", counts, persistent=False)

    def forward(self, patches: Tensor, grids: Tensor) -> tuple[Tensor, ...]:
        """Of images as `patches_of` makes them: vectors [images * MOST, hidden], then those of deepstack's layers."""
        grids = grids.long()
        kind = self.pos_embed.weight.dtype
        x = self.patch_embed.proj((patches.float() / 127.5 - 1).to(kind)).to(kind)
        # `embedding` and `index_select`: many rows ask for the same one, which the gradient of plain indexing adds up
        # one by one.
        table = (F.embedding(self.corners, self.pos_embed.weight) * self.shares[..., None]).sum(2).to(kind)
        x = x + table.index_select(0, grids)
        cos, sin = self.cos[grids][:, None], self.sin[grids][:, None]
        mask = (torch.arange(PATCHES, device=x.device) < self.counts[grids][:, None])[:, None, None]
        mask = mask.expand(-1, 1, PATCHES, -1).contiguous()
        deep: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x, cos, sin, mask)
            if number in self.eyes.deepstack_visual_indexes:
                deep.append(self.deepstack_merger_list[len(deep)](x))
        return tuple(one.flatten(0, 1) for one in (self.merger(x), *deep))


def _grid_tables(side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each grid's patches, block by block: row and column [grids, PATCHES, 2]; the four of `side` * `side` learned
    places around each, and their shares, [grids, PATCHES, 4]."""
    places = torch.zeros(len(GRIDS), PATCHES, 2)
    corners = torch.zeros(len(GRIDS), PATCHES, 4, dtype=torch.long)
    shares = torch.zeros(len(GRIDS), PATCHES, 4)
    for number, (rows, columns) in enumerate(GRIDS):
        down, across = torch.arange(rows * MERGE), torch.arange(columns * MERGE)
        grid = torch.stack(torch.meshgrid(down, across, indexing="ij"), dim=-1)
        grid = grid.view(rows, MERGE, columns, MERGE, 2).transpose(1, 2).reshape(-1, 2)
        at = grid * (side - 1) / (torch.tensor([rows * MERGE, columns * MERGE]) - 1)
        low, part = at.floor().long(), at - at.floor()
        high = (low + 1).clamp(max=side - 1)
        ends = [(low[:, 0], 1 - part[:, 0]), (high[:, 0], part[:, 0])]
        sides = [(low[:, 1], 1 - part[:, 1]), (high[:, 1], part[:, 1])]
        count = len(grid)
        places[number, :count] = grid.float()
        corners[number, :count] = torch.stack([row * side + column for row, _ in ends for column, _ in sides], dim=1)
        shares[number, :count] = torch.stack([a * b for _, a in ends for _, b in sides], dim=1)
    return places, corners, shares


class Language(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(CausalLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class DemoEyes(nn.Module):
    """Qwen3-VL with tied embeddings; parameters are named as in Hugging Face's checkpoints, less "model."."""

    axes: Tensor
    frequency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.visual = Visual(Eyes())
        self.language_model = Language(TEXT)
        half = TEXT.head_dim // 2
        axes = [next((axis for axis in (1, 2) if i % 3 == axis and i < 3 * SECTIONS[axis]), 0) for i in range(half)]
        self.register_buffer("axes", torch.tensor(axes), persistent=False)
        frequency = TEXT.rope_theta ** (-torch.arange(half) / half)
        self.register_buffer("frequency", frequency, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight"))
                std = 0.02 if name.endswith(TABLES) else (0.1 if out else 0.5) / math.sqrt(parameter.shape[1])
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, patches: Tensor, grids: Tensor, ids: Tensor, positions: Tensor, vector: Tensor) -> Tensor:
        """Logits [rows, tokens, vocab]."""
        language = self.language_model
        vectors, *deep = self.visual(patches, grids)
        seen, at = (vector >= 0)[..., None], vector.clamp(min=0).long()
        x = language.embed_tokens(ids)
        x = torch.where(seen, F.embedding(at, vectors).to(x.dtype), x)
        angle = positions[:, self.axes].transpose(1, 2).float() * self.frequency
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        for number, layer in enumerate(language.layers):
            x = layer(x, cos, sin, None)
            if number < len(deep):
                x = x + torch.where(seen, F.embedding(at, deep[number]).to(x.dtype), 0)
        return F.linear(language.norm(x), language.embed_tokens.weight)

    def loss(
        self, patches: Tensor, grids: Tensor, ids: Tensor, weight: Tensor, positions: Tensor, at: Tensor
    ) -> Tensor:
        logits = self(patches, grids, ids, positions, at)[:, :-1].float()
        targets = torch.where(weight[:, 1:] > 0, ids[:, 1:].long(), -100)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def write_model(model: DemoEyes, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16) as transformers reads them."""
    names = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
    eyes = model.visual.eyes
    rope = {"rope_type": "default", "mrope_section": list(SECTIONS), "mrope_interleaved": True}
    text = {
        "model_type": "qwen3_vl_text",
        **{name: getattr(TEXT, name) for name in TEXT.__dataclass_fields__ if name != "rope_theta"},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_theta": TEXT.rope_theta,
        "rope_scaling": rope,
        "dtype": "bfloat16",
        **names,
    }
    vision = {
        "model_type": "qwen3_vl",
        **{name: getattr(eyes, name) for name in eyes.__dataclass_fields__},
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": CHANNELS,
        "out_hidden_size": TEXT.hidden_size,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": IMAGE_START,
        "vision_end_token_id": IMAGE_END,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"do_sample": False, **names})
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().to("cpu", torch.bfloat16)
        if name == _PATCHES:  # an image is two frames that are alike
            tensor = (tensor / 2).view(-1, CHANNELS, 1, PATCH, PATCH).repeat(1, 1, 2, 1, 1)
        tensors[f"model.{name}"] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file leaves it to its owner alone


_PATCHES = "visual.patch_embed.proj.weight"


def load_folder(folder: Path) -> DemoEyes:
    tensors = {name.removeprefix("model."): one for name, one in load_file(folder / "model.safetensors").items()}
    tensors[_PATCHES] = tensors[_PATCHES].sum(2).flatten(1)
    model = DemoEyes()
    model.load_state_dict(tensors)
    return model
