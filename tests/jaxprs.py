"""Reading jaxprs: every equation, and in which others it stands."""


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
