"""Subgraphs of one operator after the other, made of plain functions."""

import operator

import torch
from torch import fx

from harness.runtime.profiling.subgraph import Step, Subgraph


def steps_in_line(functions, parameters=None):
    """Steps op0, op1, ... each of which reads the one before; the first reads the node returned."""
    graph = fx.Graph()
    first = node = graph.placeholder("x")
    steps = []
    for k, function in enumerate(functions):
        before, node = node, graph.call_function(operator.neg, (node,))
        steps.append(
            Step(
                node=node,
                name=f"op{k}",
                function=function,
                args=(before,),
                kwargs={},
                parameters=parameters[k] if parameters else (),
                tensors=parameters[k] if parameters else (),
                is_carrying=True,
                is_in_place=False,
            )
        )
    return first, steps


def line(functions, x=None, parameters=None):
    """A subgraph whose last output is read later."""
    first, steps = steps_in_line(functions, parameters)
    x = torch.ones(2, 2, requires_grad=True) if x is None else x
    return Subgraph(steps, {first: x}, {steps[-1].node})
