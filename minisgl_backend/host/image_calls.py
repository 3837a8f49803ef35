"""What `minisgl check` says of a model's images."""

from __future__ import annotations

from pathlib import Path

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.images.families import family_of, why_blind
from minisgl_backend.images.front import scarce_memory
from minisgl_backend.models.config import ModelConfig

_SPEED = 3.5e11  # operations a millisecond, of transformers' towers on an H200
_SHAPES = ((8192, 8192), (8192, 4096), (4096, 8192), (8192, 2048))  # width and height
_LONG = 50  # ms that streams wait for at most


def images_told(config: EngineConfig, model: ModelConfig, folder: str | Path) -> str | None:
    """None: the model's config.json has no encoder. A call is what streams wait for: it ends before another step.

    Raises ConfigError for `max_image_tokens`."""
    model = model.reading(config.encoder_cache_bytes > 0)
    encoder = model.encoder
    if encoder is None:
        why_not = why_blind(folder, model.why_no_images)
        return f"refused: {why_not}" if why_not else None
    try:
        family = family_of(folder)
    except ConfigError as error:
        return f"refused: {error}"
    if config.max_image_tokens is not None:
        family = family.limited(config.max_image_tokens)
    sizes = [family.size(*shape) for shape in _SHAPES]
    tokens = max(size.num_vectors for size in sizes)
    longest = max(encoder.longest_call(size.shape) for size in sizes) / _SPEED
    told = f"of up to {tokens} tokens, encoded in calls of up to {max(1, round(longest))} ms on an H200"
    if longest > _LONG:
        told += ", which streams wait for: max_image_tokens makes them shorter"
    return "; ".join(filter(None, (told, scarce_memory(config.image_cache_mib))))
