"""The table for plans without the hardware: cards, the links between them, and their hosts.

Every entry names its source. `measured` rates were measured by this project; all others are published, or computed
from published ones, as the source says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from spillover.errors import SpilloverError, did_you_mean
from spillover.plan.hardware import CudaDevice, Machine
from spillover.plan.rates import Rates

MIB = 1 << 20
# Shares of its data sheet that an H200 reached when measured: 4.3 of 4.8 TB/s by copies, 780 of 989 TFLOP/s by a
# bfloat16 product of 8192 x 8192 matrices, 55 of 64 GB/s from pinned host memory. They scale other cards' data sheets.
MEMORY_SHARE, MATRIX_SHARE, LINK_SHARE = 4.3 / 4.8, 780 / 989, 55 / 64
KERNEL_SHARE = 51 / 55  # of the link's rate, when a kernel reads host memory; measured on an H200 too
SHARES_SOURCE = ("peak rates of the data sheet times what an H200 was measured to reach of its own: "
                 f"{MEMORY_SHARE:.0%} of the memory's, {MATRIX_SHARE:.0%} of matrix products', {LINK_SHARE:.0%} of the "
                 "link's to the host")
UNBOUNDED = 1 << 50  # bytes of host memory of a machine that is not this one, if no amount was given


@dataclass(frozen=True)
class Host:
    """The host memory that the cards of a machine stream weights from."""

    name: str
    socket_bandwidth: float  # bytes per second
    socket_cards: int  # number of cards that share a socket's memory
    core_read: float  # bytes per second that its cores read, for example to compute experts
    source: str

    def bandwidth(self, cards: int) -> float:
        """Return the bytes per second that all cards together can read, each from the memory of its socket."""
        return self.socket_bandwidth * math.ceil(cards / self.socket_cards)


@dataclass(frozen=True)
class Link:
    """A connection between cards: the time of an all-reduce by its bytes and the number of ranks.

    One-shot reads all peers' tensors at once; a ring takes two rounds. The faster of them is used.
    """

    name: str
    ring_seconds: float  # fixed time of a ring all-reduce, without its hops
    hop_seconds: float  # time of each of its 2 (n - 1) hops
    ring_bandwidth: float  # bytes per second, defined like the bus bandwidth of nccl-tests
    source: str
    shot_seconds: float | None = None  # fixed time of one-shot; None: cards cannot read each other's memory
    shot_bandwidth: float = 1.0  # bytes per second that a rank reads from all peers together

    def all_reduce(self, nbytes: float, ranks: int) -> float:
        """Return the seconds of an all-reduce."""
        if ranks == 1:
            return 0.0
        ring = self.ring_seconds + 2 * (ranks - 1) * self.hop_seconds
        ring += 2 * (ranks - 1) / ranks * nbytes / self.ring_bandwidth
        if self.shot_seconds is None:
            return ring
        return min(ring, self.shot_seconds + (ranks - 1) * nbytes / self.shot_bandwidth)

    def gather(self, nbytes: float, ranks: int) -> float:
        """Return the seconds until one rank has the parts of all ranks, `nbytes` in total."""
        if ranks == 1:
            return 0.0
        moved = (ranks - 1) / ranks * nbytes
        ring = self.ring_seconds + (ranks - 1) * self.hop_seconds + moved / self.ring_bandwidth
        return ring if self.shot_seconds is None else min(ring, self.shot_seconds + moved / self.shot_bandwidth)


@dataclass(frozen=True)
class Card:
    name: str
    title: str  # name that the driver reports
    memory: int  # bytes, as nvidia-smi reports them
    memory_peak: float  # bytes per second
    bfloat16_peak: float  # FLOP/s of dense products
    float32_peak: float
    link_peak: float  # bytes per second from host memory, in one direction
    capability: tuple[int, int]
    links: tuple[str, ...]  # possible links to other cards, the fastest first
    host: str
    source: str
    measured: Rates | None = None

    @property
    def rates(self) -> Rates:
        """Return the rates for plans: measured ones, or the data sheet's scaled by the shares that an H200 reaches."""
        cores = HOSTS[self.host].core_read
        if self.measured is not None:
            return replace(self.measured, host_read=cores)
        link = self.link_peak * LINK_SHARE
        return Rates("cuda", memory_read=self.memory_peak * MEMORY_SHARE, float32=self.float32_peak * MATRIX_SHARE,
                     bfloat16=self.bfloat16_peak * MATRIX_SHARE, host_to_device=link, device_to_host=link,
                     kernel_read=link * KERNEL_SHARE, host_read=cores)

    def machine(self) -> Machine:
        """Return a machine with this card and a host with enough memory, of which nothing else is known."""
        return Machine(
            cpu="a host that is not here", cores=16, cpu_quota=None, memory_total=UNBOUNDED, memory_available=UNBOUNDED,
            memory_limit=None, memlock=None, last_level_cache=0, process_bytes=0, cache_folder="", cache_free=UNBOUNDED,
            python_version="", torch_version="", torch_threads=16,
            cuda=(CudaDevice(0, self.title, self.memory, self.memory, self.capability),))


CORE_READ = 86e9  # bytes per second read by 16 cores next to an H200 while its link copies; measured
_CORES = "cores read 86 GB/s, as 16 of them do beside an H200 while it copies (measured by this project)"
HOSTS: Mapping[str, Host] = {
    "ddr4": Host("DDR4-3200, 8 channels", 204.8e9, 4, CORE_READ,
                 f"8 x 25.6 GB/s a socket, 4 cards each, as in a DGX A100 (data sheet); {_CORES}"),
    "ddr5": Host("DDR5-4800, 8 channels", 307.2e9, 4, CORE_READ,
                 f"8 x 38.4 GB/s a socket, 4 cards each, as in a DGX H100 (data sheet); {_CORES}"),
    "desktop": Host("DDR5-5600, 2 channels", 89.6e9, 8, 0.8 * 89.6e9,
                    "2 x 44.8 GB/s for all cards of a desktop; cores are taken to read 80% of that"),
}

