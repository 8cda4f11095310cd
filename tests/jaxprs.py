"""Reading jaxprs: every equation, and in which others it stands; the bytes of their arrays. And a split's programs."""

import math
import types
from collections import Counter

from dualpipe_jax.split.graph import Equation, Scan, bodies


def equations(jaxpr, around=()):
    """(names of the primitives around it, equation) of all equations, those of inner jaxprs too."""
    for eqn in jaxpr.eqns:
        yield around, eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner, (*around, eqn.primitive.name))


def named(jaxpr, name):
    """All equations of a primitive, but none inside another one of it."""
    return [eqn for around, eqn in equations(jaxpr) if eqn.primitive.name == name and name not in around]


def total_bytes(types):
    """Of a list of arrays."""
    return sum(math.prod(kind.shape) * kind.dtype.itemsize for kind in types)


def applied(plan, part):
    """How often each primitive is applied in a part of a split, in every iteration and every branch."""
    return _count(getattr(plan.programs, part).equations)


def _count(nodes):
    total = Counter()
    for node in nodes:
        if isinstance(node, Equation):
            total.update(eqn.primitive.name for _, eqn in equations(types.SimpleNamespace(eqns=[node])))
        for body in bodies(node):
            for name, count in _count(body).items():
                total[name] += count * (node.length if isinstance(node, Scan) else 1)
    return total
