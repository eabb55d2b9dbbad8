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
        "Engines that serve the model: a number, or 1-4 for as many as are needed. With --address, 0 ends those that"
        " run there, and serves nothing.",
    )
    address: str = option(
        "",
        "Join the Ray cluster at this address, such as 10.0.0.1:6379; what runs there by the same --name with other"
        " options is replaced, replica by replica. By default a cluster is started on this machine, which ends with"
        " this command.",
    )
    name: str = option(
        "",
        "What these replicas are called in the cluster, where those of other names go on beside them; by default the"
        " last part of MODEL.",
    )
    scale_up_wait: float = option(
        5.0, "With --replicas 1-4: seconds that a new request may have to wait before another replica is started."
    )
    scale_up_delay: float = option(10.0, "Seconds for which requests must wait so long.")
    scale_down_delay: float = option(300.0, "Seconds for which a replica must not be needed before it is ended.")
    replica_cpus: float = option(1.0, "Processors that a replica takes of its Ray node.")
    replica_gpus: float = option(0.0, "GPUs that a replica takes of its Ray node.")
    replica_drain: int = option(
        600, "Seconds that a replica may finish its answers when it is replaced; the rest go on at another."
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
        """Whether replicas are to be ended, and nothing served."""
        return self.bounds == (0, 0)

    def name_for(self, model: str) -> str:
        """What replicas of `model`, a name or a path, are called."""
        return self.name or _NOT_IN_NAMES.sub("-", model.rstrip("/").rpartition("/")[2])[:100]

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most replicas."""
        least, _, most = self.replicas.partition("-")
        return int(least), int(most or least)
