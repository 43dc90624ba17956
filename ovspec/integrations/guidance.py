"""A model for the guidance library (https://github.com/guidance-ai/guidance): its language on this runtime."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from llguidance import LLTokenizer

from ovspec.errors import OvspecError
from ovspec.files import read_json
from ovspec.integrations.branches import Branches, Served
from ovspec.integrations.roles import Roles, roles_of
from ovspec.model import LanguageModel
from ovspec.text.chat_template import chat_template
from ovspec.text.vocabulary import TOKENIZER_FILE

try:
    from guidance._schema import SamplingParams  # type: ignore
    from guidance.chat import CHAT_TEMPLATE_CACHE, ChatTemplate, UnsupportedRoleException  # type: ignore
    from guidance.models import Model  # type: ignore
    from guidance.models._engine import Engine, EngineInterpreter, LogitsOutput, Tokenizer  # type: ignore
except ModuleNotFoundError:
    raise OvspecError(
        "This needs the guidance library, which is not installed: pip install 'ovspec[guidance]'."
    ) from None


class OpenVINO(Model):
    """A guidance model on a loaded ``LanguageModel``, whose drafters guess ahead.

    Args:
        lm: from ``ovspec.load``. The cache of the model's branches is its own; ``lm`` may be used besides.
        echo: show the text in a notebook, with probabilities, which take all logits and a sort of them.
        chat_template: a ``guidance.chat.ChatTemplate`` class, or a template's text; by default the model's.
        sampling_params: guidance's ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``.
        options: what guidance may do, all of it by default: ``enable_backtrack`` (spell the end of a text anew),
            ``enable_ff_tokens`` (append what a grammar forces without asking the model), ``enable_monitoring``
            (measure the processor's load).
    """

    def __init__(
        self,
        lm: LanguageModel,
        echo: bool = True,
        chat_template: str | type[ChatTemplate] | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        **options: bool,
    ) -> None:
        engine = OpenVINOEngine(lm, chat_template, enable_token_probabilities=echo, enable_top_k=echo, **options)
        params = SamplingParams() if sampling_params is None else sampling_params
        super().__init__(interpreter=EngineInterpreter(engine), sampling_params=params, echo=echo)

    @property
    def stats(self) -> Served:
        """What all programs on this model have asked for, and what it took."""
        return self._interpreter.engine.branches.served


class OpenVINOEngine(Engine):
    """What guidance asks for logits; one for all branches of its programs. ``options`` are those of ``Engine``."""

    def __init__(
        self, lm: LanguageModel, chat_template: str | type[ChatTemplate] | None = None, **options: Any
    ) -> None:
        self.branches = Branches(lm)
        tokenizer = OpenVINOTokenizer(lm, chat_template)
        self._width = tokenizer.size
        enabled = dict.fromkeys(("enable_backtrack", "enable_ff_tokens", "enable_monitoring"), True)
        super().__init__(tokenizer, **(enabled | options))

    def get_logits(self, token_ids: list[int], include_all_uncached_tokens: bool = False) -> LogitsOutput:
        """As ``Engine`` has it; ``n_cached`` is ``n_tokens`` where no inference was needed."""
        logits, cached = self.branches.logits(token_ids, include_all_uncached_tokens)
        return {"logits": as_wide(logits, self._width), "n_tokens": len(token_ids), "n_cached": cached}


class OpenVINOTokenizer(Tokenizer):
    """llguidance's tokenizer on the model's own ``tokenizer.json``; raises OvspecError where it can't be used."""

    def __init__(self, lm: LanguageModel, chat_template: str | type[ChatTemplate] | None = None) -> None:
        whole = read_json(lm.folder / TOKENIZER_FILE)
        config = read_json(lm.folder / "tokenizer_config.json")
        ids = {token["content"]: token["id"] for token in whole.get("added_tokens", [])}
        bos, eos = named(config, ids, "bos_token"), named(config, ids, "eos_token")
        if eos is None:
            eos = min(lm.generation_config.eos_ids, default=None)
        if eos is None:
            raise OvspecError(f"{lm.folder}: guidance needs a model with a token that ends a text.")
        try:
            tokens = LLTokenizer(json.dumps({**whole, "padding": None, "truncation": None}), eos_token=eos)
        except ValueError as error:
            raise OvspecError(f"{lm.folder}: its tokenizer can't be used with guidance: {error}.") from None
        self.size = tokens.vocab_size
        template = model_template(lm) if chat_template is None else chat_template
        super().__init__(tokens, template, bos)


def named(config: dict[str, Any], ids: dict[str, int], name: str) -> int | None:
    """The id of a token that ``tokenizer_config.json`` names."""
    token = config.get(name)
    return ids.get(token["content"] if isinstance(token, dict) else token) if token else None


def model_template(lm: LanguageModel) -> str | type[ChatTemplate] | None:
    """The chat template as text where guidance knows it, or else a class; None lets it take ChatML and say so."""
    try:
        template = chat_template(lm.folder)
    except OvspecError:
        return None
    if template.source in CHAT_TEMPLATE_CACHE:
        return template.source
    roles = roles_of(template)
    return template_class(template.source, roles) if roles else template.source


def template_class(source: str, roles: Roles) -> type[ChatTemplate]:
    class ModelTemplate(ChatTemplate):
        template_str = source

        def get_role_start(self, role_name: str, **_: Any) -> str:
            return self._around(role_name)[0]

        def get_role_end(self, role_name: str | None = None) -> str:
            return self._around(role_name)[1]

        def _around(self, role: str | None) -> tuple[str, str]:
            if role not in roles:
                raise UnsupportedRoleException(role, self)
            return roles[role]

    return ModelTemplate


def as_wide(logits: np.ndarray, width: int) -> np.ndarray:
    """(places, any) -> (places, width): what the model doesn't know is never chosen."""
    missing = width - logits.shape[1]
    if missing <= 0:
        return logits[:, :width]
    return np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
