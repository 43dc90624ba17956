"""Interfaces to other projects: the guidance library and GPTFast."""