_NVLINK4 = Link(
    "nvlink4", 10.5e-6, 1.3e-6, 306e9,
    "one-shot 0.5 MB in 7 us on 2 H100 (vLLM PR 24111), 10 us on 4 and 4 MB in 38 us (vLLM PR 24532); NCCL 21 and "
    "39 us there, its hops from 8 B300 (vLLM PR 37756)", 6e-6, 393e9)
_PCIE5 = Link(
    "pcie5", 5e-6, 2.65e-6, 35e9,
    "bus bandwidth 35 GB/s on 4 RTX 5090 (NCCL issue 1639), 42 us for 8 bytes on 8 RTX 4090 (NCCL issue 1530), 8 and "
    "14 us for half of a ring on 2 and 4 cards (FlashInfer PR 5023)")
LINKS: Mapping[str, Link] = {link.name: link for link in (
    _NVLINK4,
    replace(_NVLINK4, name="nvlink3", ring_bandwidth=306e9 * 2 / 3, shot_bandwidth=393e9 * 2 / 3,
            source="nvlink4's times, at 600 of its 900 GB/s (data sheets)"),
    Link("nvlink5", 10.5e-6, 1.3e-6, 618e9,
         "B300: one-shot 16 KiB in 7 us and 2 MiB in 26 us, NCCL 29 and 32 us, 64 MiB in 219 us (vLLM PR 37756, taken "
         "as 8 ranks, with which these agree)", 6.9e-6, 768e9),
    _PCIE5,
    replace(_PCIE5, name="pcie4", ring_bandwidth=17.5e9, source="pcie5's times, at half of its bandwidth"),
)}

_DATA_SHEET = "data sheet; memory as nvidia-smi reports it"
CARDS: Mapping[str, Card] = {card.name: card for card in (
    Card("h200", "NVIDIA H200", 143771 * MIB, 4.8e12, 989e12, 67e12, 64e9, (9, 0), ("nvlink4", "pcie5"), "ddr5",
         "measured by this project on one H200 (PCIe 5); memory as nvidia-smi reports it",
         Rates("cuda", memory_read=4.3e12, float32=67e12 * MATRIX_SHARE, bfloat16=780e12, host_to_device=55e9,
               device_to_host=55e9, kernel_read=51e9)),
    Card("h100", "NVIDIA H100 80GB HBM3", 81559 * MIB, 3.35e12, 989e12, 67e12, 64e9, (9, 0), ("nvlink4", "pcie5"),
         "ddr5", _DATA_SHEET),
    Card("b200", "NVIDIA B200", 183359 * MIB, 7.67e12, 2250e12, 75e12, 64e9, (10, 0), ("nvlink5", "pcie5"), "ddr5",
         f"{_DATA_SHEET}; memory rate by bus width and clock (torchao PR 4002)"),
    Card("a100", "NVIDIA A100-SXM4-80GB", 81920 * MIB, 2.039e12, 312e12, 19.5e12, 32e9, (8, 0), ("nvlink3", "pcie4"),
         "ddr4", _DATA_SHEET),
    Card("l40s", "NVIDIA L40S", 46068 * MIB, 864e9, 362e12, 91.6e12, 32e9, (8, 9), ("pcie4",), "ddr5", _DATA_SHEET),
    Card("l4", "NVIDIA L4", 23034 * MIB, 300e9, 121e12, 30.3e12, 32e9, (8, 9), ("pcie4",), "ddr5", _DATA_SHEET),
    Card("rtx-4090", "NVIDIA GeForce RTX 4090", 24564 * MIB, 1008e9, 165.2e12, 82.6e12, 32e9, (8, 9), ("pcie4",),
         "desktop", _DATA_SHEET),
    Card("rtx-5090", "NVIDIA GeForce RTX 5090", 32607 * MIB, 1792e9, 209.5e12, 104.8e12, 64e9, (12, 0), ("pcie5",),
         "desktop", _DATA_SHEET),
)}
DEFAULT_CARD = "h200"  # used if this machine has no card and none was named


def find_card(name: str) -> Card:
    """Return the card that the user named."""
    typed = name.lower().replace("_", "-").replace(" ", "-")
    found = CARDS.get(typed) or CARDS.get(f"rtx-{typed}")
    if found is None:
        raise SpilloverError(f"--card takes one of {', '.join(CARDS)}; got '{name}'{did_you_mean(typed, CARDS)}")
    return found


def find_local_card(device: CudaDevice) -> Card | None:
    """Return the table's entry for a card by the name that its driver reports; None if it is not in the table."""
    words = device.name.lower().replace("-", " ").split()
    return next((card for card in CARDS.values() if card.name.split("-")[-1] in words), None)


def find_link(name: str | None, card: Card) -> Link:
    """Return the link between cards of this kind. `name`: as typed by the user; a family is enough (nvlink)."""
    if name is None:
        return LINKS[card.links[0]]
    typed = name.lower()
    fitting = [link for link in card.links if link == typed or link.rstrip("0123456789") == typed]
    if not fitting:
        raise SpilloverError(f"--link {name} does not connect {card.title} cards; use {' or '.join(card.links)}")
    return LINKS[fitting[0]]
