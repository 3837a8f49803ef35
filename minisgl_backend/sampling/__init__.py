"""From logits to token ids: each row's sampling options, and the sampler that applies them to a whole batch."""
