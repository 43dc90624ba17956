"""The formats in which models write tool calls; one file a family.

docs/how-to/add-a-tool-format.md says how to add one.
"""

import importlib
import pkgutil

from ovspec.params.tool_formats.layout import ToolFormat


def load_formats() -> dict[str, ToolFormat]:
    """Return the formats in the files of this folder by their names."""
    files = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
    return {value.name: value for file in files for value in vars(file).values() if isinstance(value, ToolFormat)}


FORMATS_BY_NAME = load_formats()
FORMATS = tuple(FORMATS_BY_NAME.values())
