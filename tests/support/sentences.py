"""Joins the parts of messages in Python code, such as ``f"{file}: {problem}."`` and the problems, to whole sentences.

A part is followed through variables, parameters, attributes, constants, the results of functions, and caught errors.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

MAX_DEPTH = 12  # steps from a placeholder to a string
MAX_CALLS = 3  # from a try block to a raised error
MAX_FORMS = 60  # forms of one message
MAX_DEFINITIONS = 3  # of a function's name; with more, a call could mean any of them
# Their names say nothing about an error, so its text comes from the functions called in the try block.
COMMON_ERRORS = {"OvspecError", "ValueError", "KeyError", "TypeError", "LookupError"}
EMPTY_OWNERS = {"self", "options", "params", "args", "str", "math", "error", "request", "entry", "reply"}
EMPTY_ATTRIBUTES = {"name", "value", "items", "keys", "values"}
STRING_METHODS = {"format", "lower", "strip", "rstrip", "split", "splitlines", "removeprefix", "removesuffix"}
# Words for attributes of Python's own errors and matches, and for methods.
READABLE = {"strerror": "reason", "msg": "problem", "colno": "column", "lineno": "line", "peek": "next character"}
VERBS = {"describe", "format", "quote", "shorten", "make", "get", "find", "shown", "type"}

HAS_OWN_WORDS = re.compile(r"[A-Za-z]+\S* |\S* [A-Za-z]+")
PLACEHOLDER = re.compile(r"\{[\w ]*\}")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Form:
    """One text of a message, and the nodes of the strings in it."""

    text: str
    nodes: frozenset[ast.AST] = frozenset()


@dataclass
class Code:
    """The syntax trees of a program, with indexes."""

    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    modules: dict[ast.AST, ast.Module] = field(default_factory=dict)
    functions: dict[str, list[Function]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[str, list[ast.Call]] = field(default_factory=lambda: defaultdict(list))
    constants: dict[str, list[ast.expr]] = field(default_factory=lambda: defaultdict(list))
    attributes: dict[tuple[ast.AST, str], list[ast.expr]] = field(default_factory=lambda: defaultdict(list))
    variables: dict[tuple[ast.AST, str], list[ast.expr]] = field(default_factory=lambda: defaultdict(list))
    class_fields: dict[str, list[str]] = field(default_factory=dict)
    forms: dict[ast.AST, list[Form]] = field(default_factory=dict)


def called_name(node: ast.AST) -> str:
    """Return the name of what a call calls, without the module; "" for other nodes."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", "") or getattr(function, "id", "")


def index_code(trees: Iterable[ast.Module]) -> Code:
    code = Code()
    for tree in trees:
        index_module(tree, tree, (), code)
    return code


def index_module(node: ast.AST, tree: ast.Module, functions: tuple[Function, ...], code: Code) -> None:
    """Add a part of a module to the indexes; ``functions`` are around it."""
    code.modules[node] = tree
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            code.functions[node.name].append(node)
            functions = (*functions, node)
        case ast.ClassDef():
            lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
            code.class_fields[node.name] = [getattr(line.target, "id", "") for line in lines]
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value]):
            for function in functions:
                code.variables[function, name].append(value)
        case ast.Call(func=ast.Name(id="partial"), args=[ast.Name(id=name) as function, *arguments]):
            code.calls[name].append(ast.Call(function, arguments, node.keywords))
        case ast.Call():
            code.calls[called_name(node)].append(node)
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=attribute)], value=value):
            code.attributes[tree, attribute].append(value)
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.NamedExpr(target=ast.Name(id=name), value=value)
        ):
            index_variable(name, value, functions, code)
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            index_variable(name, value, functions, code)
        case ast.For(target=ast.Tuple(elts=[*_, ast.Name(id=name)]), iter=table):  # of (pattern, message)
            table = table.func.value if isinstance(table, ast.Call) and isinstance(table.func, ast.Attribute) else table
            for function in functions:
                code.variables[function, name].append(table)
        case _:
            pass
    for child in ast.iter_child_nodes(node):
        code.parents[child] = node
        index_module(child, tree, functions, code)


