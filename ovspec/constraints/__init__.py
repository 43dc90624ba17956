"""Constraints: what a generated text must be."""
