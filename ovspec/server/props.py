"""The server's properties in llama.cpp's form."""

from pydantic import Field

from ovspec import __version__
from ovspec.api.model import LanguageModel
from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec.params import Params
from ovspec.protocols.llamacpp.infill import to_llamacpp_sampling
from ovspec.protocols.reply import ReplyModel


class DefaultGenerationSettings(ReplyModel):
    n_ctx: int | None = Field(description="Limit for prompt and text together, in tokens; null if unknown.")
    params: JsonObject = Field(description="The default sampling of requests.")


class Modalities(ReplyModel):
    vision: bool
    audio: bool


class Props(ReplyModel):
    default_generation_settings: DefaultGenerationSettings
    total_slots: int = Field(description="Maximum number of texts generated at the same time.")
    model_alias: str
    model_path: str = Field(description="The folder's name.")
    modalities: Modalities
    chat_template: str = Field(description="Empty if the model has no chat template.")
    bos_token: str
    eos_token: str
    build_info: str
    endpoint_slots: bool
    endpoint_props: bool = Field(description="Whether POST can change settings.")
    endpoint_metrics: bool
    is_sleeping: bool


def make_server_props(lm: LanguageModel, model_name: str, defaults: Params, batch_size: int) -> Props:
    """Return the server's properties in llama.cpp's form; ``batch_size``: maximum number of concurrent texts."""
    special_tokens = lm.runtime.prompt_encoder.special_tokens_by_role
    try:
        template_source = lm.runtime.prompt_encoder.chat_format.template.source
    except OvspecError:
        template_source = ""
    sampling = to_llamacpp_sampling(lm.runtime.row_maker.complete_params(defaults))
    return Props(
        default_generation_settings=DefaultGenerationSettings(n_ctx=lm.target.ir.context_length, params=sampling),
        total_slots=batch_size,
        model_alias=model_name,
        model_path=lm.folder.name,
        modalities=Modalities(vision=False, audio=False),
        chat_template=template_source,
        bos_token=special_tokens.get("bos_token", ""),
        eos_token=special_tokens.get("eos_token", ""),
        build_info=f"ovspec {__version__}",
        endpoint_slots=False,
        endpoint_props=False,
        endpoint_metrics=True,
        is_sleeping=False,
    )