def index_variable(name: str, value: ast.expr, functions: tuple[Function, ...], code: Code) -> None:
    if not functions:
        code.constants[name].append(value)
    for function in functions:
        code.variables[function, name].append(value)


def enclosing(node: ast.AST, kind: type | tuple[type, ...], code: Code) -> Iterator[ast.AST]:
    """Yield the nodes of a kind around a node, the innermost first."""
    while node := code.parents.get(node):  # type: ignore[assignment]
        if isinstance(node, kind):
            yield node


def join(parts: Iterable[list[Form]]) -> list[Form]:
    """Return as many texts as the part with the most forms has; a part with fewer forms repeats its first."""
    lists = [part or [Form("")] for part in parts]
    count = min(max(map(len, lists), default=0), MAX_FORMS)
    chosen = [[part[index if index < len(part) else 0] for part in lists] for index in range(count)]
    return [
        Form("".join(form.text for form in forms), frozenset().union(*(form.nodes for form in forms)))
        for forms in chosen
    ]


def expand(node: ast.AST | None, code: Code, path: tuple[ast.AST, ...] = ()) -> list[Form]:
    """Return the texts that an expression can have, with names in braces in place of values; [] if none is known.

    path: the nodes that led here.
    """
    if node is None or node in path or len(path) > MAX_DEPTH:
        return []
    if node not in code.forms:
        code.forms[node] = list(dict.fromkeys(expand_anew(node, code, (*path, node))))
    return code.forms[node]


def expand_anew(node: ast.AST, code: Code, path: tuple[ast.AST, ...]) -> list[Form]:
    follow = functools.partial(expand, code=code, path=path)
    match node:
        case ast.Constant(value=str(text)):
            return [Form(text, frozenset([node]) if node in code.modules else frozenset())]
        case ast.JoinedStr(values=values):
            return [Form(form.text, form.nodes | {node}) for form in join(follow(value) for value in values)]
        case ast.FormattedValue(value=value):
            forms = follow(value)
            return [form for form in forms if form.text] or forms[:1] or [Form(placeholder(value, code))]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            sides = [(side, follow(side)) for side in (left, right)]
            known = any(forms for _, forms in sides)
            return join(forms or [Form(placeholder(side, code))] for side, forms in sides) if known else []
        case ast.BinOp(op=ast.Mult(), left=left):
            return follow(left)
        case ast.IfExp(body=body, orelse=orelse):
            return forms_of_sources(node, (body, orelse), code, path)
        case ast.Tuple(elts=[ast.Tuple(), *_] as rows):
            return [form for row in rows if isinstance(row, ast.Tuple) for form in follow(row.elts[-1])]
        case ast.BoolOp(values=values):
            return forms_of_sources(node, values, code, path)[::-1]
        case ast.Dict(values=values):
            return [form for value in values for form in follow(value)]
        case ast.Subscript(value=value) | ast.NamedExpr(value=value):
            return follow(value)
        case ast.Name(id=name):
            return forms_of_sources(node, sources_of_name(name, node, code), code, path)
        case ast.Attribute(attr="name"):
            return []
        case ast.Attribute():
            return phrases(form for source in sources_of_attribute(node, code) for form in follow(source))
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr="sub"), args=[pattern, replacement, text]):
            return [Form(substitute(pattern, replacement, form.text), form.nodes) for form in follow(text)]
        case ast.Call(func=ast.Attribute(value=value, attr="removeprefix"), args=[ast.Constant(value=str(prefix))]):
            return [Form(form.text.removeprefix(prefix), frozenset([node])) for form in follow(value)]
        case ast.Call(func=ast.Attribute(attr="expand"), args=[template]):  # of a match
            return [
                Form(re.sub(r"\\\d", "{detail}", form.text).replace("\\\\", "\\"), form.nodes)
                for form in follow(template)
            ]
        case ast.Call():
            return phrases(forms_of_sources(node, sources_of_call(node, code), code, path))
        case _:
            return []


