"""What the CUDA runner asks of weights before it pads, captures or replays a step: whether they move, and when."""

from __future__ import annotations


class GraphAware:
    """Weights that never move, and what others override."""

    @property
    def max_unpadded_rows(self) -> int:
        """Return the rows of the largest step that may not be padded: padding would ask for experts too."""
        return 0

    def graph_version(self, rows: int) -> int | None:
        """Return the version of the weights' addresses under which a CUDA graph of `rows` rows is good, once the step
        has begun; None if a step of that size cannot be captured."""
        return 0

    def begin_step(self, rows: int) -> None:
        """Prepare a step of `rows` rows, padding included, that is about to be launched."""

    def end_step(self, rows: int) -> None:
        """Check a step of `rows` rows whose results have come."""


class PassingLayers(GraphAware):
    """Layers that pass through a ring, driven by the host: no step can be captured, whatever the experts do."""

    def __init__(self, experts: GraphAware) -> None:
        self._experts = experts

    @property
    def max_unpadded_rows(self) -> int:
        return self._experts.max_unpadded_rows

    def graph_version(self, rows: int) -> int | None:
        return None

    def begin_step(self, rows: int) -> None:
        self._experts.begin_step(rows)

    def end_step(self, rows: int) -> None:
        self._experts.end_step(rows)
