"""A web page that generates a text without and with speculation and shows who proposed each of its tokens.

    python demos/compare_app.py [DIR] [--chat]

DIR is a folder made by ``ovspec export``, by default the embedded pair; with --chat it answers questions. Fonts and
everything else that the page needs come from this machine.
"""

from __future__ import annotations

import argparse
import functools
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.themes import Default

import ovspec
from ovspec.api.comparison import Comparison, ResultPair, compare_turns, iterate_turns, rotate_modes
from ovspec.drafting.choice import parse_draft
from ovspec.ir.device import list_available_devices
from ovspec.ir.heads import is_head_folder
from ovspec.setup.manifest import DRAFT_FOLDER
from ovspec.setup.model_folders import find_demo_folder
from ovspec.text.chat_template import Message

PROMPT = "import json\n\ndef read_config(path):\n    with open(path) as file:\n"
QUESTION = "What is the difference between a list and a tuple in Python?"
DRAFTERS = {"none": "no draft", "draft": "{}", "lookup": "lookup", "lookup,draft": "lookup, then {}"}
SOURCES = {
    "target": "the target itself",
    "draft": "draft model",
    "head": "EAGLE-3 head",
    "lookup": "lookup",
    "forced": "forced by the grammar",
}
REFRESH = 0.1  # seconds between two updates of the page
SETTLE = 0.2  # seconds for the browser, on the same machine, to draw what it was sent
CSS = Path(__file__).with_suffix(".css")

ModelOf = Callable[[str, str], ovspec.LanguageModel]  # (device, drafter)


# ---------------------------------------------------------------- generating


@dataclass
class Run:
    """A text as it grows. ``spans``: what each token adds to the text, and where the token came from."""

    spans: list[tuple[str, str]] = field(default_factory=list)
    result: ovspec.Result | None = None


def generate(lm: ovspec.LanguageModel, prompt: str | list[Message], options: dict[str, Any]) -> Iterator[Run]:
    """Yield the run several times as it grows, and once it is whole."""
    stream, detokenizer, run = lm.stream(prompt, **options), lm.tokenizer.make_detokenizer(), Run()
    shown = time.perf_counter()
    try:
        for piece in stream:
            run.spans += [
                (detokenizer.push(i), source) for i, source in zip(piece.token_ids, piece.sources, strict=True)
            ]
            if time.perf_counter() - shown > REFRESH:
                yield run
                shown = time.perf_counter()
    finally:
        stream.cancel()  # has an effect only if the page was closed
    run.result = stream.result()
    if rest := detokenizer.flush():
        last, source = run.spans.pop()
        run.spans.append((last + rest, source))
    yield run


def compare(
    lm: ovspec.LanguageModel, prompt: str, chat: bool, options: dict[str, Any], lookahead: int | str
) -> Iterator[str]:
    """Yield the page's results again and again: both texts as they grow, then how fast they are, timed in turns.

    chat: the prompt is what a user says.
    """
    asked = [{"role": "user", "content": prompt}] if chat else prompt
    shown = f"{prompt}\n\n" if chat else prompt
    runs, notes = [Run(), Run()], ["generating", "waits for the other"]
    ways: list[dict[str, Any]] = [options | {"lookahead": 0}, options | {"lookahead": lookahead}]
    for place, way in enumerate(ways):
        notes[place] = "generating"
        yield results(shown, runs, notes)
        for runs[place] in generate(lm, asked, way):
            yield results(shown, runs, notes)
        notes[place] = "timed in turns"
    turns = list[ResultPair]()
    for turn in iterate_turns():
        yield results(shown, runs, [f"{notes[0]}: turn {turn + 1}"] * 2)
        time.sleep(SETTLE)
        timed = {place: lm.generate(asked, **ways[place]) for place in rotate_modes([0, 1], turn)}
        turns.append((timed[0], timed[1]))
    plain, speculative = (run.result for run in runs)
    assert plain and speculative
    yield results(shown, runs, ["", ""], compare_turns(lm, asked, (plain, speculative), turns))


# ---------------------------------------------------------------- showing


def results(prompt: str, runs: list[Run], notes: list[str], found: Comparison | None = None) -> str:
    """Return the HTML of both texts and, once they are timed, of their comparison."""
    names = ("Plain", "Speculative")
    texts = "".join(text(name, prompt, run, note) for name, run, note in zip(names, runs, notes, strict=True))
    finished = table(found) if found else ""
    return f'<div class="results">{finished}{legend(runs[1])}<div class="texts">{texts}</div></div>'


