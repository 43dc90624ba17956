"""Names of models on the Hugging Face hub: ``org/model``, ``org/model@revision`` and ``org/model:Q4_K_M``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ovspec.base.errors import OvspecError

HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(@[^@:\s]*)?(:[\w.-]*)?", re.ASCII)
MAIN_REVISION = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """A model on the hub.

    repository: such as ``org/model``.
    revision: a commit, tag or branch; None for the main branch.
    quantization: the end of a GGUF file's name in the repository, such as ``Q4_K_M``; None for a checkpoint.
    """

    repository: str
    revision: str | None = None
    quantization: str | None = None

    @property
    def name_without_commit(self) -> str:
        """The name for messages: without the commit, which is long and also in the manifest."""
        is_commit = bool(self.revision and COMMIT.fullmatch(self.revision))
        return str(replace(self, revision=None) if is_commit else self)

    def __str__(self) -> str:
        revision_suffix = f"@{self.revision}" * bool(self.revision)
        return self.repository + revision_suffix + f":{self.quantization}" * bool(self.quantization)


def parse_hub_name(name: str) -> HubName | None:
    """Return the hub model named ``name``; None if it isn't a hub id, but perhaps a path.

    Raises:
        OvspecError: nothing follows its ``@`` or ``:``.
    """
    match = HUB_NAME.fullmatch(name)
    if not match or name.lower().endswith(".gguf"):
        return None
    repository, revision, quantization = match.groups()
    if revision == "@":
        raise OvspecError(f"{name}: no revision after the @; write org/model@REVISION, or leave the @ out.")
    if quantization == ":":
        raise OvspecError(f"{name}: nothing after the colon; write org/model:Q4_K_M, or leave the colon out.")
    return HubName(repository, revision and revision[1:], quantization and quantization[1:])
