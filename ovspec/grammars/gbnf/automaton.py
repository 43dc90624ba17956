"""Finds lexemes that are too greedy: they would swallow a character that belongs to the next lexeme."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

from ovspec.grammars.gbnf.parsing import Alt, Chars, Expression, Name, Repeat, Seq

MAX_STEPS = 600_000  # takes about a second


class TooMuch(Exception):
    """The analysis would take too long."""


@dataclass
class Budget:
    """The number of steps left to the analysis; each takes one or two microseconds."""

    left: int = MAX_STEPS

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooMuch


@dataclass
class Lexemes:
    """A grammar whose terminals are lexemes."""

    start: str  # the start symbol
    rules: dict[str, list[list[str]]]  # symbol that is not a lexeme -> its options, each a sequence of symbols
    lexemes: dict[str, Expression]  # symbol of a lexeme -> its expression, which never matches the empty text

    def followers(self, budget: Budget) -> tuple[list[int], int]:
        """Return the lexemes that may follow each lexeme and those that may begin a text; lexeme i is bit i."""
        budget.spend(len(self.lexemes) ** 2 // 500)
        lexemes = {symbol: 1 << i for i, symbol in enumerate(self.lexemes)}
        first = dict.fromkeys(self.rules, 0) | lexemes
        follow = dict.fromkeys(first, 0)
        nullable: set[str] = set()
        cost = 1 + len(lexemes) // 500
        rules, changed = list(self.rules.items()), True
        while changed:
            changed = False
            rules.reverse()  # first sets propagate up a chain of rules, follow sets down
            for symbol, options in rules:
                before = first[symbol], symbol in nullable
                for option in options:
                    budget.spend(cost * (len(option) + 1))
                    ahead, can_end = 0, True  # what may come after the current symbol within the option
                    for each in reversed(option):
                        known = follow[each]
                        follow[each] |= ahead | (follow[symbol] if can_end else 0)
                        changed |= known != follow[each]
                        ahead = first[each] | (ahead if each in nullable else 0)
                        can_end &= each in nullable
                    first[symbol] |= ahead
                    if can_end:
                        nullable.add(symbol)
                changed |= before != (first[symbol], symbol in nullable)
        return [follow[symbol] for symbol in lexemes], first[self.start]

    def too_greedy(self, automata: Automata, budget: Budget) -> set[Expression]:
        """Return the lexemes that could continue with a character that belongs to the next lexeme.

        Two lexemes are compared if both may begin at the same place: at the start of a text, after the same lexeme,
        or after two lexemes that match the same text.
        """
        nodes = list(self.lexemes.values())
        follows, start = self.followers(budget)
        starts = [automata.first(node) for node in nodes]
        members = functools.cache(lambda some: [i for i, bit in enumerate(reversed(f"{some:b}")) if bit == "1"])
        after: dict[int, int] = {}
        greedy: set[Expression] = set()
        seen: set[tuple[int, int]] = set()
        together, waiting = {(start, start)}, [(start, start)]
        while waiting:
            some, others = waiting.pop()
            budget.spend(some.bit_count() * others.bit_count() + len(nodes) // 50)
            for one, other in ((a, b) for a in members(some) for b in members(others)):
                if not starts[one] & starts[other] or (one, other) in seen:
                    continue
                seen.add((one, other))
                equal, beyond = automata.compare(nodes[one], nodes[other])
                if beyond and one not in after:
                    budget.spend(follows[one].bit_count())
                    after[one] = union(starts[i] for i in members(follows[one]))
                if beyond and beyond & after[one]:
                    greedy.add(nodes[other])
                if equal:
                    for pair in ((follows[one], follows[other]), (follows[other], follows[one])):
                        if pair not in together:
                            together.add(pair)
                            waiting.append(pair)
        return greedy


def union(sets: Iterable[int]) -> int:
    return functools.reduce(int.__or__, sets, 0)


@dataclass
class Automaton:
    """A nondeterministic automaton that accepts a lexeme's texts.

    It doesn't count repetitions, so it may accept more texts, which can only make the lexeme look greedier.
    It begins in state 0. From each state, one step consumes a character of ``chars`` and leads to ``then``; the steps
    of ``empty`` consume nothing.
    """

    chars: list[int] = field(default_factory=lambda: [0])
    then: list[int] = field(default_factory=lambda: [0])
    empty: list[list[int]] = field(default_factory=lambda: [[]])
    end: int = 0

    def state(self) -> int:
        self.chars.append(0)
        self.then.append(0)
        self.empty.append([])
        return len(self.chars) - 1


class Automata:
    """Builds the automata of lexemes and compares them; both results are cached.

    A set of characters is a bit set. All characters that no character class in ``nodes`` (all expressions of the
    grammar) distinguishes share one bit.
    """

    def __init__(self, rules: dict[str, Expression], nodes: Iterable[Expression], budget: Budget) -> None:
        self._rules, self._budget = rules, budget
        edges = {edge for node in nodes if isinstance(node, Chars) for a, b in node.ranges for edge in (a, b + 1)}
        self._bits = {edge: i for i, edge in enumerate(sorted(edges))}
        self._made: dict[Expression, Automaton] = {}
        self._chars: dict[Expression, int] = {}
        self._compared: dict[tuple[Expression, Expression], tuple[bool, int]] = {}

    def of(self, node: Expression) -> Automaton:
        if node not in self._made:
            self._made[node] = made = Automaton()
            made.end = self._build(made, node, 0)
        return self._made[node]

    def first(self, node: Expression) -> int:
        """Return the characters with which a lexeme's texts may begin."""
        made = self.of(node)
        found, waiting = {0}, [0]
        while waiting:
            new = [state for state in made.empty[waiting.pop()] if state not in found]
            found.update(new)
            waiting += new
        self._budget.spend(len(found))
        return union(made.chars[state] for state in found)

    def compare(self, one: Expression, other: Expression) -> tuple[bool, int]:
        """Return whether a text matches both, and the characters with which ``other`` can extend a text of ``one``."""
        if (one, other) not in self._compared:
            self._compared[one, other] = self._compare(self.of(one), self.of(other))
        return self._compared[one, other]

    def _compare(self, one: Automaton, other: Automaton) -> tuple[bool, int]:
        equal, beyond = False, 0
        seen, waiting = {(0, 0)}, [(0, 0)]
        while waiting:
            a, b = waiting.pop()
            if a == one.end:
                equal |= b == other.end
                beyond |= other.chars[b]
            after = [(c, b) for c in one.empty[a]] + [(a, d) for d in other.empty[b]]
            if one.chars[a] & other.chars[b]:
                after.append((one.then[a], other.then[b]))
            self._budget.spend(1 + len(after))
            after = [pair for pair in after if pair not in seen]
            seen.update(after)
            waiting += after
        return equal, beyond

    def _build(self, made: Automaton, node: Expression, start: int) -> int:
        """Add an expression that begins in the state ``start``; return the state in which it ends."""
        self._budget.spend(3)
        match node:
            case Chars():
                end = made.state()
                made.chars[start], made.then[start] = self._set(node), end
                return end
            case Seq(parts):
                for part in parts:
                    start = self._build(made, part, start)
                return start
            case Alt(options):
                end = made.state()
                for option in options:
                    begin = made.state()
                    made.empty[start].append(begin)
                    made.empty[self._build(made, option, begin)].append(end)
                return end
            case Repeat(part, least, most):
                begin = made.state()
                made.empty[start].append(begin)
                end, out = self._build(made, part, begin), made.state()
                made.empty[end].append(out)
                if most is None or most > 1:
                    made.empty[end].append(begin)
                if not least:
                    made.empty[begin].append(out)
                return out
            case Name(text):
                return self._build(made, self._rules[text], start)

    def _set(self, node: Chars) -> int:
        if node not in self._chars:
            self._budget.spend(len(node.ranges) * (1 + len(self._bits) // 500))
            bits = self._bits
            self._chars[node] = union((1 << bits[b + 1]) - (1 << bits[a]) for a, b in node.ranges)
        return self._chars[node]