def text(name: str, prompt: str, run: Run, note: str) -> str:
    spans = [
        f'<span class="token {escape(source)}" title="{escape(SOURCES.get(source, source))}">{escape(added)}</span>'
        for added, source in run.spans
        if added
    ]
    prompt = f'<span class="prompt">{escape(prompt)}</span>'
    return (
        f'<section class="{name.lower()}"><h3>{name} <small>{note}</small></h3>'
        f'<div class="text">{prompt}{"".join(spans)}</div></section>'
    )


def legend(run: Run) -> str:
    """Return the HTML of the colours and of how many tokens of the speculative text each source proposed."""
    counts = Counter(source for _, source in run.spans)
    entries = [
        f'<li><span class="token {source}">{name}</span> {counts[source]}</li>'
        for source, name in SOURCES.items()
        if source not in ("draft", "head", "forced") or counts[source]
    ]
    return f'<ul class="legend"><li>Tokens proposed by</li>{"".join(entries)}</ul>'


def table(found: Comparison) -> str:
    """Return the HTML of the verdict, times and acceptance."""
    pair, stats = [result.stats for result in found.last_pair], found.last_pair[1].stats
    accepted, conditional = "nothing was proposed", ""
    if stats.proposed:
        accepted = f"{stats.accepted} of {stats.proposed} ({100 * stats.accepted / stats.proposed:.0f} %)"
        conditional = f"{stats.conditional_acceptance:.2f}"
    speedup = found.speedup
    rows = [
        ("time to first token", *(f"{each.ttft_ms:.1f} ms" for each in pair)),
        ("tokens per second after it", *(f"{1e3 / ms:.0f}" for ms in (speedup.plain_ms, speedup.speculative_ms))),
        ("accepted of proposed tokens", "", accepted),
        ("conditional acceptance (given that those before were accepted)", "", conditional),
        ("tokens per round", "1.00", f"{stats.tokens_per_round:.2f}"),
    ]
    if stats.seed is not None:
        rows.append(("seed", *(str(each.seed) for each in pair)))
    cells = "".join(f"<tr><th>{name}</th><td>{one}</td><td>{two}</td></tr>" for name, one, two in rows)
    sentences = escape(f"{capitalised(found.speedup_sentence)}. {capitalised(found.equality_sentence)}.")
    return (
        f'<p class="verdict">{sentences}</p>'
        f'<table class="numbers"><thead><tr><th></th><th>plain</th><th>speculative</th></tr></thead>{cells}</table>'
    )


def capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


# ---------------------------------------------------------------- the page


def options_of(
    max_tokens: int | None, temperature: float, top_p: float, seed: int | None, regex: str, schema: str
) -> dict[str, Any]:
    """Return keywords for ``stream``; both texts get the same seed."""
    if max_tokens == 0:
        raise ovspec.OvspecError("`max_tokens` is 0; it must be at least 1, or -1 for as many as the context holds.")
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    if temperature:
        options["seed"] = secrets.randbits(32) if seed is None else seed
    return options | {name: text for name, text in (("regex", regex), ("json_schema", schema)) if text}


def lookahead_of(value: Any) -> int | str:
    if value == "auto" or (str(value).isdecimal() and int(value) >= 1):
        return value if value == "auto" else int(value)
    raise ovspec.OvspecError(f"The lookahead is {value}; it must be auto or a number of at least 1.")


def loader(folder: Path, **loading: Any) -> ModelOf:
    """Return a function that returns the model for a device and a drafter; it loads one for each device."""
    has_draft = (folder / DRAFT_FOLDER).is_dir()

    @functools.cache
    def on_device(device: str) -> ovspec.LanguageModel:
        return ovspec.load(folder, "lookup,draft" if has_draft else "lookup", device=device, **loading)

    @functools.cache
    def model(device: str, drafter: str) -> ovspec.LanguageModel:
        return on_device(device).with_drafters(parse_draft(drafter))

    return model


