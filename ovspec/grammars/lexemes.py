"""From GBNF's rules to Lark: which parts may be greedy lexemes without changing the language.

A mask over lexemes of several characters is found many times faster than over single ones. What is regular becomes a
lexeme, as large as possible. Where a lexeme would swallow what belongs to the next, it is taken apart and its parts
are tried. Single characters always work, because nothing is shorter.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from ovspec.grammars.gbnf import EMPTY, Alt, Chars, Name, Node, Ranges, Repeat, Seq, parse

MAX_SIZE = 2000  # characters' places in a lexeme
MAX_DEPTH = 60  # of the parentheses in a lexeme
MAX_STEPS = 1_000_000  # of comparing lexemes, about a second; beyond it all lexemes are single characters

Symbol = str  # "T3" a lexeme, "r3" a rule, "r3-name" one with a name of its own


@dataclass(frozen=True)
class Regular:
    """What is known of an expression that isn't recursive."""

    size: int
    depth: int
    nullable: bool


def to_lark(text: str) -> str:
    """A GBNF grammar as a Lark grammar of llguidance that matches the same texts.

    Raises:
        OvspecError: the grammar is wrong; the message begins with the line and column.
    """
    rules = parse(text)
    regular = regular_rules(rules)
    split: set[Node] | None = set()
    budget = [MAX_STEPS]
    while True:
        plan = Plan(rules, regular, split)
        plan.rule("root")
        try:
            greedy = plan.too_greedy(budget) if split is not None else set()
        except TooMuch:
            greedy, split = {EMPTY}, None
        if not greedy:
            return plan.lark()
        if split is not None:
            split |= greedy


class NotSolid(Exception):
    """The texts that aren't empty have no short expression."""


class TooMuch(Exception):
    """Comparing all lexemes would take too long."""


def regular_rules(rules: dict[str, Node]) -> dict[str, Regular]:
    """The rules that reach no recursive one, with what they are made of."""
    found: dict[str, Regular] = {}
    users: dict[str, list[str]] = {name: [] for name in rules}
    missing = {}
    for name, node in rules.items():
        wanted = set(names(node))
        missing[name] = len(wanted)
        for other in wanted:
            users[other].append(name)
    ready = [name for name, count in missing.items() if not count]
    while ready:
        name = ready.pop()
        found[name] = facts(rules[name], found)
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return found


def names(node: Node) -> Iterable[str]:
    if isinstance(node, Name):
        yield node.text
    for child in children(node):
        yield from names(child)


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Seq(parts):
            return parts
        case Alt(options):
            return options
        case Repeat(part):
            return (part,)
    return ()


def facts(node: Node, rules: dict[str, Regular]) -> Regular:
    """Of an expression that refers to none but these rules."""
    if isinstance(node, Name):
        known = rules[node.text]
        return Regular(known.size, known.depth + 1, known.nullable)
    inner = [facts(child, rules) for child in children(node)]
    size = sum(each.size for each in inner) + isinstance(node, Chars)
    depth = 1 + max((each.depth for each in inner), default=0)
    match node:
        case Chars():
            nullable = False
        case Alt():
            nullable = any(each.nullable for each in inner)
        case Repeat(_, least):
            nullable = not least or inner[0].nullable
        case _:
            nullable = all(each.nullable for each in inner)
    return Regular(min(size, MAX_SIZE + 1), depth, nullable)


