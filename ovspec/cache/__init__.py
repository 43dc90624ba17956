"""Decoders: compiled models with their KV caches."""
