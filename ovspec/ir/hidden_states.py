"""Find the hidden states that each layer of a language model reads, whatever its family and the names in its graph.

Layers are joined by residual connections, so all paths from the embedding to the logits pass through what a layer reads
and what it leaves to the next one, but go around what is inside. In terms of graphs, these values dominate the logits.
A layer is known by the keys and values that it appends to the cache.
"""

from __future__ import annotations

import functools

import openvino as ov

from ovspec.base.errors import OvspecError
from ovspec.ir.compile import ModelState

SHAPE_OPERATIONS = {"ShapeOf"}  # what follows of a value's shape doesn't follow of the value


def find_embedding(model: ov.Model) -> ov.Node:
    """Return the Gather that looks up the embeddings of ``input_ids``; raises OvspecError if there is none."""
    values = [model.input("input_ids")]
    while values:
        for use in values.pop().get_target_inputs():
            node = use.get_node()
            if node.get_type_name() == "Gather" and use.get_index() == 1:
                return node
            if node.get_type_name() in ("Convert", "Reshape", "Unsqueeze"):
                values.append(node.output(0))
    raise OvspecError("its embedding can't be found in the graph")


def find_layer_inputs(model: ov.Model, states: list[ModelState]) -> list[ov.Output]:
    """Return the hidden states that each layer reads, in order; fewer than there are layers if some have no keys.

    Args:
        model: as exported, with its keys and values as states.
        states: its states.

    Raises:
        OvspecError: the graph has no embedding, or no such values.
    """
    ordered = model.get_ordered_ops()
    place = {node.get_name(): index for index, node in enumerate(ordered)}
    above = find_dominators(ordered, place, find_embedding(model))
    found: dict[int, ov.Output] = {}
    logits = set(list_dominators(above, place[model.output("logits").get_node().get_name()]))
    names = {state.name for state in states if state.sequence_axis is not None}
    for node in ordered:
        if node.get_type_name() == "Assign" and node.get_variable_id() in names:
            at = place[node.get_name()]
            read = next((index for index in list_dominators(above, at) if index in logits), None)
            if read is not None:
                found[read] = ordered[read].output(0)
    if not found:
        raise OvspecError("its layers can't be found in the graph")
    return [found[index] for index in sorted(found)]


def find_dominators(ordered: list[ov.Node], place: dict[str, int], start: ov.Node) -> dict[int, int]:
    """Return the immediate dominator of each node that values of ``start`` reach, by their places in ``ordered``."""
    begin = place[start.get_name()]
    above = {begin: begin}
    for index in range(begin + 1, len(ordered)):
        if ordered[index].get_type_name() in SHAPE_OPERATIONS:
            continue
        sources = {place[value.get_node().get_name()] for value in ordered[index].input_values()}
        if reached := sources & above.keys():
            above[index] = functools.reduce(functools.partial(find_common_dominator, above), reached)
    return above


def find_common_dominator(above: dict[int, int], a: int, b: int) -> int:
    """Return the last node that dominates both."""
    while a != b:
        a, b = above[max(a, b)], min(a, b)
    return a


def list_dominators(above: dict[int, int], index: int) -> list[int]:
    """Return the node at ``index`` and all that dominate it, the nearest first; nothing if no value reaches it."""
    nodes = [index] if index in above else []
    while nodes and above[nodes[-1]] != nodes[-1]:
        nodes.append(above[nodes[-1]])
    return nodes