@dataclass
class Plan:
    """A grammar over lexemes; ``split`` holds the expressions that can't be one, None means all."""

    rules: dict[str, Node]
    regular: dict[str, Regular]
    split: set[Node] | None
    symbols: dict[Node, Symbol] = field(default_factory=dict)
    lexemes: dict[Symbol, Node] = field(default_factory=dict)
    lines: dict[Symbol, str] = field(default_factory=dict)  # the right sides, in Lark
    options: dict[Symbol, list[list[Symbol]]] = field(default_factory=dict)  # the same, repetitions taken apart

    def rule(self, root: str) -> None:
        """Add a rule and all that it needs."""
        waiting: list[Node] = [Name(root)]
        while waiting:  # a chain of rules may be longer than Python's stack is deep
            node = waiting.pop()
            symbol = self.symbol(node)
            if symbol in self.lines or symbol in self.lexemes:
                continue
            waiting += self.define(symbol, node)

    def symbol(self, node: Node) -> Symbol:
        if node not in self.symbols:
            solid = self.is_regular(node) and not facts(node, self.regular).nullable
            number, own = len(self.symbols), f"-{node.text.lower()}" if isinstance(node, Name) else ""
            if isinstance(node, Chars) or (solid and self.may_be_lexeme(node)):
                self.symbols[node] = f"T{number}"
                self.lexemes[f"T{number}"] = node
            else:
                self.symbols[node] = f"r{number}{own}"
        return self.symbols[node]

    def is_regular(self, node: Node) -> bool:
        return all(name in self.regular for name in names(node))

    def may_be_lexeme(self, node: Node) -> bool:
        if self.split is None or node in self.split or not self.is_regular(node):
            return False
        known = facts(node, self.regular)
        return known.size <= MAX_SIZE and known.depth <= MAX_DEPTH

    def define(self, symbol: Symbol, node: Node) -> list[Node]:
        """Write a rule down; returns what it refers to."""
        if self.may_be_lexeme(node):  # it matches nothing as well, which a lexeme should not
            with suppress(NotSolid):
                solid = self.solid(node)
                if solid is None or self.may_be_lexeme(solid):
                    return self.write(symbol, [[], *([[solid]] if solid else [])])
        match node:
            case Name(text):
                return self.write(symbol, [[self.rules[text]]])
            case Seq(parts):
                return self.write(symbol, [list(parts)])
            case Alt(options):
                return self.write(symbol, [self.parts(option) for option in options])
            case Repeat(_, _, 0):
                return self.write(symbol, [[]])
            case Repeat(part, least, most):
                inner = self.symbol(part)
                self.lines[symbol] = f"{inner}{{{least},{'' if most is None else most}}}"
                self.options[symbol] = [
                    [inner],
                    *([[]] if not least else []),
                    *([[symbol, inner]] if most != 1 else []),
                ]
                return [part]
        raise AssertionError(node)

    def parts(self, option: Node) -> list[Node]:
        return list(option.parts) if isinstance(option, Seq) and not self.may_be_lexeme(option) else [option]

    def write(self, symbol: Symbol, options: list[list[Node]]) -> list[Node]:
        self.options[symbol] = [[self.symbol(node) for node in option] for option in options]
        self.lines[symbol] = " | ".join(" ".join(option) or '""' for option in self.options[symbol])
        return [node for option in options for node in option]

    def solid(self, node: Node) -> Node | None:
        """A regular expression without the empty text; None if that leaves nothing."""
        if not facts(node, self.regular).nullable:
            return node
        match node:
            case Name(text):
                return self.solid(self.rules[text])
            case Alt(options):
                left = [each for each in map(self.solid, options) if each is not None]
                return Alt(tuple(left)) if left else None
            case Repeat(part, _, most):
                inner = self.solid(part)
                return None if inner is None or most == 0 else Repeat(inner, 1, most)
        if node == EMPTY:
            return None
        raise NotSolid  # a sequence would grow with the square of its length

    def lark(self) -> str:
        lines = [f"start: {self.symbols[Name('root')]}"]
        lines += [f"{symbol}: {line}" for symbol, line in self.lines.items()]
        lines += [f"{symbol}: /{self.regex(node)}/" for symbol, node in self.lexemes.items()]
        return "\n".join(lines) + "\n"

    def regex(self, node: Node) -> str:
        match node:
            case Chars(ranges):
                return "[" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in ranges) + "]"
            case Seq(parts):
                return "".join(map(self.regex, parts))
            case Alt(options):
                return "(?:" + "|".join(map(self.regex, options)) + ")"
            case Repeat(part, least, most):
                return f"(?:{self.regex(part)}){{{least},{'' if most is None else most}}}"
            case Name(text):
                return self.regex(self.rules[text])

    # Which lexemes are too greedy?

    def too_greedy(self, budget: list[int]) -> set[Node]:
        """The lexemes that could go on with a character that belongs to the next one.

        Two lexemes are looked at together if both may begin at the same place: where both may follow the same
        lexeme, or two lexemes that match the same text. ``budget`` holds the steps that are left.
        """
        follows, first = self.followers(budget)
        automata = {symbol: Automaton.of(node, self.rules) for symbol, node in self.lexemes.items()}
        beginnings = {symbol: automaton.first() for symbol, automaton in automata.items()}
        after = {symbol: [r for each in follows[symbol] for r in beginnings[each]] for symbol in automata}
        seen: set[tuple[Symbol, Symbol]] = set()
        greedy: set[Node] = set()
        waiting = [(one, other) for one in first for other in first]
        while waiting:
            pair = one, other = waiting.pop()
            if pair in seen:
                continue
            seen.add(pair)
            equal, swallows = automata[one].compare(automata[other], after[one], budget)
            if swallows:
                greedy.add(self.lexemes[other])
            if equal:
                budget[0] -= len(follows[one]) * len(follows[other])
                waiting += [(a, b) for a in follows[one] for b in follows[other]]
                waiting += [(b, a) for a in follows[one] for b in follows[other]]
        return greedy

    def followers(self, budget: list[int]) -> tuple[dict[Symbol, set[Symbol]], set[Symbol]]:
        """Which lexemes may follow each one, and which may begin a text."""
        nullable: set[Symbol] = set()
        first: dict[Symbol, set[Symbol]] = {symbol: set() for symbol in self.options}
        first |= {symbol: {symbol} for symbol in self.lexemes}
        follow: dict[Symbol, set[Symbol]] = {symbol: set() for symbol in first}
        rules, changed = list(self.options.items()), True
        while changed:
            changed = False
            rules.reverse()  # what begins a text goes up a chain of rules, what follows goes down
            for symbol, options in rules:
                for option in options:
                    budget[0] -= len(option)
                    if budget[0] < 0:
                        raise TooMuch
                    before = (len(nullable), len(first[symbol]))
                    ahead, can_end = set(), True  # what may come after the symbol looked at, within the option
                    for each in reversed(option):
                        size = len(follow[each])
                        follow[each] |= ahead | (follow[symbol] if can_end else set())
                        changed |= size != len(follow[each])
                        ahead = first[each] | (ahead if each in nullable else set())
                        can_end &= each in nullable
                    first[symbol] |= ahead
                    if can_end:
                        nullable.add(symbol)
                    changed |= before != (len(nullable), len(first[symbol]))
        return {symbol: follow[symbol] for symbol in self.lexemes}, first[self.symbols[Name("root")]]


