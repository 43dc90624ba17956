"""Find each layer's input in a language model, for any family and any names in its graph.

Layers are joined by residual connections, so all paths from the embedding to the logits pass through a layer's input
and its output, but go around the operations inside. In terms of graphs, these values dominate the logits.
A layer is recognised by its states: its keys and values in the cache, or recurrent states.
"""

from __future__ import annotations

import functools

import openvino as ov

from ovspec.base.errors import OvspecError
from ovspec.ir.compile import StateVariable

SHAPE_OPERATIONS = {"ShapeOf"}  # their results depend only on a value's shape


def find_embedding(model: ov.Model) -> ov.Node:
    """Return the Gather that looks up the embeddings of ``input_ids``; raises OvspecError if there is none."""
    values = [model.input("input_ids")]
    while values:
        for reader in values.pop().get_target_inputs():
            node = reader.get_node()
            if node.get_type_name() == "Gather" and reader.get_index() == 1:
                return node
            if node.get_type_name() in ("Convert", "Reshape", "Unsqueeze"):
                values.append(node.output(0))
    raise OvspecError("its embedding can't be found in the graph")


def find_layer_inputs(model: ov.Model, states: list[StateVariable]) -> list[ov.Output]:
    """Return the input of each layer, in order; fewer than the layers if some have no states.

    Args:
        model: as exported, with its keys, values and recurrent states as variables.
        states: its states.

    Raises:
        OvspecError: the graph has no embedding, or no such values.
    """
    ordered_nodes = model.get_ordered_ops()
    node_indices = {node.get_name(): index for index, node in enumerate(ordered_nodes)}
    dominators = find_dominators(ordered_nodes, node_indices, find_embedding(model))
    logits_dominators = set(list_dominators(dominators, node_indices[model.output("logits").get_node().get_name()]))
    state_names = {state.name for state in states}
    layer_input_indices = set[int]()
    for node in ordered_nodes:
        if node.get_type_name() == "Assign" and node.get_variable_id() in state_names:
            layer_dominators = list_dominators(dominators, node_indices[node.get_name()])
            nearest_dominator = next((index for index in layer_dominators if index in logits_dominators), None)
            if nearest_dominator is not None:
                layer_input_indices.add(nearest_dominator)
    if not layer_input_indices:
        raise OvspecError("its layers can't be found in the graph")
    return [ordered_nodes[index].output(0) for index in sorted(layer_input_indices)]


def find_dominators(ordered_nodes: list[ov.Node], node_indices: dict[str, int], start_node: ov.Node) -> dict[int, int]:
    """Return the immediate dominator of each node reachable from ``start_node``, by index in ``ordered_nodes``."""
    start_index = node_indices[start_node.get_name()]
    dominators = {start_index: start_index}
    for index in range(start_index + 1, len(ordered_nodes)):
        if ordered_nodes[index].get_type_name() in SHAPE_OPERATIONS:
            continue
        sources = {node_indices[value.get_node().get_name()] for value in ordered_nodes[index].input_values()}
        if reached_sources := sources & dominators.keys():
            dominators[index] = functools.reduce(functools.partial(find_common_dominator, dominators), reached_sources)
    return dominators


def find_common_dominator(dominators: dict[int, int], a: int, b: int) -> int:
    """Return the last common dominator of two nodes."""
    while a != b:
        a, b = dominators[max(a, b)], min(a, b)
    return a


def list_dominators(dominators: dict[int, int], index: int) -> list[int]:
    """Return the node at ``index`` and all its dominators, the nearest first; nothing if the node is unreachable."""
    if index not in dominators:
        return []
    nodes = [index]
    while dominators[nodes[-1]] != nodes[-1]:
        nodes.append(dominators[nodes[-1]])
    return nodes