def forms_of_sources(node: ast.AST, sources: Iterable[ast.AST], code: Code, path: tuple[ast.AST, ...]) -> list[Form]:
    """Return the texts of the values that an expression can have; its placeholder stands for unknown ones."""
    unknown = Form(placeholder(node, code))
    found: list[Form] = []
    has_unknown = False
    for source in sources:
        if (isinstance(source, ast.Constant) and source.value is None) or is_empty_list(source):
            continue
        forms = [form for form in expand(source, code, path) if form.nodes]
        has_unknown |= not forms
        found += forms
    return [unknown, *known] if has_unknown and (known := phrases(found)) else [] if has_unknown else found


def is_empty_list(node: ast.AST) -> bool:
    match node:
        case ast.List(elts=[]) | ast.Call(func=ast.Subscript(value=ast.Name(id="list")), args=[]):
            return True
        case _:
            return False


def phrases(forms: Iterable[Form]) -> list[Form]:
    """Return the forms with several words: others are values, such as the name of an option."""
    return [form for form in forms if not form.nodes or len(re.findall(r"\w{2,}", PLACEHOLDER.sub("", form.text))) > 1]


def substitute(pattern: ast.expr, replacement: ast.expr, text: str) -> str:
    match pattern, replacement:
        case ast.Constant(value=str(old)), ast.Constant(value=str(new)):
            return re.sub(old, new, text)
        case _:
            return text


def sources_of_name(name: str, node: ast.AST, code: Code) -> Iterator[ast.AST]:
    """Yield the expressions whose values a variable can have."""
    for handler in enclosing(node, ast.ExceptHandler, code):
        assert isinstance(handler, ast.ExceptHandler)
        if handler.name == name:
            yield from messages_caught(handler, ends_message(node, code), code)
            return
    for function in enclosing(node, (ast.FunctionDef, ast.AsyncFunctionDef), code):
        assert isinstance(function, Function)
        values = [value for value in code.variables[function, name] if not mentions(value, name)]
        parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        if name in parameters or name in [argument.arg for argument in function.args.kwonlyargs]:
            passed = list(arguments_passed(function, name, parameters, code))
            passed_phrases = [value for value in passed if phrases(expand(value, code, (node,)))]
            if len(passed_phrases) < len(passed):
                yield ast.Constant(placeholder(node, code))
            yield from passed_phrases
            return
        if values:
            yield from values
            return
    if name.isupper():
        own = [value for value in code.constants[name] if code.modules[value] is code.modules[node]]
        yield from own or code.constants[name]


def arguments_passed(function: Function, name: str, parameters: list[str], code: Code) -> Iterator[ast.AST]:
    """Yield what callers pass as a parameter."""
    owner = code.parents.get(function)
    called = owner.name if isinstance(owner, ast.ClassDef) and function.name == "__init__" else function.name
    if len(code.functions[called]) > 1:
        return
    if parameters[:1] in (["self"], ["cls"]):
        parameters = parameters[1:]
    for call in code.calls[called]:
        if name in parameters and parameters.index(name) < len(call.args):
            yield call.args[parameters.index(name)]
        yield from (keyword.value for keyword in call.keywords if keyword.arg == name)


def mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def ends_message(node: ast.AST, code: Code) -> bool:
    """Return whether a value is the end of an f-string."""
    for parent in enclosing(node, ast.FormattedValue, code):
        frame = code.parents[parent]
        return isinstance(frame, ast.JoinedStr) and frame.values[-1] is parent
    return False


def messages_caught(handler: ast.ExceptHandler, with_sentences: bool, code: Code) -> Iterator[ast.AST]:
    """Yield the messages of the errors that a handler can catch; not whole sentences unless wanted."""
    kinds = {kind.id for kind in ast.walk(handler.type) if isinstance(kind, ast.Name)} if handler.type else set[str]()
    for kind in kinds - COMMON_ERRORS:
        if kind in code.class_fields:
            yield from (call.args[0] for call in code.calls[kind] if call.args)
    statement = code.parents[handler]
    if kinds & COMMON_ERRORS and isinstance(statement, ast.Try):
        for message in messages_raised(statement.body, kinds, code):
            if with_sentences or not any(form.text.rstrip().endswith((".", "?")) for form in expand(message, code)):
                yield message


