"""What models are made of. Everything a layer needs comes to it as an argument: `Placement` once, context per step."""
