"""Models with their KV caches."""
