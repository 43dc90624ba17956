"""The options that decide which text a model generates, each declared once."""

from collections.abc import Collection, Mapping
from typing import Annotated, TypedDict

from ovspec.options.option import Limits, Option, count_or_all, token_bias

AT_LEAST_1 = Limits(1, words="at least 1")
TOKENS = Limits(1, words="at least 1, or -1 for as many as the context holds", special=-1)
TEXTS = Limits(1, 10_000, "at least 1 and at most 10,000")
NOT_NEGATIVE = Limits(0, words="0 or more")
PROBABILITY = Limits(0, 1, "above 0 and at most 1", above=True)
SHARE = Limits(0, 1, "from 0 to 1")
FINITE = Limits()
GREEDY_OR_MORE = Limits(0, words="0 (greedy) or more")
POSITIVE = Limits(0, words="above 0", above=True)


class SamplingOptions(TypedDict, total=False):
    """The options that decide which text a model generates for a prompt."""

    max_tokens: Annotated[
        int | None,
        "Maximum number of tokens to generate; -1 for as many as the context holds.",
        Option(
            limits=TOKENS,
            usual="from the model's generation config, or 256",
            more="At the end of the context a text ends anyway.",
            flags=("-n", "--max-tokens"),
            metavar="N",
            parse=count_or_all,
            aliases=("max_completion_tokens",),
        ),
    ]
    min_tokens: Annotated[
        int | None,
        "Minimum number of tokens to generate; a grammar may end the text earlier.",
        Option(limits=NOT_NEGATIVE, usual="from the model's generation config, or 0"),
    ]
    stop: Annotated[
        str | Collection[str], "End the text at this string, which is left out of it.", Option(list, metavar="TEXT")
    ]
    stop_ids: Annotated[
        Collection[int],
        "End the text at this token id; the token adds no text.",
        Option(list, flags=("--stop-id",), metavar="ID", aliases=("stop_token_ids",)),
    ]
    ignore_eos: Annotated[bool, "Continue after an end-of-sequence token.", Option(False)]
    temperature: Annotated[
        float,
        "Sampling temperature: 0 always takes the most likely token (greedy), 1 samples from the model's own "
        "distribution, and higher values make unlikely tokens more frequent.",
        Option(0.0, GREEDY_OR_MORE, flags=("-t", "--temp", "--temperature")),
    ]
    top_k: Annotated[
        int,
        "Sample only from the K most likely tokens; 0 for all. Needs a temperature.",
        Option(0, Limits(0, words="0 (all) or more")),
    ]
    top_p: Annotated[
        float,
        "Sample only from the most likely tokens that add up to this probability; 1 for all. Needs a temperature.",
        Option(1.0, PROBABILITY),
    ]
    min_p: Annotated[
        float,
        "Sample only from tokens at least this share as likely as the top one; 0 for all. Needs a temperature.",
        Option(0.0, SHARE),
    ]
    typical_p: Annotated[
        float,
        "Like top-p, but over the most typical tokens (arXiv 2202.00666); 1 for all. Needs a temperature.",
        Option(1.0, PROBABILITY),
    ]
    repetition_penalty: Annotated[
        float | None,
        "Divide positive logits of tokens in the prompt and the text by this, and multiply negative ones: 1 is "
        "off, higher values discourage repetition.",
        Option(limits=POSITIVE, usual="from the model's generation config, or 1"),
    ]
    presence_penalty: Annotated[
        float, "Subtract this from the logit of each token generated so far; 0 is off.", Option(0.0, FINITE)
    ]
    frequency_penalty: Annotated[
        float, "Subtract this from a token's logit once for each time it was generated; 0 is off.", Option(0.0, FINITE)
    ]
    logit_bias: Annotated[
        Mapping[int, float],
        "Add VALUE to the logit of token ID; -inf bans it.",
        Option(dict, metavar="ID=VALUE", parse=token_bias),
    ]
    seed: Annotated[
        int | None,
        "Random seed: the same seed gives the same text, with any draft or none. With the accept rule rejection, "
        "only with the same draft and a fixed lookahead.",
        Option(
            limits=Limits(0, 2**63 - 1, "from 0 to 2**63 - 1"),
            usual="random",
            more="``Stats.seed`` reports the seed of a sampled text.",
        ),
    ]
    n: Annotated[
        int, "Number of texts for each prompt; above 1 needs a temperature.", Option(1, TEXTS, flags=("--samples",))
    ]
    logprobs: Annotated[
        int | None,
        "Report the natural log-probability of each token and of this many of the most likely ones, from the "
        "model's own logits: before bias, penalties, grammars and temperature.",
        Option(limits=NOT_NEGATIVE, request=False),
    ]
