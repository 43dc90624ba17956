"""The types of options and arguments for files, folders and models."""

from pathlib import Path
from typing import Any

import click

from ovspec.base.files import check_file_name
from ovspec.base.hub_names import parse_hub_name


class PathType(click.Path):
    """A path valid on this system. ``only_kind``: "file" or "folder" to refuse the other kind."""

    def __init__(self, only_kind: str | None = None) -> None:
        super().__init__(file_okay=only_kind != "folder", dir_okay=only_kind != "file", path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = super().convert(value, param, ctx)
        assert isinstance(path, Path)
        check_file_name(path)
        return path


class ModelType(click.ParamType):
    """The name of a model: a path valid on this system, a hub id, or another name."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not parse_hub_name(value):
            PATH_TYPE.convert(value, param, ctx)
        return value


PATH_TYPE = PathType()
MODEL_TYPE = ModelType()
FILE_TYPE = PathType("file")
FOLDER_TYPE = PathType("folder")
