"""Load a model for a command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ovspec.options import GRAMMARS, OF_SCHEMAS, GenerateOptions, params_of
from ovspec.progress import step

if TYPE_CHECKING:
    from ovspec.model import LanguageModel


def check_grammar(options: Mapping[str, Any]) -> None:
    """Raise OvspecError for a grammar, or options for schemas, that no model could use."""
    if any(options.get(name) is not None for name in (*GRAMMARS, *OF_SCHEMAS)):
        from ovspec.constraints.maker import check_schema_options, grammar_of

        check_schema_options(options, params_of(cast(GenerateOptions, options)))
        grammar_of(options)


def load(
    folder: Path | None, *draft: Any, session: Path | None = None, chat: bool = False, **options: Any
) -> LanguageModel:
    """Return ``ovspec.load(folder, *draft, **options)``, and say so while it takes long.

    Raises OvspecError at once if ``session`` is a file but no session of this model, or if a ``chat`` is wanted and
    the model has no chat template.
    """
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
