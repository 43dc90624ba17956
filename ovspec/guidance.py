"""The public entry to ``integrations/guidance.py``: ``from ovspec.guidance import OpenVINO``."""

from ovspec.integrations.guidance import OpenVINO

__all__ = ["OpenVINO"]
