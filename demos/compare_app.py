"""A web page that generates a text without and with speculation and shows who proposed each of its tokens.

    python demos/compare_app.py [DIR]

DIR is a folder made by ``ovspec export``, by default the embedded pair. Fonts and all
else that the page needs come from this machine.
"""

from __future__ import annotations

import argparse
import functools
import itertools
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
from ovspec.drafting.choice import parse_draft
from ovspec.ir.device import available_devices
from ovspec.loading import embedded_pair
from ovspec.setup.manifest import DRAFT_FOLDER

PROMPT = "import json\n\ndef read_config(path):\n    with open(path) as file:\n"
DRAFTERS = {"draft": "draft model", "lookup": "lookup", "lookup,draft": "lookup, then draft model"}
SOURCES = {"target": "the target itself", "draft": "draft model", "lookup": "lookup", "forced": "forced by the regex"}
WARM_UP = 8  # rounds
REFRESH = 0.1  # seconds of generating between two updates of the page
SETTLE = 0.2  # seconds for the browser, on the same machine, to draw what it was sent
CSS = Path(__file__).with_suffix(".css")

ModelOf = Callable[[str, str], ovspec.LanguageModel]  # (device, drafter)


# ---------------------------------------------------------------- generating


@dataclass
class Run:
    """A text as it grows.

    ``spans``: what each token adds to the text, and where the token came from. Seconds are those that generating
    took, without what the page does between two rounds: there are more rounds without a draft.
    """

    spans: list[tuple[str, str]] = field(default_factory=list)
    first: float = 0.0
    begun_with: int = 0  # tokens of the first round
    seconds: float = 0.0
    result: ovspec.Result | None = None

    @property
    def speed(self) -> str:
        """Tokens per second, without the first round, whose time is the prompt's."""
        later = len(self.spans) - self.begun_with
        return f"{later / (self.seconds - self.first):.0f}" if later else "all at once"


def generate(lm: ovspec.LanguageModel, prompt: str, options: dict[str, Any]) -> Iterator[Run]:
    """Yields the run now and then as it grows, and once it is whole."""
    stream, detokenizer, run, shown = lm.stream(prompt, **options), lm.tokenizer.detokenizer(), Run(), 0.0
    try:
        pieces = iter(stream)
        while True:
            began = time.perf_counter()
            piece = next(pieces, None)
            run.seconds += time.perf_counter() - began
            if piece is None:
                break
            if not run.first:
                run.first, run.begun_with = run.seconds, len(piece.token_ids)
            run.spans += [
                (detokenizer.push(i), source) for i, source in zip(piece.token_ids, piece.sources, strict=True)
            ]
            if run.seconds - shown > REFRESH:
                shown = run.seconds
                yield run
    finally:
        stream.cancel()  # has an effect only where the page was closed
    run.result = stream.result()
    if rest := detokenizer.flush():
        last, source = run.spans.pop()
        run.spans.append((last + rest, source))
    yield run


def compare(lm: ovspec.LanguageModel, prompt: str, options: dict[str, Any], lookahead: int | str) -> Iterator[str]:
    """The page's results, again and again: plain decoding first, then speculation, after a short warm-up of both."""
    runs, notes = [Run(), Run()], ["warming up", "warming up"]
    ways: list[dict[str, Any]] = [options | {"lookahead": 0}, options | {"lookahead": lookahead}]
    yield results(prompt, runs, notes)
    for way in ways:
        for _ in itertools.islice(lm.stream(prompt, **way), WARM_UP):
            pass
    notes[1] = "waits for the other"
    for place, way in enumerate(ways):
        notes[place] = "generating"
        yield results(prompt, runs, notes)
        time.sleep(SETTLE)
        for runs[place] in generate(lm, prompt, way):
            yield results(prompt, runs, notes)
        notes[place] = ""
    yield results(prompt, runs, notes)


# ---------------------------------------------------------------- showing


def results(prompt: str, runs: list[Run], notes: list[str]) -> str:
    """HTML of both texts and, once they are whole, what there is to say about them."""
    plain, speculative = runs
    finished = table(plain, speculative) if plain.result and speculative.result and not any(notes) else ""
    names = ("Plain", "Speculative")
    texts = "".join(text(name, prompt, run, note) for name, run, note in zip(names, runs, notes, strict=True))
    return f'<div class="results">{finished}{legend(speculative)}<div class="texts">{texts}</div></div>'


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
    """Colours, and how many tokens of the speculative text came from where."""
    counts = Counter(source for _, source in run.spans)
    entries = [
        f'<li><span class="token {source}">{name}</span> {counts[source]}</li>'
        for source, name in SOURCES.items()
        if source != "forced" or counts[source]
    ]
    return f'<ul class="legend"><li>Tokens proposed by</li>{"".join(entries)}</ul>'


