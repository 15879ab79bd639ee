"""A user's policy, selected on the command line as support.policy_of_my_own:Backwards."""

from collections.abc import Sequence


class Backwards:
    """A policy that keeps experts with high numbers and always prefetches the last one."""

    def on_load(self, layers: int, experts: int, quota: int) -> None:
        self.experts = experts

    def on_phase(self, phase: str) -> None:
        assert phase in ("prefill", "decode")

    def on_route(self, step: int, layer: int, experts: Sequence[int]) -> None:
        assert experts

    def worth(self, layer: int) -> Sequence[float]:
        return [float(expert) for expert in range(self.experts)]

    def prefetch(self, layer: int) -> Sequence[int]:
        return (self.experts - 1,)
