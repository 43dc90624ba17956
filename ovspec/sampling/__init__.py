"""From logits to tokens: warping, samplers, noise, and constraints on the next tokens."""
