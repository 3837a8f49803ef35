"""LoRA adapters: what a folder of PEFT's says, and where its tensors belong in a model."""
