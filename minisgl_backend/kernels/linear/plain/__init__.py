"""GEMMs with weights in the model's own number format: the format `plain`."""
