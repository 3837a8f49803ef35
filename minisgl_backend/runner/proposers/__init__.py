"""Proposers that run on the device, a file each: they propose tokens that the model's next step verifies."""
