"""What the operator chose for a fleet: several engines that serve one model, on Ray."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.contract.errors import ConfigError
from penstock.contract.options import option

__all__ = ["FleetConfig"]

_RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """How many replicas there are, and where."""

    replicas: str = option(
        "2",
        "Engines that serve the model: a number, or a range such as 1-4 for as many as are needed. With --address, 0"
        " ends the replicas that run there and serves nothing.",
    )
    address: str = option(
        "",
        "Join the Ray cluster at this address, such as 10.0.0.1:6379. Replicas of the same --name that run there with"
        " other options are replaced one by one. By default, start a cluster on this machine that ends with this"
        " command.",
    )
    name: str = option(
        "",
        "Name of these replicas in the cluster, by default the last part of MODEL; replicas of other names are left"
        " alone.",
    )
    scale_up_wait: float = option(
        5.0,
        "With a range such as --replicas 1-4: start another replica when a new request would wait more than this"
        " many seconds.",
    )
    scale_up_delay: float = option(
        10.0, "Seconds for which the wait must stay above --scale-up-wait before a replica is started."
    )
    scale_down_delay: float = option(300.0, "Seconds for which a replica must be unneeded before it is ended.")
    replica_cpus: float = option(1.0, "CPUs that each replica takes of its Ray node.")
    replica_gpus: float = option(0.0, "GPUs that each replica takes of its Ray node.")
    replica_drain: int = option(
        600,
        "Seconds that a replica has to finish its answers when it is replaced; the rest continue on another replica.",
    )

    def __post_init__(self) -> None:
        match = _RANGE.fullmatch(self.replicas)
        if match is None or not (self.ends or 1 <= self.bounds[0] <= self.bounds[1]):
            raise ConfigError("replicas", f"must be a number such as 2, or a range such as 1-4, got {self.replicas!r}")
        if self.ends and not self.address:
            raise ConfigError("replicas", "0 ends replicas in a running cluster: give its --address too")
        if self.name and not _NAME.fullmatch(self.name):
            raise ConfigError("name", f"may have letters, digits and ._-, at most 100 in all, got {self.name!r}")
        for name in ("scale_up_wait", "scale_up_delay", "scale_down_delay", "replica_cpus", "replica_gpus"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, f"must be a number from 0 up, got {getattr(self, name)}")
        if self.replica_drain < 0:
            raise ConfigError("replica_drain", f"must not be negative, got {self.replica_drain}")

    @property
    def ends(self) -> bool:
        """Whether to end replicas and serve nothing."""
        return self.bounds == (0, 0)

    def name_for(self, model: str) -> str:
        """The name of the replicas of `model`, which is a name or a path."""
        return self.name or _NOT_IN_NAMES.sub("-", model.rstrip("/").rpartition("/")[2])[:100]

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most replicas."""
        least, _, most = self.replicas.partition("-")
        return int(least), int(most or least)
