"""Names of encoders' tensors in checkpoints, and here."""

from __future__ import annotations

from minisgl_backend.weights.names import TensorNames

WITHIN = "eyes."  # what the names of its tensors begin with here
NAMES = TensorNames(
    prefixes=tuple(
        (f"{model}{theirs}.{inner}", f"{WITHIN}{ours}")
        for model in ("model.", "")
        for theirs, inner, ours in (
            ("visual", "", ""),
            ("vision_tower", "vision_model.", "vision_tower."),
            ("vision_tower", "", "vision_tower."),
            ("multi_modal_projector", "", "projector."),
            ("embed_vision", "", "embed_vision."),  # Gemma 4's
            ("vision_model", "", "vision_tower."),  # Idefics3's
            ("connector", "", "projector."),
        )
    )
    + tuple((f"{model}image_newline", f"{WITHIN}image_newline") for model in ("model.", "")),
    within=WITHIN,
)