@dataclass
class Automaton:
    """Accepts a lexeme's texts, and more where repetitions are counted, which can only make it look greedier."""

    steps: list[list[tuple[Ranges, int]]]
    empty: list[list[int]]  # steps without a character
    end: int = 0

    @staticmethod
    def of(node: Node, rules: dict[str, Node]) -> Automaton:
        made = Automaton([[]], [[]])
        made.end = made.build(node, 0, rules)
        return made

    def state(self) -> int:
        self.steps.append([])
        self.empty.append([])
        return len(self.steps) - 1

    def build(self, node: Node, start: int, rules: dict[str, Node]) -> int:
        """Add an expression that begins in a state; returns the one in which it ends."""
        match node:
            case Chars(ranges):
                end = self.state()
                self.steps[start].append((ranges, end))
                return end
            case Seq(parts):
                for part in parts:
                    start = self.build(part, start, rules)
                return start
            case Alt(options):
                end = self.state()
                for option in options:
                    begin = self.state()
                    self.empty[start].append(begin)
                    self.empty[self.build(option, begin, rules)].append(end)
                return end
            case Repeat(part, least, most):
                begin = self.state()
                self.empty[start].append(begin)
                end, out = self.build(part, begin, rules), self.state()
                self.empty[end].append(out)
                if most is None or most > 1:
                    self.empty[end].append(begin)
                if not least:
                    self.empty[begin].append(out)
                return out
            case Name(text):
                return self.build(rules[text], start, rules)

    def reach(self, states: Iterable[int]) -> frozenset[int]:
        found, waiting = set(), list(states)
        while waiting:
            state = waiting.pop()
            if state not in found:
                found.add(state)
                waiting += self.empty[state]
        return frozenset(found)

    def first(self) -> list[tuple[int, int]]:
        return [r for state in self.reach([0]) for ranges, _ in self.steps[state] for r in ranges]

    def compare(self, other: Automaton, after: list[tuple[int, int]], budget: list[int]) -> tuple[bool, bool]:
        """Is there a text of both; and one of this that the other can go on from with a character of ``after``?"""
        equal = swallows = False
        seen: set[tuple[int, int]] = set()
        waiting = [(a, b) for a in self.reach([0]) for b in other.reach([0])]
        while waiting and not (equal and swallows):
            pair = a, b = waiting.pop()
            if pair in seen:
                continue
            seen.add(pair)
            budget[0] -= 1
            if budget[0] < 0:
                raise TooMuch
            equal |= a == self.end and b == other.end
            if a == self.end:
                swallows |= any(overlap(ranges, after) for ranges, _ in other.steps[b])
            for ranges, c in self.steps[a]:
                for others, d in other.steps[b]:
                    if overlap(ranges, others):
                        waiting += [(c, d)]
            waiting += [(c, b) for c in self.empty[a]] + [(a, d) for d in other.empty[b]]
        return equal, swallows


def overlap(one: Iterable[tuple[int, int]], other: Iterable[tuple[int, int]]) -> bool:
    others = list(other)
    return any(a <= d and c <= b for a, b in one for c, d in others)