def messages_raised(
    body: Iterable[ast.AST], kinds: set[str], code: Code, functions_seen: frozenset[ast.AST] = frozenset()
) -> Iterator[ast.AST]:
    """Yield the messages of errors of some kinds raised in a block, and in the functions called there."""
    for node in itertools.chain(*map(ast.walk, body)):
        if isinstance(node, ast.Raise) and called_name(node.exc or node) in kinds:
            assert isinstance(node.exc, ast.Call)
            yield from node.exc.args[:1]
        elif isinstance(node, ast.Call):
            definitions = code.functions[called_name(node)]
            for function in definitions if len(definitions) == 1 else ():
                if function not in functions_seen and len(functions_seen) < MAX_CALLS:
                    yield from messages_raised(function.body, kinds, code, functions_seen | {function})


def sources_of_attribute(node: ast.Attribute, code: Code) -> Iterator[ast.AST]:
    """Yield the values given to an attribute: of ``self`` in this file, or of the only class with such a field."""
    if isinstance(node.value, ast.Name) and node.value.id == "self":
        yield from code.attributes[code.modules[node], node.attr]
    elif node.attr.isupper():  # of a module
        yield from code.constants[node.attr]
    fitting = {name: fields for name, fields in code.class_fields.items() if node.attr in fields}
    owner_class = name_value(node.value).replace(" ", "")
    for name, fields in fitting.items():
        if len(fitting) > 1 and name.lower() != owner_class:
            continue
        for call in code.calls[name]:
            if any(isinstance(argument, ast.Constant) and argument.value is True for argument in call.args[:1]):
                continue  # of a success
            yield from call.args[fields.index(node.attr) :][:1]
            yield from (keyword.value for keyword in call.keywords if keyword.arg == node.attr)


def sources_of_call(node: ast.Call, code: Code) -> Iterator[ast.AST]:
    """Yield the expressions from which a call makes a text."""
    name = called_name(node)
    match node.func:
        case ast.Name(id="str" | "quote_shortened"):
            yield from node.args[:1]
        case ast.Attribute(value=value, attr="get"):
            yield from (value, *node.args[1:])
        case ast.Attribute(attr="join"):
            yield from (argument for argument in node.args if isinstance(argument, ast.Call))
        case ast.Attribute(value=value, attr=method) if method in STRING_METHODS:
            yield value
        case _:
            definitions = code.functions[name]
            for function in definitions if len(definitions) <= MAX_DEFINITIONS else ():
                inner = [part for statement in function.body for part in ast.walk(statement)]
                returned = [part.value for part in inner if isinstance(part, ast.Return | ast.Yield) and part.value]
                yield from returned


def placeholder(node: ast.AST, code: Code) -> str:
    """Return what stands for a value: a list's or a number's own text if it is a constant, else words in braces."""
    match node:
        case ast.Call(func=ast.Attribute(attr="join"), args=[names]):
            words = constant_value(names, code)
            if isinstance(words, list | tuple | dict) and all(isinstance(word, str) for word in words):
                return ", ".join(words)
        case _:
            if isinstance(value := constant_value(node, code), str | int | float):
                return str(value)
    return "{" + (name_value(node) or ast.unparse(node)) + "}"


