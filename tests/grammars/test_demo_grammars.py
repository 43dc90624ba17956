"""The grammars of demos/grammars, tested on samples and against other parsers: pycparser for C, SQLite for SQL."""

from __future__ import annotations

import functools
import json
import random
import re
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from pycparser.c_parser import CParser, ParseError

ROOT = Path(__file__).resolve().parent.parent.parent
GRAMMARS = ROOT / "demos" / "grammars"
C_SAMPLES = sorted((GRAMMARS / "samples").glob("*.c"))
SQL_SAMPLES = sorted((GRAMMARS / "samples").glob("*.sql"))

C_LITERAL = r""" "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' """.replace(" ", "")
C_TOKEN = re.compile(
    rf""" {C_LITERAL} | //(?:\\*[^\\\n]|\\+\n)* | /\*.*?\*/
       | ^[ \t]*\#(?:\\*[^\\\n]|\\+\n)* | \n | [^\S\n]+ | [A-Za-z_]\w* | \.?\d(?:[eEpP][+-]|[\w.])*
       | -> | \+\+ | -- | <<= | >>= | \.\.\. | [-+*/%&|^<>=!]= | && | \|\| | << | >> | .""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
C_WORDS: list[str] = re.findall(
    r"\S+", "int char if else while for return struct const static sizeof switch case do goto void typedef enum"
)
C_MARKS: list[str] = re.findall(r"\S+", "+ - * / % & | ^ ~ ! = == < <= && || << ++ -- += -> . ? : , ;")
SQL_TOKEN = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|\s+|\w+|\|\||[<>!]=|<>|.""", re.DOTALL)
SQL_WORDS: list[str] = re.findall(
    r"\S+", "SELECT FROM WHERE GROUP BY HAVING ORDER LIMIT AND OR NOT IN LIKE IS NULL JOIN ON AS CASE END UNION"
)
SQL_MARKS: list[str] = re.findall(r"\S+", "+ - * / % = < > <> <= || , .")

# SQLite's errors about names and types, which it raises once it has understood a statement.
SQL_UNDERSTOOD = re.compile(
    r"no such|no tables specified|unknown database|ambiguous column|misuse of|wrong number of arg|term out of range"
    r"|does not match any column|do not have the same number|sub-select returns|aggregate functions|DISTINCT aggregates"
)