def build(folder: Path, model: ModelOf, chat: bool) -> gr.Blocks:
    """Return the page for the models in ``folder``. chat: the prompt is first what a user says."""
    draft = folder / DRAFT_FOLDER
    proposer = SOURCES["head" if draft.is_dir() and is_head_folder(draft) else "draft"]
    drafters = [(name.format(proposer), key) for key, name in DRAFTERS.items() if "draft" not in key or draft.is_dir()]
    devices = [(f"{name} ({description})", name) for name, description in list_available_devices()]

    def pressed(
        prompt: str,
        chat: bool,
        device: str,
        drafter: str,
        lookahead: Any,
        max_tokens: int | None,
        *sampling_and_grammar: Any,
    ) -> Iterator[str]:
        try:
            options, ahead = options_of(max_tokens, *sampling_and_grammar), lookahead_of(lookahead)
            if drafter == "none" and not {"regex", "json_schema"} & options.keys():
                ahead = 0  # nothing could propose a token
            yield '<p class="verdict">loading the model</p>'
            yield from compare(model(device, drafter), prompt, chat, options, ahead)
        except ovspec.OvspecError as error:
            yield f'<p class="error" role="alert">{escape(str(error))}</p>'

    with gr.Blocks(title="ovspec: plain and speculative", analytics_enabled=False) as page:
        gr.HTML(f"<h1>Plain and speculative decoding</h1><p>Model: {escape(folder.resolve().name)}</p>", padding=True)
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                first = QUESTION if chat else PROMPT
                prompt = gr.Textbox(first, label="Prompt", lines=10, max_lines=20, elem_id="prompt")
                is_chat = gr.Checkbox(chat, label="Send as a chat message", elem_id="chat")
            with gr.Column(scale=2, min_width=320):
                drafter = gr.Radio(drafters, value=drafters[-1][1], label="Proposals by", elem_id="drafter")
                with gr.Row():
                    lookahead = gr.Dropdown(
                        ["auto", *map(str, range(1, 9))],
                        value="auto",
                        label="Lookahead",
                        allow_custom_value=True,
                        min_width=120,
                        elem_id="lookahead",
                    )
                    most = gr.Number(160, label="Max tokens", precision=0, min_width=120, elem_id="max-tokens")
                device = gr.Dropdown(devices, value="CPU", label="Device", elem_id="device")
        with gr.Accordion("Sampling and grammar", open=False), gr.Row():
            temperature = gr.Slider(0, 2, 0, step=0.1, label="Temperature (0: greedy)", elem_id="temperature")
            top_p = gr.Slider(0.01, 1, 1, step=0.01, label="Top-p (1: all tokens)", elem_id="top-p")
            seed = gr.Number(None, label="Seed (empty: by chance)", precision=0, elem_id="seed")
            regex = gr.Textbox("", label="Regex that the text must match", elem_id="regex")
            schema = gr.Textbox("", label="JSON schema that the text must match", lines=2, elem_id="schema")
        button = gr.Button("Generate both", variant="primary", elem_id="generate")
        output = gr.HTML(elem_id="output")
        button.click(
            pressed,
            [prompt, is_chat, device, drafter, lookahead, most, temperature, top_p, seed, regex, schema],
            output,
            show_progress="hidden",
            trigger_mode="always_last",  # a press meanwhile is answered afterwards, not lost
            concurrency_limit=1,  # times of two runs at once would say nothing
            api_visibility="private",
        )
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description="Plain and speculative decoding side by side, as a web page.")
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", help="made by 'ovspec export'; the embedded pair"
    )
    parser.add_argument("--chat", action="store_true", help="begin with a question, answered by the chat template")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s: this machine only)")
    parser.add_argument("--port", type=int, default=7860, help="%(default)s")
    parser.add_argument("--precision", choices=("f32", "bf16", "f16"), help="arithmetic; by default the device's own")
    given = parser.parse_args()
    try:
        folder = given.folder or find_demo_folder()
        model = loader(folder, precision=given.precision)
        page = build(folder, model, given.chat)
        model("CPU", "lookup")  # so that the first press of the button needn't wait
    except ovspec.OvspecError as error:
        sys.exit(str(error))
    theme = Default(primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    print(f"http://{given.host}:{given.port} (Ctrl-C ends it)", flush=True)
    page.launch(
        server_name=given.host,
        server_port=given.port,
        share=False,
        show_error=True,
        quiet=True,
        theme=theme,
        css_paths=CSS,
        footer_links=[],
        run_history=False,
    )


if __name__ == "__main__":
    main()
