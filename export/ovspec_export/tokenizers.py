"""The Hugging Face tokenizer of a model, and its agreement with OpenVINO's or a draft's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ovspec.base.errors import OvspecError
from ovspec.text.chat_template import ADDED_BOS, CHAT_TEMPLATE_FILE, TEMPLATES_FOLDER, read_chat_templates
from ovspec.text.pairing import SAMPLE_TEXTS, check_same_vocabulary
from ovspec.text.tokenizer import Tokenizer
from ovspec.text.tokenizer_files import TOKENIZER_FILE
from ovspec.text.vocabulary import describe_id_differences
from ovspec_export.gguf_tokenizer import build_gguf_tokenizer, read_gguf_templates
from ovspec_export.sources import GgufSource, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(source: Source, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer, or build a GGUF file's.

    Raises:
        OvspecError: it is missing or broken.
    """
    if isinstance(source, GgufSource):
        return build_gguf_tokenizer(source.gguf_headers.metadata, source.name)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source.path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers and tokenizers raise a dozen kinds of errors
        reason = str(error).strip().partition("\n")[0].rstrip(".:") or type(error).__name__
        raise OvspecError(
            f"{source.name}: its tokenizer cannot be loaded ({reason}); download the model again."
        ) from None


def read_source_templates(source: Source) -> dict[str, str]:
    """Return the chat templates of a source by name."""
    if isinstance(source, GgufSource):
        return read_gguf_templates(source.gguf_headers.metadata, source.name)
    return read_chat_templates(source.path)


def replace_chat_template(template: str, folder: Path) -> None:
    """Make a template the only template of the exported model in ``folder``."""
    tokenizer = Tokenizer(folder)
    bos_text = "".join(map(tokenizer.token_text, tokenizer.prefix_ids))
    bos_literal = json.dumps(bos_text, ensure_ascii=False)
    template_source = template.replace(f"{{{{ {ADDED_BOS} }}}}", f"{{{{ {bos_literal} }}}}")
    shutil.rmtree(folder / TEMPLATES_FOLDER, ignore_errors=True)
    (folder / CHAT_TEMPLATE_FILE).write_text(template_source, encoding="utf-8", newline="\n")


def find_differing_texts(reference_tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[str]:
    """Return the ``SAMPLE_TEXTS`` encoded differently by the tokenizer in ``folder`` and the reference."""
    tokenizer = Tokenizer(folder)
    return [text for text in SAMPLE_TEXTS if tokenizer.encode(text).tolist() != reference_tokenizer(text)["input_ids"]]


def check_pair_vocabularies(target: Source, draft: Source, trust_remote_code: bool) -> None:
    """Raise OvspecError unless the vocabularies are the same, id by id."""
    if target.is_ir and draft.is_ir:
        check_same_vocabulary(target.path, draft.path)
        return
    if draft.is_ir and not (draft.path / TOKENIZER_FILE).is_file():
        return  # compared after conversion, when the target has an OpenVINO tokenizer
    vocabularies = [load_tokenizer(source, trust_remote_code).get_vocab() for source in (target, draft)]
    difference = describe_id_differences(
        *({i: token for token, i in vocabulary.items()} for vocabulary in vocabularies)
    )
    if difference:
        raise OvspecError(
            f"{draft.name} cannot draft for {target.name}: {difference}; choose a draft with the same tokenizer."
        )
