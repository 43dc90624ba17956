"""Load a model for a command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ovspec.options import GRAMMARS, GenerateOptions, make_params
from ovspec.progress import step

if TYPE_CHECKING:
    from ovspec.model import LanguageModel


def check_grammar(options: Mapping[str, Any]) -> None:
    """Raise OvspecError for a grammar that no model could use."""
    if options.keys() & {*GRAMMARS}:
        from ovspec.constraints.maker import grammar_of

        grammar_of(make_params(cast(GenerateOptions, options)))


def load(
    folder: Path | None, *draft: Any, session: Path | None = None, chat: bool = False, **options: Any
) -> LanguageModel:
    """Return ``ovspec.load(folder, *draft, **options)``; refuse a wrong session or a missing chat template first."""
    with step(f"{folder or 'demo pair'}: loading"):
        import ovspec
        from ovspec.loading import model_folder
        from ovspec.session_file import check_session
        from ovspec.text.chat_template import chat_template

        if session and session.exists():
            check_session(session, model_folder(folder))
        if chat:
            chat_template(model_folder(folder))
        return ovspec.load(folder, *draft, **options)
