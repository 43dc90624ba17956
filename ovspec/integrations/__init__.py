"""Interfaces to other projects: OpenAI's batch API, the guidance library and GPTFast."""
