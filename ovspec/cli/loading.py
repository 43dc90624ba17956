"""How commands load a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ovspec.base.errors import OvspecError
from ovspec.base.progress import show_step

if TYPE_CHECKING:
    from ovspec.api.model import LanguageModel


def load_model(
    folder: Path | None, *draft: Any, session: Path | None = None, chat: str | None = None, **options: Any
) -> LanguageModel:
    """Return ``ovspec.load(folder, *draft, **options)``; refuse a wrong session or a missing chat template first.

    chat: what to do for a model without a template, if there is to be a chat.
    """
    with show_step(f"{folder or 'demo pair'}: loading"):
        import ovspec
        from ovspec.api.session_file import check_session
        from ovspec.setup.model_folders import resolve_model_folder
        from ovspec.text.chat_template import load_chat_template, read_chat_templates

        if session and session.exists():
            check_session(session, resolve_model_folder(folder))
        if chat and "chat_template" not in options:
            if not read_chat_templates(resolve_model_folder(folder)):
                told = f"{folder}: a base model, which has no chat template; {chat}, or name a `chat_template`."
                raise OvspecError(told)
            load_chat_template(resolve_model_folder(folder))
        return ovspec.load(folder, *draft, **options)
