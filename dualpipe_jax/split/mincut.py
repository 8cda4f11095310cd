"""The minimum cut between two nodes of a graph."""

from collections import deque
from collections.abc import Hashable

UNCUTTABLE = 1 << 62


class FlowGraph:
    """A directed graph with capacities.

    >>> graph = FlowGraph()
    >>> graph.connect("s", "a", 3)
    >>> graph.connect("a", "t", 2)
    >>> sorted(graph.source_side("s", "t"))
    ['a', 's']
    """

    def __init__(self) -> None:
        self._capacity: dict[Hashable, dict[Hashable, int]] = {}

    def connect(self, tail: Hashable, head: Hashable, capacity: int = UNCUTTABLE) -> None:
        """Add capacity from tail to head."""
        out = self._capacity.setdefault(tail, {})
        out[head] = min(UNCUTTABLE, out.get(head, 0) + capacity)
        self._capacity.setdefault(head, {}).setdefault(tail, 0)

    def source_side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """Return the source's side of the minimum cut; of several minimum cuts, the one nearest the source.

        Raises:
          ValueError: if every cut contains an edge that cannot be cut.
        """
        self._capacity.setdefault(source, {})
        self._capacity.setdefault(sink, {})
        while True:
            parents = self._search(source, sink)
            if sink not in parents:
                return set(parents)
            path = [sink]
            while path[-1] != source:
                path.append(parents[path[-1]])
            edges = list(zip(path[1:], path[:-1], strict=True))
            flow = min(self._capacity[tail][head] for tail, head in edges)
            if flow >= UNCUTTABLE:
                raise ValueError("No cut: source and sink are joined by edges that cannot be cut.")
            for tail, head in edges:
                self._push(tail, head, flow)

    def _push(self, tail: Hashable, head: Hashable, flow: int) -> None:
        if self._capacity[tail][head] < UNCUTTABLE:
            self._capacity[tail][head] -= flow
        if self._capacity[head][tail] < UNCUTTABLE:
            self._capacity[head][tail] += flow

    def _search(self, source: Hashable, sink: Hashable) -> dict[Hashable, Hashable]:
        """Return the parents on shortest paths from the source (Edmonds-Karp), up to where the sink is found."""
        parents: dict[Hashable, Hashable] = {source: source}
        queue = deque([source])
        while queue and sink not in parents:
            node = queue.popleft()
            for head, capacity in self._capacity[node].items():
                if capacity > 0 and head not in parents:
                    parents[head] = node
                    queue.append(head)
        return parents
