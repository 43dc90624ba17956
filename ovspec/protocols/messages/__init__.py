"""Anthropic's API of messages: its bodies, requests and answers."""
