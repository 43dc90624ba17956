"""Saved sessions: they continue token for token in another process, or fail with a reason."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROMPTS, ROOT

import ovspec
from ovspec.api.model import LanguageModel
from ovspec.base.files import HOST_CODE

Load = Callable[..., LanguageModel]
DEMO = ROOT / "models" / "demo"
SMALL = DEMO / "draft"  # which is compiled sooner
# Loads sessions in a new process and continues them. Arguments: folder; files and options of ovspec.load as JSON.
GO_ON = """
import json, sys
import ovspec
found = []
for file, options in json.loads(sys.argv[2]):
    with ovspec.load(sys.argv[1], **options).session() as session:
        session.load(file)
        lookahead = 3 if options["draft"] else None
        result = session.generate(max_tokens=40, ignore_eos=True, lookahead=lookahead)
        found.append([result.token_ids, result.stats.cached_tokens, result.stats.prompt_tokens])
print(json.dumps(found))
"""
SETTINGS: dict[str, dict[str, Any]] = {
    "paged-bf16": {"engine": "paged", "precision": "bf16"},
    "paged-f32-u8": {"engine": "paged", "precision": "f32", "kv_precision": "u8"},
    "stateful-bf16": {"engine": "stateful", "precision": "bf16"},
    "stateful-f32": {"engine": "stateful", "precision": "f32"},
}


def begin(session: ovspec.Session) -> None:
    """Give the session a text with a history: appended in pieces, generated and rewound."""
    session.append(PROMPTS[1])
    mark = session.mark()
    session.generate(max_tokens=9, ignore_eos=True)
    session.rewind(mark)
    session.append("\n# more\n")
    session.generate(max_tokens=21, ignore_eos=True)


CASES = [(name, draft) for name in SETTINGS for draft in (None, True)]
QUICK = [("paged-bf16", True), ("paged-f32-u8", None), ("stateful-f32", True)]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(CASES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_sessions_go_on_in_another_process(
    cases: list[tuple[str, Any]], tmp_path: Path, cache_dir: Path, command_environment: dict[str, str]
) -> None:
    """The cache is restored to the bit, so the text continues identically, even quantised or in bf16, where reading the
    text again might round differently."""
    expected, saved = list[list[int]](), list[tuple[str, dict[str, Any]]]()
    for name, draft in cases:
        options = {**SETTINGS[name], "draft": draft and str(SMALL), "cache_dir": str(cache_dir)}
        file = tmp_path / f"{name}-{draft}"
        with ovspec.load(SMALL, **options).session() as session:
            begin(session)
            session.save(file)
            # With a quantised cache, the text depends on which tokens are verified together; auto decides by timing.
            lookahead = 3 if draft else None
            expected.append(session.generate(max_tokens=40, ignore_eos=True, lookahead=lookahead).token_ids)
        saved.append((str(file), options))
    command = [sys.executable, "-c", GO_ON, str(SMALL), json.dumps(saved)]
    done = subprocess.run(command, capture_output=True, env=command_environment, timeout=120, check=True)
    # A model that can't be exact here says so; nothing else is said.
    assert all("not exact here" in line for line in done.stderr.decode().splitlines()), done.stderr.decode()
    found = json.loads(done.stdout)
    assert len(found) == len(cases)
    for case, tokens, (continued, cached, prompt) in zip(cases, expected, found, strict=True):
        assert continued == tokens, case
        assert cached == prompt - 1, (case, "nothing is read again")


def test_what_belongs_to_the_text_is_kept(load: Load, tmp_path: Path) -> None:
    lm = load(draft=True)
    with lm.session() as session, lm.session() as other:
        session.append({"role": "user", "content": "h\u00e4?"})
        session.generate(max_tokens=5)
        session.save(tmp_path / "chat")
        other.append("something else")
        other.load(tmp_path / "chat")
        assert other.messages == session.messages
        for each in (session, other):
            each.append({"role": "user", "content": "more"})
        assert other.tokens == session.tokens
        session.reset()
        session.append("import os.pa")
        session.save(tmp_path / "text")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing had been read, so no cache can be lost
            other.load(tmp_path / "text")
        assert other.generate(max_tokens=3).text == session.generate(max_tokens=3).text, "both are healed"
        session.reset()
        session.save(tmp_path / "empty")
        other.load(tmp_path / "empty")
        assert len(other) == 0


def test_a_cache_that_does_not_fit_is_read_again(load: Load, tmp_path: Path) -> None:
    """With another engine or draft, the text is the same in f32, and a warning reports a lost cache."""
    file = tmp_path / "session"
    with load(draft=True, engine="paged").session() as session:
        begin(session)
        session.save(file)
        expected = session.generate(max_tokens=30, ignore_eos=True).token_ids
    with load(draft="lookup", engine="paged").session() as other:
        other.load(file)  # no warning: a draft changes no text
        assert other.generate(max_tokens=30, ignore_eos=True).token_ids == expected
    with load(engine="stateful").session() as other:
        with pytest.warns(UserWarning, match="saved with other settings .*the text is read again"):
            other.load(file)
        result = other.generate(max_tokens=30, ignore_eos=True)
        assert result.token_ids == expected
        assert result.stats.cached_tokens == 0


def test_a_cache_that_cannot_be_written_exactly(cache_dir: Path, tmp_path: Path) -> None:
    lm = ovspec.load(SMALL, engine="stateful", precision="f32", kv_precision="u8", cache_dir=cache_dir)
    with lm.session() as session:
        begin(session)
        with pytest.warns(UserWarning, match="KV cache is left out, because its precision isn't exact"):
            session.save(tmp_path / "session")
        with lm.session() as other:
            with pytest.warns(UserWarning, match="saved without its KV cache"):
                other.load(tmp_path / "session")
            assert other.tokens == session.tokens
            assert other.generate(max_tokens=4, ignore_eos=True).stats.cached_tokens == 0
        with session.fork() as fork:
            assert fork.generate(max_tokens=4, ignore_eos=True).stats.cached_tokens == 0


def test_other_files_are_refused(load: Load, tmp_path: Path, pair: Path, cache_dir: Path) -> None:
    lm = load()
    with lm.session() as session:
        session.append(PROMPTS[0])
        before = session.generate(max_tokens=4, ignore_eos=True)
        good = tmp_path / "good"
        session.save(good)
        held = session.tokens
        damaged = {
            "empty": b"",
            "text": b"import os\n",
            "cut": good.read_bytes()[:-300],
            "flipped": good.read_bytes()[:3000] + bytes([good.read_bytes()[3000] ^ 1]) + good.read_bytes()[3001:],
        }
        np.savez(tmp_path / "other.npz", a=np.zeros(3))
        damaged["other"] = (tmp_path / "other.npz").read_bytes()
        np.save(tmp_path / "one.npy", np.zeros(3))
        damaged["one"] = (tmp_path / "one.npy").read_bytes()
        for name, content in damaged.items():
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ovspec.OvspecError, match=f"{name}: not a session file, or damaged"):
                session.load(tmp_path / name)
        with pytest.raises(ovspec.OvspecError, match="no such file"):
            session.load(tmp_path / "nowhere")
        with pytest.raises(ovspec.OvspecError, match="is a directory"):
            session.load(tmp_path)
        with pytest.raises(ovspec.OvspecError, match="can't be written"):
            session.save(tmp_path / "nowhere" / "session")
        assert session.tokens == held
        expected = lm.generate(held, max_tokens=6, ignore_eos=True).token_ids
        assert session.generate(max_tokens=6, ignore_eos=True).token_ids == expected
    assert before.token_ids
    # The same architecture with other weights.
    folder = tmp_path / "other-weights"
    shutil.copytree(pair, folder)
    (folder / "ovspec.json").unlink()
    weights = np.memmap(folder / "openvino_model.bin", np.float32, "r+", shape=(500_000,))
    weights[:] *= np.float32(1.001)
    weights.flush()
    other = ovspec.load(folder, precision="f32", cache_dir=cache_dir)
    with other.session() as session, pytest.raises(ovspec.OvspecError, match="saved with another model"):
        session.load(good)


def test_a_save_that_fails_leaves_the_old_file(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "session"
    with load().session() as session:
        session.append("one")
        session.save(file)
        old = file.read_bytes()
        session.append(" two")

        def full(handle: Any, **_: Any) -> None:
            handle.write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(np, "savez", full)
        with pytest.raises(ovspec.OvspecError, match="No space left"):
            session.save(file)
    assert file.read_bytes() == old
    assert list(tmp_path.iterdir()) == [file]


def test_a_newer_format_is_refused(load: Load, tmp_path: Path) -> None:
    with load().session() as session:
        session.append("one")
        session.save(tmp_path / "session")
        with np.load(tmp_path / "session") as saved:
            arrays = dict(saved)
        about = json.loads(arrays["about"].tobytes()) | {"format": 2}
        arrays["about"] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
        with (tmp_path / "newer").open("wb") as file:
            np.savez(file, **arrays)
        with pytest.raises(ovspec.OvspecError, match="unknown format 2"), warnings.catch_warnings():
            session.load(tmp_path / "newer")


def test_a_saved_file_keeps_its_permissions_and_its_link(load: Load, tmp_path: Path) -> None:
    real, link = tmp_path / "real.ov", tmp_path / "link.ov"
    with load().session() as session:
        session.append(PROMPTS[0])
        session.save(real)
        real.chmod(0o600)
        link.symlink_to(real)
        (tmp_path / f".real.ov.{HOST_CODE}-999999999.0000.partial").touch()  # of a process that was killed
        session.append("more")
        session.save(link)
        assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o600
        assert sorted(path.name for path in tmp_path.iterdir()) == ["link.ov", "real.ov"]
        session.load(real)
        assert session.text.endswith("more")


def test_a_full_disk_keeps_the_text(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, **arrays: Any) -> None:
        if any("/cache/" in name for name in arrays):
            raise OSError(errno.ENOSPC, "No space left on device")
        savez(file, **arrays)

    savez = np.savez
    with load().session() as session:
        session.append(PROMPTS[0])
        made = session.generate(max_tokens=5, ignore_eos=True)
        monkeypatch.setattr(np, "savez", full)
        with pytest.warns(UserWarning, match="disk is full, so the text is saved without"):
            session.save(tmp_path / "s.ov")
        monkeypatch.undo()
        with load().session() as other, pytest.warns(UserWarning, match="without its KV cache"):
            other.load(tmp_path / "s.ov")
            assert other.tokens == session.tokens
            assert made.text


def test_any_mutation_is_a_sentence_or_a_text(load: Load, tmp_path: Path) -> None:
    """Every member and every field of a session file: gone, of another type, shape, sign, size or depth, or NaN."""
    good, bad = tmp_path / "good.ov", tmp_path / "bad.ov"
    tried = 0
    with load().session() as session, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session.append(PROMPTS[0])
        session.generate(max_tokens=5, ignore_eos=True)
        session.save(good)
        with np.load(good) as saved:
            arrays = dict(saved)
        for broken in mutations(arrays):
            tried += 1
            np.savez(bad.open("wb"), **broken)
            try:
                session.load(bad)
                session.generate(max_tokens=2, ignore_eos=True)
            except ovspec.OvspecError as error:
                assert len(str(error)) < 400
        shape = f"{arrays['tokens'].shape}, }}".encode()
        bad.write_bytes(good.read_bytes().replace(shape + b" " * 12, shape.replace(b",)", b"0" * 12 + b",)")))
        assert bad.read_bytes() != good.read_bytes()
        with pytest.raises(ovspec.OvspecError, match="damaged"):
            session.load(bad)
        session.load(good)
    assert tried > 100


def mutations(arrays: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    for name, values in arrays.items():
        yield {key: each for key, each in arrays.items() if key != name}
        others = [values[:0], values[:-1], values[None], values.astype(np.float32), values.astype("S4"), np.array(1)]
        others += [np.full(values.shape, np.nan), np.full(values.shape, -1), np.full(values.shape, 2**62)]
        for other in others:
            yield {**arrays, name: other}
        if name.count("/") > 1:
            break  # one layer shows it
    about = json.loads(arrays["about"].tobytes())
    for place in places(about):
        for value in (None, True, -1, 10**30, "x", "", [], [[]] * 9, {}, {"a": 1}, 1e300):
            text = json.dumps(replaced_at(about, place, value))
            yield {**arrays, "about": np.frombuffer(text.encode(), dtype=np.uint8)}
    for text in ("[" * 5000 + "]" * 5000, "[]", "3", "{", "\xff"):
        yield {**arrays, "about": np.frombuffer(text.encode("latin-1"), dtype=np.uint8)}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key in value if isinstance(value, dict) else ():
        yield from places(value[key], (*at, key))


def replaced_at(value: Any, place: tuple[Any, ...], by: Any) -> Any:
    return {**value, place[0]: replaced_at(value[place[0]], place[1:], by)} if place else by


def test_a_cache_of_other_settings_is_not_restored(load: Load, tmp_path: Path) -> None:
    """Even if its arrays would fit, for its values are others: of another version of OpenVINO, say."""
    with load().session() as session:
        session.append("one")
        session.generate(max_tokens=2, ignore_eos=True)
        session.save(tmp_path / "session")
        with np.load(tmp_path / "session") as saved:
            arrays = dict(saved)
        about = json.loads(arrays["about"].tobytes())
        about["caches"]["target"]["setting"] += "?"
        arrays["about"] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
        with (tmp_path / "other").open("wb") as file:
            np.savez(file, **arrays)
        with pytest.warns(UserWarning, match="saved with other settings .*the text is read again"):
            session.load(tmp_path / "other")
        assert session.generate(max_tokens=1, ignore_eos=True).stats.cached_tokens == 0
