"""Surfaces of other projects: OpenAI's batch API, the guidance library, GPTFast."""
