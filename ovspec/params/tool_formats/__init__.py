"""The models' formats of tool calls; one file per family.

docs/how-to/add-a-tool-format.md shows how to add a format.
"""

import importlib
import pkgutil

from ovspec.params.tool_formats.layout import ToolFormat


def load_tool_formats() -> dict[str, ToolFormat]:
    """Return name -> format, from the files of this folder."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return {
        module_value.name: module_value
        for module in modules
        for module_value in vars(module).values()
        if isinstance(module_value, ToolFormat)
    }


TOOL_FORMATS_BY_NAME = load_tool_formats()
TOOL_FORMATS = tuple(TOOL_FORMATS_BY_NAME.values())
