"""The formats in which models write tool calls; one file a family.

docs/how-to/add-a-tool-format.md says how to add one.
"""

import importlib
import pkgutil
from typing import get_args

from ovspec.params.tools import ToolFormatName
from ovspec.text.tool_formats.layout import ToolFormat


def formats_by_name() -> dict[str, ToolFormat]:
    """Return the formats in the files of this folder, in the order of ``ToolFormatName``."""
    files = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
    formats = {value.name: value for file in files for value in vars(file).values() if isinstance(value, ToolFormat)}
    return {name: formats[name] for name in get_args(ToolFormatName)}


FORMATS_BY_NAME = formats_by_name()
FORMATS = tuple(FORMATS_BY_NAME.values())
