"""The public entry to ``integrations/gptfast.py``: ``from ovspec.compat import gpt_fast``."""

from ovspec.integrations.gptfast import gpt_fast

__all__ = ["gpt_fast"]
