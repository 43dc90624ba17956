"""Grammars in several files, resolved for llguidance, accept the texts that Lark itself accepts."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path

import lark
import pytest
from llguidance import LLMatcher, LLTokenizer

from ovspec.errors import OvspecError
from ovspec.grammars import lark as lark_files
from ovspec.grammars.lark import read_lark, resolve

ROOT = Path(__file__).resolve().parent.parent.parent

# Grammars in several files, each with an alphabet for the texts that it is tried on.
GRAMMARS: dict[str, tuple[dict[str, str], str]] = {
    "a dependency and an alias": (
        {
            "main.lark": '%import .lists.list -> numbers\nstart: numbers "."?\n',
            "lists.lark": 'list: "[" item ("," item)* "]"\nitem: DIGIT | list\nDIGIT: "0".."1"\n',
        },
        "[],01.",
    ),
    "names that collide": (
        {
            "main.lark": '%import .a.thing\n%import .b.thing -> other\nstart: thing other part\npart: "x"\n',
            "a.lark": 'thing: part part\npart: "y"\n',
            "b.lark": 'thing: PART\nPART: _X "y"\n_X: "x"\n',
        },
        "xy",
    ),
    "several names": (
        {
            "main.lark": "%import .words (a, b, C)\nstart: a b? C\n",
            "words.lark": 'a: "a" C\nb: "b" | a\nC: "c"i\nunused: "d"\n',
        },
        "abcC",
    ),
    "nested and shared files": (
        {
            "main.lark": "%import .deep.left.pair\n%import .right.pair -> mirrored\nstart: pair mirrored\n",
            "deep/left.lark": '%import .letters.L\npair: "(" L pair? ")"\n',
            "deep/letters.lark": 'L: "l" | "m"\n',
            "right.lark": '%import .deep.letters (L)\n%import .deep.left.pair -> inner\npair: "<" (L | inner) ">"\n',
        },
        "()<>lm",
    ),
    "what is ignored stays behind": (
        {
            "main.lark": '%import .spaced.pair\nstart: pair "."\n',
            "spaced.lark": '%ignore " "\npair: "a" "b"\n',
        },
        "ab .",
    ),
    "what the importer ignores": (
        {
            "main.lark": '%ignore " "\n%import .plain.pair\nstart: "~" pair "~"\n',
            "plain.lark": 'pair: "a" "b"\n',
        },
        "ab ~",
    ),
    "comments, strings and regular expressions": (
        {
            "main.lark": '// %import .none.x\n%import .marks.mark // the end\nstart: mark+ "%import"?\n',
            "marks.lark": '// "\nmark: "//" -> slashes\n    // and\n    | "\\"" | /[^\\/"x]|xx/ -> any // other\n',
        },
        '/"ax',
    ),
    "templates of trees": (
        {
            "main.lark": "%import .expr.sum\nstart: sum\n",
            "expr.lark": '?sum: product | sum "+" product -> plus\n!?product: _ATOM ~ 1..2\n_ATOM: "1" | "2"\n',
        },
        "12+",
    ),
    "the common library": (
        {
            "main.lark": "%import common.DIGIT\n%import .signed.signed\nstart: signed DIGIT\n",
            "signed.lark": '%import common.DIGIT\n%import common.LETTER -> NAME\nsigned: "-"? DIGIT NAME\n',
        },
        "-1a",
    ),
}


@functools.cache
def tokenizer() -> LLTokenizer:
    spec = json.loads((ROOT / "models" / "demo-hf" / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    spec["added_tokens"] = []
    return LLTokenizer(json.dumps(spec), n_vocab=len(spec["model"]["vocab"]), eos_token=0)


def accepted(grammar: str, texts: list[str]) -> list[str]:
    start = LLMatcher(tokenizer(), grammar)
    assert not start.is_error(), f"{start.get_error()}\n{grammar}"

    def accepts(text: str) -> bool:
        state, tokens = start.deep_copy(), tokenizer().tokenize_str(text)
        return state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()

    return [text for text in texts if accepts(text)]


def accepted_by_lark(path: Path, texts: list[str]) -> list[str]:
    parser = lark.Lark.open(str(path), parser="earley")

    def accepts(text: str) -> bool:
        try:
            parser.parse(text)
        except lark.UnexpectedInput:
            return False
        return True

    return [text for text in texts if accepts(text)]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "main.lark"


@pytest.mark.parametrize("case", GRAMMARS)
def test_resolved_files_mean_what_they_mean_to_lark(case: str, tmp_path: Path) -> None:
    files, alphabet = GRAMMARS[case]
    path = write(tmp_path, files)
    length = 6 if len(alphabet) <= 4 else 5
    texts = ["".join(word) for n in range(length) for word in itertools.product(alphabet, repeat=n)]
    if case == "what the importer ignores":  # llguidance ignores nothing at the ends of a text
        texts = [f"~{text}~" for text in texts]
    if case == "nested and shared files":
        texts = [f"({a}){b}" for a in ["l", "m", "l(m)", "", "(l)"] for b in texts]
    expected = accepted_by_lark(path, texts)
    assert expected
    assert accepted(read_lark(path), texts) == expected
    assert accepted(resolve(path.read_text(encoding="utf-8"), tmp_path, "the grammar"), texts) == expected


def test_a_grammar_without_imports_is_left_as_it_is(tmp_path: Path) -> None:
    text = '// "\nstart: /"/ "x"   # end\n\n\n%import common.INT\n'
    assert resolve(text, None, "it") == text
    assert read_lark(write(tmp_path, {"main.lark": text})) == text


def test_the_lines_of_the_first_file_stay_where_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, {"main.lark": '%import .a.x\n// one\nstart: x "y" // two\n', "a.lark": 'x: "x"\n'})
    assert read_lark(path).splitlines()[:3] == ["", "// one", 'start: x "y" // two']


def test_a_shared_rule_is_there_once(tmp_path: Path) -> None:
    files, _ = GRAMMARS["nested and shared files"]
    assert read_lark(write(tmp_path, files)).count('"l" | "m"') == 1


def test_what_nothing_needs_is_left_out(tmp_path: Path) -> None:
    files, _ = GRAMMARS["several names"]
    assert "unused" not in read_lark(write(tmp_path, files))


def test_a_prefixed_name_that_is_taken(tmp_path: Path) -> None:
    files = {"main.lark": '%import .a.x\nstart: x a__y\na__y: "1"\n', "a.lark": 'x: y\ny: "2"\n'}
    assert accepted(read_lark(write(tmp_path, files)), ["21", "22", "11"]) == ["21"]


def test_files_of_the_same_name(tmp_path: Path) -> None:
    files = {
        "main.lark": "%import .b.x\n%import .c.b.x -> y\nstart: x y\n",
        "b.lark": 'x: z\nz: "1"\n',
        "c/b.lark": 'x: z z\nz: "2"\n',
    }
    assert accepted(read_lark(write(tmp_path, files)), ["122", "211", "12"]) == ["122"]


def test_two_names_for_a_rule(tmp_path: Path) -> None:
    files = {"main.lark": "%import .a.x -> p\n%import .a.x -> q\nstart: p q\n", "a.lark": 'x: "1" | "2" x\n'}
    assert accepted(read_lark(write(tmp_path, files)), ["11", "121", "2121", "2"]) == ["11", "121", "2121"]


def test_files_may_import_each_other(tmp_path: Path) -> None:
    files = {
        "main.lark": '%import .list.list\nstart: list\nitem: "1" | list\n',
        "list.lark": '%import .main.item\nlist: "[" item* "]"\n',
    }
    assert accepted(read_lark(write(tmp_path, files)), ["[1]", "[[]1]", "[", "1"]) == ["[1]", "[[]1]"]


def test_what_only_llguidance_knows(tmp_path: Path) -> None:
    files = {
        "main.lark": "%import .x (shape, WORD, tail, counted)\nstart: shape | WORD | tail | counted\n",
        "x.lark": """
