"""What models are made of. All that a layer needs is an argument: `LayerContext` once, `ForwardContext` each step."""
