"""The public name of ``integrations/guidance.py``: ``from ovspec.guidance import OpenVINO``."""

from ovspec.integrations.guidance import OpenVINO

__all__ = ["OpenVINO"]
