"""The interface by which the CUDA runner learns whether weights move, before it pads, captures or replays a step."""

from __future__ import annotations


class GraphAware:
    """The base class: weights that never move. Weights that do move override its methods."""

    @property
    def max_unpadded_rows(self) -> int:
        """Return the number of rows up to which steps must not be padded: padding rows would request experts too."""
        return 0

    def graph_version(self, rows: int) -> int | None:
        """Return the version of the weights' addresses for which a CUDA graph of `rows` rows is valid, to be called
        after begin_step; 0 if they never change, None if a step of that size cannot be captured."""
        return 0

    def begin_step(self, rows: int) -> None:
        """Prepare a step of `rows` rows, padding included, that is about to be launched."""

    def end_step(self, rows: int) -> None:
        """Process the completion of a step of `rows` rows, whose results have arrived; raise if it failed."""


class StreamedLayers(GraphAware):
    """Layers that pass through a ring driven by the host: no step can be captured, however the experts are held."""

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
