"""From logits to token ids: what each row asks for, and the sampler that does it for a whole batch at once."""