def table(plain: Run, speculative: Run) -> str:
    """Times, and whether the texts are equal."""
    assert plain.result and speculative.result
    runs, stats = (plain, speculative), speculative.result.stats
    rate = stats.acceptance_rate
    accepted = "nothing was proposed" if rate is None else f"{rate:.2f} ({stats.accepted} of {stats.proposed})"
    rows = [
        ("time to first token", *(f"{1e3 * run.first:.1f} ms" for run in runs)),
        ("tokens per second after it", *(run.speed for run in runs)),
        ("total", *(f"{run.seconds:.2f} s" for run in runs)),
        ("speed-up of the total", "1.00x", f"{plain.seconds / speculative.seconds:.2f}x"),
        ("acceptance rate", "", accepted),
        ("tokens per round", "1.00", f"{stats.generated_tokens / max(stats.rounds, 1):.2f}"),
    ]
    if stats.seed is not None:
        rows.append(("seed", str(plain.result.stats.seed), str(stats.seed)))
    cells = "".join(f"<tr><th>{name}</th><td>{one}</td><td>{two}</td></tr>" for name, one, two in rows)
    return (
        f'<p class="verdict">{equality(plain.result.token_ids, speculative.result.token_ids)}</p>'
        f'<table class="numbers"><thead><tr><th></th><th>plain</th><th>speculative</th></tr></thead>{cells}</table>'
    )


def equality(plain: list[int], speculative: list[int]) -> str:
    if plain == speculative:
        return f"The texts are equal: {len(plain)} token{'s' * (len(plain) != 1)}."
    same = next((i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), None)
    same = min(len(plain), len(speculative)) if same is None else same
    return f"The texts part after {same} tokens, where rounding decided which token came."


# ---------------------------------------------------------------- the page


def options_of(max_tokens: int | None, temperature: float, seed: int | None, regex: str) -> dict[str, Any]:
    """Keywords for ``stream``; both texts get the same seed."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if temperature:
        options["seed"] = secrets.randbits(32) if seed is None else seed
    return options | ({"regex": regex} if regex else {})


def lookahead_of(value: Any) -> int | str:
    if value == "auto" or (str(value).isdecimal() and int(value) >= 1):
        return value if value == "auto" else int(value)
    raise ovspec.OvspecError(f"The lookahead is {value}; it must be auto or a number of at least 1.")


def loader(folder: Path, **loading: Any) -> ModelOf:
    """What gives the model for a device and a drafter, and loads it once for each device."""
    has_draft = (folder / DRAFT_FOLDER).is_dir()

    @functools.cache
    def on_device(device: str) -> ovspec.LanguageModel:
        return ovspec.load(folder, "lookup,draft" if has_draft else "lookup", device=device, **loading)

    @functools.cache
    def model(device: str, drafter: str) -> ovspec.LanguageModel:
        return on_device(device).with_drafters(parse_draft(drafter))

    return model


def build(folder: Path, model: ModelOf) -> gr.Blocks:
    """The page for the models in ``folder``."""
    drafters = [
        (name, draft) for draft, name in DRAFTERS.items() if "draft" not in draft or (folder / DRAFT_FOLDER).is_dir()
    ]
    devices = [(f"{name} ({description})", name) for name, description in available_devices()]

    def pressed(
        prompt: str,
        device: str,
        drafter: str,
        lookahead: Any,
        max_tokens: int | None,
        temperature: float,
        seed: int | None,
        regex: str,
    ) -> Iterator[str]:
        try:
            options, ahead = options_of(max_tokens, temperature, seed, regex), lookahead_of(lookahead)
            yield '<p class="verdict">loading the model</p>'
            yield from compare(model(device, drafter), prompt, options, ahead)
        except ovspec.OvspecError as error:
            yield f'<p class="error" role="alert">{escape(str(error))}</p>'

    with gr.Blocks(title="ovspec: plain and speculative", analytics_enabled=False) as page:
        gr.HTML(f"<h1>Plain and speculative decoding</h1><p>Model: {escape(folder.resolve().name)}</p>", padding=True)
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                prompt = gr.Textbox(PROMPT, label="Prompt", lines=12, max_lines=20, elem_id="prompt")
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
            seed = gr.Number(None, label="Seed (empty: by chance)", precision=0, elem_id="seed")
            regex = gr.Textbox("", label="Regex that the text must match", elem_id="regex")
        button = gr.Button("Generate both", variant="primary", elem_id="generate")
        output = gr.HTML(elem_id="output")
        button.click(
            pressed,
            [prompt, device, drafter, lookahead, most, temperature, seed, regex],
            output,
            show_progress="hidden",
            concurrency_limit=1,  # times of two runs at once would say nothing
            api_visibility="private",
        )
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description="Plain and speculative decoding side by side, as a web page.")
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", help="made by 'ovspec export'; the embedded pair"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s: this machine only)")
    parser.add_argument("--port", type=int, default=7860, help="%(default)s")
    parser.add_argument("--precision", choices=("f32", "bf16", "f16"), help="arithmetic; by default the device's own")
    given = parser.parse_args()
    try:
        folder = given.folder or embedded_pair()
        model = loader(folder, precision=given.precision)
        page = build(folder, model)
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