%llguidance { "no_forcing": true }
shape: %json { "enum": [
    "} // \\" WORD", 1] }   # a schema
WORD: %regex { "substring_chunks": ["un", "like", "ly"] } & ~SHORT
SHORT: /.{0,2}/
tail[suffix=END]: /[ab]*/
END: "."
counted: count::0
count::_: "c" count::incr([0:3])  %if lt([0:3], 2)  // not more
    | "" %if ge(_, 1)
""",
    }
    texts = ['"} // \\" WORD"', "1", "WORD", "un", "like", "likely", "ab.", "ab", "c", "cc", "ccc", "END"]
    resolved = read_lark(write(tmp_path, files))
    assert accepted(resolved, texts) == ['"} // \\" WORD"', "1", "like", "likely", "ab.", "c", "cc"]


def test_line_ends_and_marks_of_other_systems(tmp_path: Path) -> None:
    path = write(tmp_path, {"main.lark": ""})
    path.write_bytes(b'\xef\xbb\xbf%import .a.x\r\nstart: x\r\n    | "2"\r\n')
    (tmp_path / "a.lark").write_bytes(b'x: "0"\r\n    | "1"\r\n')
    assert accepted(read_lark(path), ["0", "1", "2", "3"]) == ["0", "1", "2"]


ERRORS: dict[str, tuple[dict[str, str], str]] = {
    "no file": ({"main.lark": "start: x\n\n%import .a.x\n"}, "main.lark, line 3: {}/a.lark can't be read, because"),
    "no nested file": (
        {"main.lark": "%import .a.x\nstart: x\n", "a.lark": "\n%import .b.c.y\nx: y"},
        "a.lark, line 2: {}/b/c.lark can't be read",
    ),
    "no rule": (
        {"main.lark": "\n%import .a.x\nstart: x\n", "a.lark": 'y: "x"\n'},
        "main.lark, line 2: {}/a.lark doesn't",
    ),
    "nothing defines it": (
        {"main.lark": "%import .a.x\nstart: x\n", "a.lark": 'x: "1"\n  | y\n'},
        "a.lark, line 2: y isn't",
    ),
    "a circle": (
        {"main.lark": "%import .a.x\nstart: x\n", "a.lark": "%import .b.x\n", "b.lark": "\n%import .a.x\n"},
        "in a circle",
    ),
    "a long name": ({"main.lark": f"%import .{'a' * 300}.x\nstart: x\n"}, "a.lark can't be read (File name too long)"),
    "itself": ({"main.lark": "%import .main.x\nstart: x\n"}, "in a circle"),
    "not a name": ({"main.lark": "%import .a.1\n"}, "main.lark, line 1: this %import isn't understood"),
    "no rule's name": ({"main.lark": "%import .a\n"}, "main.lark, line 1: this %import isn't understood"),
    "two dots": ({"main.lark": "%import ..a.x\n"}, "this %import isn't understood"),
    "an open list": ({"main.lark": "%import .a (x, y\nstart: x\n"}, "main.lark, line 1: this %import isn't understood"),
    "too much": ({"main.lark": "%import .a.x -> y z\n"}, "this %import isn't understood"),
    "a library": ({"main.lark": "%import python.name\n"}, "main.lark, line 1: there is no library python"),
    "a rule as a terminal": ({"main.lark": "%import .a.x -> X\n"}, "main.lark, line 1: X can't be an alias of x"),
    "imported twice": ({"main.lark": "%import .a.x\n%import .b.x\n"}, "main.lark, line 2: x is imported twice"),
    "imported and defined": ({"main.lark": '%import .a.x\nx: "1"\n'}, "main.lark, line 1: x is imported and defined"),
    "defined twice": (
        {"main.lark": "%import .a.x\nstart: x\n", "a.lark": 'x: "1"\nx: "2"\n'},
        "a.lark, line 2: x is defined twice",
    ),
    "no definition": (
        {"main.lark": "%import .a.x\nstart: x\n", "a.lark": 'x "1"\n'},
        "a.lark, line 1: this isn't a rule",
    ),
    "a directive": (
        {"main.lark": "%import .a.x\nstart: x\n", "a.lark": '%override x: "1"\n'},
        "a.lark, line 1: %override can't be used",
    ),
    "an open string": ({"main.lark": "start: \n  'x' \"x\n"}, "main.lark, line 2: a string isn't closed"),
    "an open regex": ({"main.lark": "start: /x\n"}, "main.lark, line 1: a regular expression isn't closed"),
    "no JSON": ({"main.lark": "start: %json { x }\n"}, "main.lark, line 1: %json isn't followed by JSON"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_place(case: str, tmp_path: Path) -> None:
    files, message = ERRORS[case]
    path = write(tmp_path, files)
    with pytest.raises(OvspecError) as error:
        read_lark(path)
    assert message.format(tmp_path) in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert str(error.value).endswith(".")


def test_a_grammar_given_as_text_imports_no_files() -> None:
    with pytest.raises(OvspecError, match="--grammar, line 2: a grammar given as text can't import files"):
        resolve("\n%import .a.x\nstart: x\n", None, "--grammar")


def test_a_missing_grammar(tmp_path: Path) -> None:
    for path in (tmp_path / "none.lark", tmp_path):
        with pytest.raises(OvspecError, match="can't be read, because there is no such file"):
            read_lark(path)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = write(tmp_path, {"main.lark": "%import .a.x\nstart: x\n"})
    (tmp_path / "a.lark").write_bytes(b'x: "\xff"\n')
    with pytest.raises(OvspecError, match=r"main.lark, line 1: .*a.lark isn't UTF-8 \(byte 4\)"):
        read_lark(path)


def test_too_many_files(tmp_path: Path) -> None:
    last = lark_files.MAX_FILES - 1
    files = {f"f{n}.lark": f"%import .f{n + 1}.x\n" for n in range(last + 1)}
    path = write(tmp_path, {**files, "main.lark": "%import .f1.x\nstart: x\n", f"f{last}.lark": 'x: "x"\n'})
    assert accepted(read_lark(path), ["x", "y"]) == ["x"]
    write(tmp_path, {f"f{last}.lark": f"%import .f{last + 1}.x\n", f"f{last + 1}.lark": 'x: "x"\n'})
    with pytest.raises(OvspecError, match=rf"f{last}.lark, line 1: .*f{last + 1}.lark would be file 101"):
        read_lark(path)


def test_too_large_files(tmp_path: Path) -> None:
    path = write(tmp_path, {"main.lark": "%import .a.x\nstart: x\n", "a.lark": 'x: "x"\n'})
    with (tmp_path / "a.lark").open("a") as stream:
        stream.write("/" * (lark_files.MAX_BYTES - 40))
    assert "x" in read_lark(path)
    with (tmp_path / "a.lark").open("a") as stream:
        stream.write("/" * 40)
    with pytest.raises(OvspecError, match=r"main.lark, line 1: .*a.lark takes the grammar over 1,000,000 bytes"):
        read_lark(path)
    with pytest.raises(OvspecError, match="it is larger than 1,000,000 bytes"):
        resolve(" " * (lark_files.MAX_BYTES + 1), None, "it")


def test_a_name_may_be_imported_through_many_files_quickly(tmp_path: Path) -> None:
    """If a shared rule were copied for each path to it, there would be 2^30 copies here."""
    files = {f"f{n}.lark": f"%import .f{n + 1}.x -> y\nx: y y?\n" for n in range(30)}
    path = write(tmp_path, {**files, "main.lark": "%import .f0.x\nstart: x\n", "f30.lark": 'x: "x"\n'})
    assert len(read_lark(path).splitlines()) < 40
