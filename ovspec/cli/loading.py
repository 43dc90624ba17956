"""Loading a model for a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ovspec.base.errors import OvspecError
from ovspec.base.progress import show_step

if TYPE_CHECKING:
    from ovspec.api.model import LanguageModel
    from ovspec.params.option import OptionValue


def load_model(
    folder: Path, *, session: Path | None = None, chat_remedy: str | None = None, **options: OptionValue
) -> LanguageModel:
    """Return ``ovspec.load(folder, **options)``; refuse a wrong session or a missing chat template first.

    chat_remedy: for chats, the advice for a model without a template.
    """
    with show_step(f"{folder}: loading") as loading_step:
        import ovspec
        from ovspec.api.session_file import check_session_model
        from ovspec.setup.model_folders import resolve_model_folder
        from ovspec.setup.model_store import IR_FOLDER, name_folder
        from ovspec.text.chat_template import load_chat_template, read_chat_templates

        if folder.name == IR_FOLDER:
            loading_step.text = f"{name_folder(folder)}: loading"
        if session and session.exists():
            check_session_model(session, resolve_model_folder(folder))
        if chat_remedy and "chat_template" not in options:
            if not read_chat_templates(resolve_model_folder(folder)):
                raise OvspecError(
                    f"{folder}: a base model without a chat template; {chat_remedy}, or set `chat_template`."
                )
            load_chat_template(resolve_model_folder(folder))
        return ovspec.load(folder, **options)
