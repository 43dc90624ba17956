"""From logits to tokens: warping, samplers, noise, and the constraints on what may follow."""