def constant_value(node: ast.AST, code: Code) -> object:
    """Return the value of a constant, or of a part of a constant; None for other expressions."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name.isupper() and len(code.constants[name]) == 1:
            return constant_value(code.constants[name][0], code)
        case ast.Dict(keys=keys):
            return [constant_value(key, code) for key in keys if key]
        case ast.Call(func=ast.Name(id="tuple" | "frozenset"), args=[value]):
            return constant_value(value, code)
        case ast.Subscript(value=value, slice=index):
            values = constant_value(value, code)
            try:
                return eval(f"values[{ast.unparse(index)}]", {"values": values}) if values else None
            except (NameError, TypeError, LookupError):
                return None
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            parts = [
                constant_value(element.value, code)
                if isinstance(element, ast.Starred)
                else [constant_value(element, code)]
                for element in elements
            ]
            return list(itertools.chain(*parts)) if all(isinstance(part, list) for part in parts) else None  # type: ignore
        case ast.Constant(value=value):
            return value
        case _:
            return None


def name_value(node: ast.AST) -> str:
    """Return an expression as words for a reader without the code, as in "number of tools"."""
    match node:
        case ast.Name(id=name):
            return name.strip("_").replace("_", " ").lower()
        case ast.Attribute(value=value, attr="__name__"):
            return name_value(value)
        case ast.Attribute(value=value, attr=attribute):
            if attribute in READABLE:
                return READABLE[attribute]
            owner = name_value(value)
            attribute = attribute.strip("_").replace("_", " ")
            if attribute in EMPTY_ATTRIBUTES and owner not in EMPTY_OWNERS:
                return owner
            return attribute if owner in EMPTY_OWNERS or attribute.startswith(owner) else f"{owner} {attribute}"
        case ast.Subscript(value=value, slice=ast.Constant(value=str(key))):
            owner = name_value(value)
            return key.replace("_", " ") if owner in EMPTY_OWNERS else f"{owner} {key.replace('_', ' ')}"
        case ast.Subscript(value=value) | ast.Starred(value=value) | ast.Await(value=value):
            return name_value(value)
        case ast.Call(func=ast.Name(id="len"), args=[value]):
            return f"{'number' if name_value(value).endswith('s') else 'length'} of {name_value(value)}"
        case ast.Call(func=ast.Name(id="type"), args=[value]):
            return "class" if name_value(value) == "self" else f"type of {name_value(value)}"
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(key)), *_]):
            return key.replace("_", " ")
        case ast.Call(func=ast.Attribute(attr="join"), args=[value]):
            return name_value(value)
        case ast.Call(func=ast.Attribute(value=value, attr=method)) if method in (*STRING_METHODS, "replace", "group"):
            return name_value(value)
        case ast.Call(func=function, args=arguments):
            names = [name for argument in arguments if (name := name_value(argument))]
            if called_name(node) in READABLE:
                return READABLE[called_name(node)]
            verb, _, noun = (called_name(node) or "").strip("_").partition("_")
            if verb == "describe":
                return noun.replace("_", " ")
            return (
                names[-1]
                if names
                else (noun if verb in VERBS else f"{verb} {noun}".strip()).replace("_", " ") or name_value(function)
            )
        case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
            return name_value(element)
        case ast.BinOp(left=left, right=right):
            return name_value(left) or name_value(right)
        case ast.BoolOp(values=values):
            return next(filter(None, map(name_value, values)), "")
        case ast.IfExp(body=body, orelse=orelse):
            return name_value(body) or name_value(orelse)
        case _:
            return ""


def sentences(
    roots: Mapping[str, list[ast.expr]], code: Code, is_message: Callable[[str], bool]
) -> dict[str, list[str]]:
    """Return the whole sentences made from each file's messages and parts of messages.

    A part used in a sentence isn't listed alone, and a sentence only in as many forms as show parts not yet shown.
    """
    forms = {root: expand(root, code) for file_roots in roots.values() for root in file_roots}
    all_roots = set(forms)
    parts = {root: [form.nodes & all_roots for form in forms[root]] for root in forms}
    used = {part for root in forms for nodes in parts[root] for part in nodes - {root}}
    shown = set[ast.AST]()
    found: dict[str, list[str]] = {}
    for file, file_roots in roots.items():
        texts: list[str] = []
        for root in file_roots:
            if root in used:
                continue
            new = []
            for form, nodes in zip(forms[root], parts[root], strict=True):
                if nodes - shown - {root}:
                    new.append(form)
                    shown |= nodes
            texts += [" ".join(form.text.split()).replace("?.", "?") for form in new or forms[root][:1]]
        if texts := [
            text
            for text in dict.fromkeys(texts)
            if is_message(text) and HAS_OWN_WORDS.search(PLACEHOLDER.sub("", text))
        ]:
            found[file] = texts
    return found
