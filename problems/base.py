"""The contract of a problem, and the recipe for a new one.

A new problem is one file `problems/pNNN_<slug>.py`; the contract test finds it:

1. Head comment: one line that says what it is, then Axes (letters, which axis is split over ranks), In, Out, Maths,
   Wire (what must be sent), Needs (constraints on W), Not here.
2. `make_inputs(draw, size)`: the arguments of one rank, in the order of the signature.  Values come from `draw.own(name)`
   (differs per rank) or `draw.shared(name)` (equal on every rank), never from the global generator.
3. `reference(...)`: the public signature; torch.distributed on the default group or the `group` argument; no autograd.
4. `exact(inputs)`: takes the inputs of all ranks, gives the outputs of all ranks, in float64 (float32 when large), without
   torch.distributed, without calling `reference` and without changing its inputs: an independent second statement of the problem.
5. `cost(size, world_size, itemsize)`: the least any algorithm must send, touch and compute.
6. `PROBLEM = Problem(...)` at the foot.
7. `pkb list --markdown > docs/PROBLEMS.md`, and a line in `problems.kinship` if it is nearly the same as another one.

What does not belong: problems whose answer can be guessed (constant, independent of an input, solvable from the own
rank's data alone) under the `hardened` profile.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

PROFILES = ("hardened", "upstream")
SPLITS = ("train", "validation", "test")
UNKNOWN = "unknown"
"""How a field of a problem reads that its pack does not tell."""


@dataclass(frozen=True)
class Size:
    """One named problem size: extents by axis name, e.g. `{"M": 512, "N": 512}`."""

    name: str
    dims: Mapping[str, int]

    def __getitem__(self, axis: str) -> int:
        return self.dims[axis]


@dataclass(frozen=True)
class Draw:
    """Where the random values of one rank and one trial come from.

    Seeds are hashed from (secret, problem, size, trial, rank, name), so neighbours share nothing; the secret never
    enters a box.
    """

    secret: bytes
    problem: str
    size: str
    trial: int
    rank: int
    world_size: int
    profile: str = "hardened"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    """Where `make_inputs` makes tensors unless it says otherwise: whoever calls it makes this the default device."""

    def own(self, name: str) -> torch.Generator:
        """Generator on that device for an argument that differs on every rank."""
        return self._generator(f"rank {self.rank}", name)

    def shared(self, name: str) -> torch.Generator:
        """Generator on that device for an argument that is equal on every rank."""
        return self._generator("all ranks", name)

    def seed(self, name: str) -> int:
        """A number that is equal on every rank: for code that draws by itself."""
        return self._seed("all ranks", name)

    def _generator(self, who: str, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self._seed(who, name))

    def _seed(self, who: str, name: str) -> int:
        text = "\0".join((self.problem, self.size, self.profile, str(self.trial), who, name))
        digest = hashlib.blake2b(text.encode(), key=self.secret[:64], digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Tolerance:
    """How far an output may lie from `exact`, in units of the error that its dtype and the reference make unavoidable.

    With e = |candidate - exact|, r = |reference - exact|, u the unit round-off of the output's dtype, v = min(u, 2^-24)
    (whoever rounds to bf16 at the end is still expected to add in fp32), and N, E the floors `norm_ulps * u + inner_ulps * v`
    and `element_ulps * u + inner_ulps * v`:

    - norm-wise:    ||e||_2 <= max(norm_factor * min(||r||_2, cap * ||exact||_2), N * ||exact||_2)
    - element-wise: e_i <= max(element_factor * min(max(r), cap * rms(exact)), E * (|exact_i| + rms(exact)))

    A more accurate kernel than the reference passes; a lazy one never, because the cap bounds what a poor reference buys.
    Integers and booleans are always compared exactly.
    """

    bits: bool = False
    """Equality of bits: for pure data movement."""
    norm_factor: float = 3.0
    element_factor: float = 8.0
    norm_ulps: float = 2.0
    """Round-offs of the output's dtype: in the norm they average out, and a wire of half the precision must not fit in."""
    element_ulps: float = 4.0
    inner_ulps: float = 64.0
    """Round-offs of the accumulator: another order of a sum over a few thousand terms costs some tens."""
    cap: float = 0.05
    """Largest share of the output's own size that the reference's error may contribute before the factors apply."""