@functools.cache
def tokenizer() -> LLTokenizer:
    """Return the demo model's tokenizer without its added tokens, none of which is text."""
    spec = json.loads((ROOT / "models" / "demo-hf" / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    spec["added_tokens"] = []
    return LLTokenizer(json.dumps(spec), n_vocab=len(spec["model"]["vocab"]), eos_token=0)


@functools.cache
def spellings() -> dict[bytes, int]:
    return {tokenizer().decode_bytes([token]): token for token in range(3, tokenizer().vocab_size)}


@functools.cache
def matcher(grammar: str) -> LLMatcher:
    found = LLMatcher(tokenizer(), grammar)
    assert not found.is_error(), found.get_error()
    return found


def takes(grammar: str, tokens: list[int]) -> bool:
    state = matcher(grammar).deep_copy()
    return state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()


def accepts(grammar: str, text: str) -> bool:
    return takes(grammar, tokenizer().tokenize_str(text))


def cut(text: str, rng: random.Random) -> list[int]:
    """Return ``text`` as tokens, cut at random; every byte has a token."""
    data, tokens = text.encode(), []
    while data:
        lengths = [n for n in range(1, 9) if len(data) >= n and data[:n] in spellings()]
        n = rng.choice(lengths)
        tokens.append(spellings()[data[:n]])
        data = data[n:]
    return tokens


class Judge(CParser):
    """A C parser without scopes: only va_list and names that end in _t are types."""

    def _is_type_in_scope(self, name: str) -> bool:
        return name.endswith("_t") or name == "va_list"

    def _add_typedef_name(self, name: str, coord: object) -> None:
        pass

    def _add_identifier(self, name: str, coord: object) -> None:
        pass


def is_c(text: str) -> bool:
    """Return whether pycparser parses the text, after what a preprocessor would do."""
    words = [" " if word.lstrip(" \t").startswith(("//", "/*", "#")) else word for word in C_TOKEN.findall(text)]
    text = re.sub(r"\\\r?\n|[\r\f\v]", " ", "".join(words))
    # pycparser mistakes the star in "int a[*p]" for the one in "int a[*]".
    star = r"\[\s*(?:(?:const|restrict|volatile|static)\s*)*(?=\*\s*[^\]\s])"
    text = re.sub(rf"{C_LITERAL}|{star}", lambda found: found[0] if found[0][0] in "\"'" else f"{found[0]} +", text)
    text = re.sub(r"va_arg\s*\(([^(),]+),([^()]*)\)", r"(*(\2*)(\1))", text)
    try:
        Judge().parse(text)
    except (ParseError, AssertionError):
        return False
    return True


def is_sql(text: str) -> bool:
    """Return whether SQLite understands the statement, whether or not its tables exist."""
    database = sqlite3.connect(":memory:")
    try:
        database.execute(f"EXPLAIN {text}")
    except sqlite3.Error as error:
        return SQL_UNDERSTOOD.search(str(error)) is not None
    finally:
        database.close()
    return True


@functools.cache
def c_grammar(declaring: bool) -> str:
    """Return the grammar of C with types that end in _t, as in ``Judge``; ``declaring``: they can be declared, too."""
    grammar = grammar_text("c11")
    changes = {
        "typedef_name: IDENTIFIER": "typedef_name: TYPE_NAME",
        "& ~KEYWORD": "& ~KEYWORD & ~TYPE_NAME\nTYPE_NAME: /([A-Za-z_][A-Za-z0-9_]*)?_t|va_list/",
    }
    if declaring:
        changes["direct_declarator: (IDENTIFIER"] = "direct_declarator: (IDENTIFIER | TYPE_NAME"
    else:  # for random texts: no macros that take a type
        changes["    | type_macro\n"] = ""
    for old, new in changes.items():
        assert grammar.count(old) == 1, old
        grammar = grammar.replace(old, new)
    return grammar


@functools.cache
def grammar_text(name: str) -> str:
    return (GRAMMARS / f"{name}.lark").read_text(encoding="utf-8")


def sql_grammar() -> str:
    """Return the grammar of the statement alone."""
    return re.sub("^start: .*$", "start: statement", grammar_text("sql_fence"), count=1, flags=re.MULTILINE)


def in_fence(query: str) -> str:
    return f"The query, with `JOIN`:\n\n```sql\n{query.strip()}\n```"


def mutate(words: list[str], solid: list[int], keywords: list[str], marks: list[str], rng: random.Random) -> str:
    """Return the text of ``words`` with one mistake; ``solid``: indices of the words that aren't blank or comments."""
    words = list(words)

    def one_of(wanted: Callable[[str], bool]) -> int:
        return rng.choice([at for at in solid if wanted(words[at])] or solid)

    match rng.randrange(7):
        case 0:
            del words[one_of(lambda word: word in "()[]{}")]
        case 1:
            at = one_of(lambda word: word in marks)
            words.insert(at, f" {words[at]} ")
        case 2:
            words[one_of(lambda word: word in keywords)] = rng.choice(keywords)
        case 3:
            at = one_of(lambda word: word[0] in "\"'")
            words[at] = words[at][:-1]
        case 4:
            del words[rng.choice(solid)]
        case 5:
            words[one_of(lambda word: word in marks)] = f" {rng.choice(marks)} "
        case _:
            at, other = rng.choice(solid), rng.choice(solid)
            words[at], words[other] = words[other], words[at]
    return "".join(words)


def mutants(path: Path, count: int) -> list[str]:
    rng = random.Random(path.name)
    of_c = path.suffix == ".c"
    words = (C_TOKEN if of_c else SQL_TOKEN).findall(path.read_text(encoding="utf-8").strip())
    solid = [at for at, word in enumerate(words) if word.strip() and not word.lstrip().startswith(("//", "/*", "#"))]
    keywords, marks = (C_WORDS, C_MARKS) if of_c else (SQL_WORDS, SQL_MARKS)
    return [mutate(words, solid, keywords, marks, rng) for _ in range(count)]


def walk(grammar: str, prefix: str, steps: int, closing: str, rng: random.Random) -> str | None:
    """Return ``prefix``, ``steps`` random tokens and an end; None if no end is found soon."""
    state = matcher(grammar).deep_copy()
    tokens = tokenizer().tokenize_str(prefix)
    del tokens[state.try_consume_tokens(tokens) :]
    texts = {token: text for text, token in spellings().items()}
    marks = np.array(
        [token in texts and not re.search(rb"[A-Za-z0-9\x80-\xff]", texts[token]) for token in range(4096)]
    )
    ends = [spellings()[bytes([byte])] for byte in closing.encode()]
    for step in range(400):
        allowed = np.unpackbits(np.frombuffer(state.compute_bitmask(), dtype=np.uint8), bitorder="little")[:4096] != 0
        allowed[:3] = False
        if state.is_accepting() and (step >= steps or not allowed.any()):
            return tokenizer().decode_bytes(tokens).decode()
        choice = [end for end in ends if allowed[end]] if step >= steps and rng.random() < 0.8 else []
        if not choice:
            choice = list(np.flatnonzero(allowed & marks)) if rng.random() < 0.5 else []
        token = int(rng.choice(choice or list(np.flatnonzero(allowed))))
        assert state.consume_token(token), state.get_error()
        tokens.append(token)
    return None


@pytest.mark.parametrize("path", C_SAMPLES, ids=lambda path: path.stem)
def test_c_samples(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    grammar = grammar_text("c11")
    assert accepts(grammar, text)
    assert takes(grammar, [spellings()[bytes([byte])] for byte in text.encode()])
    assert takes(grammar, cut(text, random.Random(path.name)))
    assert accepts(c_grammar(declaring=True), text)
    assert is_c(text)
    assert not accepts(grammar, text.rstrip()[:-1])


@pytest.mark.parametrize("path", SQL_SAMPLES, ids=lambda path: path.stem)
def test_sql_samples(path: Path) -> None:
    text = path.read_text(encoding="utf-8").strip()
    answer = in_fence(text)
    assert accepts(sql_grammar(), text)
    for tokens in (
        tokenizer().tokenize_str(answer),
        [spellings()[bytes([byte])] for byte in answer.encode()],
        cut(answer, random.Random(path.name)),
    ):
        assert takes(grammar_text("sql_fence"), tokens)
    assert is_sql(text)


def test_there_are_enough_samples() -> None:
    assert len(C_SAMPLES) >= 12
    assert len(SQL_SAMPLES) >= 20


def judged(count: int, languages: str) -> Counter[tuple[bool, bool]]:
    """Count how often the grammar and the other parser accept ``count`` mutants of each sample."""
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for path in C_SAMPLES if languages == "c" else SQL_SAMPLES:
        for text in mutants(path, count):
            if languages == "c":
                verdict = accepts(c_grammar(declaring=True), text), is_c(text)
                assert accepts(grammar_text("c11"), text) or not verdict[0]
            else:
                verdict = accepts(sql_grammar(), text), is_sql(text)
                assert accepts(grammar_text("sql_fence"), in_fence(text)) == accepts(sql_grammar(), text.strip()), text
            assert verdict != (True, False), text
            verdicts[verdict] += 1
    return verdicts


@pytest.mark.parametrize("language", ["c", "sql"])
@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_mutants_that_are_accepted_parse_elsewhere(language: str, count: int) -> None:
    verdicts = judged(count, language)
    assert verdicts.total() >= 100
    assert verdicts[True, True] >= 20
    assert verdicts[False, False] >= 100
    # pycparser knows fewer of C's rules, and SQL has forms that the demo's grammar leaves out.
    assert verdicts[False, True] <= (0.05 if language == "c" else 0.15) * verdicts.total()


C_BEGINNINGS = ["", "int f(int a, b_t c){", "int f(){for(;;){", "void f(){x=", "int a[]={", "b_t *(*", "struct s{"]


def c_texts(seed: int, count: int) -> tuple[int, int]:
    """Return how many random texts ended, and how many of those only by separating tokens that C would join."""
    rng = random.Random(seed)
    grammar = c_grammar(declaring=False)
    ended = joined = 0
    for _ in range(count):
        sample = rng.choice(C_SAMPLES).read_text(encoding="utf-8")
        prefix = rng.choice([*C_BEGINNINGS, *[sample[: rng.randrange(len(sample))] for _ in range(4)]])
        text = walk(grammar, prefix, rng.randrange(5, 60), "}}}}))))]]];;;;;\"'\na0", rng)
        if text is None:
            continue
        ended += 1
        if not is_c(text):
            # C always reads the longest token, llguidance the longest that the grammar allows: "sizeof(int)++x".
            apart = "".join(word if word.isspace() or "#" in word else f"{word} " for word in C_TOKEN.findall(text))
            assert not accepts(grammar, apart), text
            joined += 1
    return ended, joined


@pytest.mark.parametrize("count", [30, pytest.param(3000, marks=pytest.mark.slow)])
def test_random_c_parses_elsewhere(count: int) -> None:
    ended, joined = c_texts(seed=count, count=count)
    assert ended >= count / 2
    assert joined <= ended / 50


def sql_texts(seed: int, count: int) -> int:
    rng = random.Random(seed)
    ended = 0
    for _ in range(count):
        sample = rng.choice(SQL_SAMPLES).read_text(encoding="utf-8").strip()
        prefix = rng.choice(["select ", sample[: rng.randrange(len(sample))]])
        text = walk(sql_grammar(), prefix, rng.randrange(3, 40), ")))'\"0aaa ", rng)
        if text is not None:
            ended += 1
            assert is_sql(text), text
    return ended


@pytest.mark.parametrize("count", [30, pytest.param(3000, marks=pytest.mark.slow)])
def test_random_sql_parses_elsewhere(count: int) -> None:
    assert sql_texts(seed=count, count=count) >= count / 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", False),
        ("Hello `x` there.\n", False),
        ("```sql\nSELECT 1\n```", True),
        ("```sql\nSELECT 1;\n\n```", True),
        ("Two:\n```sql\nSELECT 1\n```\n```sql\nSELECT 2\n```", False),
        ("On the line ```sql\nSELECT 1\n```", False),
        ("```sql\nSELECT 1```", False),
        ("```\nSELECT 1\n```", False),
        ("```sql\nSELECT '```' FROM t\n```", True),
        ("```sql\nSELECT 1\n```\n", False),
    ],
)
def test_the_fence(text: str, expected: bool) -> None:
    assert accepts(grammar_text("sql_fence"), text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "int int_;",
        "long double x;",
        "a_t b;",
        "int x = intern;",
        "unsigned char *const *p[3];",
        "#line 3\nint x;",
        "int a\\\n;",
        "/* x */ // y \\\n z\n\n #include <x>\n# define X \\\n 1\nint a; // the end",
        "int f(void) { int x = 1 /* a */ - - /* b */ -'x'; l: return (a_t *)x ? x, 1 : sizeof(int); }\n#endif\n",
    ],
)
def test_little_c(text: str) -> None:
    assert accepts(grammar_text("c11"), text)


@pytest.mark.parametrize(
    "text",
    [
        "int int;",
        "a b c;",
        "a;",
        "int f(void) { return = 1; }",
        "int x = && y;",
        "int x = 08;",
        "int x = 1 // 2;",
        "int x;\n#endif x;\n",
        "int x; # line 2\n",
    ],
)
def test_little_that_is_not_c(text: str) -> None:
    assert not accepts(grammar_text("c11"), text)


@pytest.mark.parametrize(
    "text", ["selectx", "select 1from t", "select a--1 from t", "ſelect 1", "select a from t where"]
)
def test_little_that_is_not_sql(text: str) -> None:
    assert not accepts(sql_grammar(), text)
    assert accepts(sql_grammar(), "select 1 from t where a - -1 = 2")


@pytest.mark.parametrize("name", ["sql_fence", "c11"])
def test_the_grammars_give_no_warning(name: str) -> None:
    grammar = grammar_text(name)
    assert LLMatcher.validate_grammar_with_warnings(grammar, tokenizer()) == (False, [])
