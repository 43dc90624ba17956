"""The formats in which models write tool calls; one file a family.

docs/how-to/add-a-tool-format.md says how to add one.
"""

from ovspec.text.tool_formats.deepseek import DEEPSEEK, DEEPSEEK_R1
from ovspec.text.tool_formats.generic import GENERIC
from ovspec.text.tool_formats.glm import GLM, GLM_DENSE
from ovspec.text.tool_formats.granite3 import GRANITE3
from ovspec.text.tool_formats.harmony import HARMONY
from ovspec.text.tool_formats.hermes import HERMES
from ovspec.text.tool_formats.kimi import KIMI
from ovspec.text.tool_formats.llama3 import LLAMA3
from ovspec.text.tool_formats.mistral import MISTRAL, MISTRAL_LIST
from ovspec.text.tool_formats.nemotron import NEMOTRON
from ovspec.text.tool_formats.qwen_xml import QWEN_XML
from ovspec.text.tool_formats.seed_oss import SEED_OSS
from ovspec.text.tool_formats.smollm3 import SMOLLM3

# The first that fits a chat template is its format; the last one fits all.
FORMATS = (
    SMOLLM3, HERMES, QWEN_XML, LLAMA3, MISTRAL, MISTRAL_LIST, HARMONY, DEEPSEEK, DEEPSEEK_R1, KIMI, GLM, GLM_DENSE,
    SEED_OSS, GRANITE3, NEMOTRON, GENERIC,
)  # fmt: skip
BY_NAME = {each.name: each for each in FORMATS}
