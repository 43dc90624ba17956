"""The formats in which models write tool calls; one file a family.

docs/how-to/add-a-tool-format.md says how to add one.
"""

from ovspec.text.tool_formats.apriel import APRIEL
from ovspec.text.tool_formats.command_r7b import COMMAND_R7B
from ovspec.text.tool_formats.deepseek import DEEPSEEK, DEEPSEEK_R1
from ovspec.text.tool_formats.functionary import FUNCTIONARY
from ovspec.text.tool_formats.generic import GENERIC
from ovspec.text.tool_formats.gigachat import GIGACHAT
from ovspec.text.tool_formats.glm import GLM, GLM_DENSE, LING
from ovspec.text.tool_formats.granite3 import GRANITE3
from ovspec.text.tool_formats.harmony import HARMONY
from ovspec.text.tool_formats.hermes import HERMES, HERMES_DENSE
from ovspec.text.tool_formats.kimi import KIMI
from ovspec.text.tool_formats.llama3 import LLAMA3
from ovspec.text.tool_formats.minimax import MINIMAX
from ovspec.text.tool_formats.mistral import MISTRAL, MISTRAL_LIST, MISTRAL_V3
from ovspec.text.tool_formats.nemotron import NEMOTRON
from ovspec.text.tool_formats.qwen_xml import QWEN_XML, QWEN_XML_DENSE
from ovspec.text.tool_formats.seed_oss import SEED_OSS
from ovspec.text.tool_formats.smollm3 import SMOLLM3

# The first that fits a chat template is its format; GENERIC is for all others.
FORMATS = (
    SMOLLM3, HERMES, HERMES_DENSE, QWEN_XML, QWEN_XML_DENSE, LLAMA3, MISTRAL, MISTRAL_LIST, MISTRAL_V3, HARMONY,
    DEEPSEEK, DEEPSEEK_R1, KIMI, GLM, GLM_DENSE, LING, SEED_OSS, GRANITE3, NEMOTRON, MINIMAX, COMMAND_R7B, FUNCTIONARY,
    APRIEL, GIGACHAT, GENERIC,
)  # fmt: skip
BY_NAME = {each.name: each for each in FORMATS}