@dataclass(frozen=True)
class Cost:
    """The least that any correct algorithm does on one rank."""

    wire_bytes: float
    """Bytes sent by a rank over the interconnect, unicast."""
    memory_bytes: float
    """Bytes read plus written in local memory."""
    flops: float


def any_world(world_size: int) -> str | None:
    """`valid_world` of a problem without constraints."""
    return None if world_size >= 1 else f"world size {world_size} is less than 1"


@dataclass(frozen=True)
class Packed:
    """What is known of a problem from a folder of somebody else's (`problems.packs`), whose code never runs in the caller."""

    path: str
    arguments: tuple[str, ...]
    statement: str
    references: tuple[str, str]
    """The reference as a candidate: for ranks on CPUs, for ranks on GPUs."""
    unknown: tuple[str, ...] = ()
    """Fields of the problem that nobody told.  Without `exact` the reference alone says what is true."""


@dataclass(frozen=True)
class Problem:
    """One of the tasks: what is computed, on which inputs, and how an answer is recognised.

    Raises:
        ValueError: a size, profile or split that breaks the contract.
    """

    number: int
    slug: str
    version: int
    title: str
    """One sentence for catalogue and prompt."""
    family: str
    parallelism: str
    collectives: tuple[str, ...]
    origin: str
    split: str
    sizes: Mapping[str, Size]
    """`tiny` (CI), `default` (room for a policy on a CPU), `large` (bandwidth-bound on 8 GPUs), `upstream` (the public
    benchmark's shape, used as the default of the `upstream` profile)."""
    make_inputs: Callable[[Draw, Size], tuple[Any, ...]]
    reference: Callable[..., Any]
    exact: Callable[[Sequence[tuple[Any, ...]]], list[Any]]
    """Inputs of all ranks -> outputs of all ranks."""
    cost: Callable[[Size, int, int], Cost]
    """(size, world size, bytes per element) -> the floor of one rank."""
    tolerance: Tolerance = field(default_factory=Tolerance)
    valid_world: Callable[[int], str | None] = any_world
    """World size -> None, or why the problem cannot run on so many ranks."""
    mutates: tuple[str, ...] = ()
    """Arguments that the reference changes in place and a candidate must change likewise."""
    pack: Packed | None = None
    """None for the problems of this repository."""

    def __post_init__(self) -> None:
        missing = {"tiny", "default", "large", "upstream"} - set(self.sizes)
        if missing:
            raise ValueError(f"problem {self.slug}: sizes {sorted(missing)} are missing")
        if self.split not in SPLITS and not (self.pack and self.split == UNKNOWN):
            raise ValueError(f"problem {self.slug}: split {self.split!r} is none of {SPLITS}")

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments of `solution`, in order."""
        return self.pack.arguments if self.pack else tuple(inspect.signature(self.reference).parameters)

    @property
    def statement(self) -> str:
        """What the head of the problem's file says."""
        return self.pack.statement if self.pack else sys.modules[self.reference.__module__].__doc__ or ""

    @property
    def unknown(self) -> tuple[str, ...]:
        """Fields whose value nobody told."""
        return self.pack.unknown if self.pack else ()

    def size(self, name: str, profile: str = "hardened") -> Size:
        """The size of that name; the `upstream` profile's default is the public benchmark's shape.

        Raises:
            KeyError: no such size, with those that exist.
        """
        if profile == "upstream" and name == "default":
            name = "upstream"
        try:
            return self.sizes[name]
        except KeyError:
            raise KeyError(f"problem {self.slug} has no size {name!r}; it has {', '.join(self.sizes)}") from None
