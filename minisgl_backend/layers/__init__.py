"""Layers of models. All that a layer needs is an argument: `LayerContext` once, `ForwardContext` in each step."""
