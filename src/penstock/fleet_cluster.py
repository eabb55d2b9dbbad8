"""The Ray side of `penstock fleet`: joins or starts a cluster, and runs the replicas of a model in it.

Ray is imported where it is used, after the environment variables that it reads were set.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, SetupError
from penstock.contract.fleet_config import FleetConfig
from penstock.fleet.description import Options
from penstock.version import __version__

__all__ = ["cluster", "deployment", "end_replicas", "run_replicas"]

PREFIX = "penstock-"
"""Prefix of the names of our applications in Ray; a cluster may have other applications too."""
DEPLOYMENT = "engine"

_LOOPBACK = ("127.", "localhost:", "[::1]:")

_STORE_BYTES = 80 * 2**20
"""Size of Ray's shared memory, about the least that Ray accepts: our messages are small, and do not use it."""

_HEADROOM = 64
"""Calls in addition to those that the engine's queue has room for: states, heartbeats, aborts."""


@contextmanager
def cluster(fleet: FleetConfig, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, this process is part of a Ray cluster: of a running one, or of its own.

    Args:
        fleet: where the cluster is, and what replicas will take of it.
        say: called with a line that says where the cluster is.

    Raises:
        ConfigError: there is no such cluster.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    _use_token(create=not fleet.address)
    if not fleet.address or fleet.address.startswith(_LOOPBACK):
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # keeps Ray on 127.0.0.1, on Linux too
    import ray
    from ray import serve
    from ray.serve.config import ProxyLocation

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
    with ExitStack() as stack:
        try:
            if fleet.address:
                ray.init(address=fleet.address, **quiet)
            else:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pr-", ignore_cleanup_errors=True))
                ray.init(
                    num_cpus=max(os.cpu_count() or 1, round(fleet.bounds[1] * fleet.replica_cpus + 0.5)),
                    include_dashboard=False,
                    object_store_memory=_STORE_BYTES,
                    _temp_dir=folder,
                    _node_ip_address="127.0.0.1",
                    **quiet,
                )
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise ConfigError("address", f"no Ray cluster could be joined or started: {error}") from error
        stack.callback(ray.shutdown)
        serve.start(proxy_location=ProxyLocation.Disabled)
        if not fleet.address:
            stack.callback(serve.shutdown)
        where = fleet.address or ray.get_runtime_context().gcs_address
        say(f"Ray              {ray.__version__} at {where}")
        yield


def deployment(config: EngineConfig, fleet: FleetConfig) -> Any:
    """What Ray is to run: as many replicas as `fleet` says, each with room for what an engine of `config` takes."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    from penstock.fleet_replica import EngineReplica

    least, most = fleet.bounds
    size: dict[str, Any] = {"num_replicas": least}
    if least < most:
        policy = AutoscalingPolicy(
            policy_function="penstock.fleet.ray_scaling:WaitingPolicy", policy_kwargs={"most_wait": fleet.scale_up_wait}
        )
        size = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least,
                max_replicas=most,
                look_back_period_s=2.0,
                upscale_delay_s=fleet.scale_up_delay,
                downscale_delay_s=fleet.scale_down_delay,
                policy=policy,
            )
        }
    return serve.deployment(
        **size,
        name=DEPLOYMENT,
        max_ongoing_requests=config.max_num_seqs + config.max_queued_requests + _HEADROOM,
        health_check_period_s=1,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=fleet.replica_drain,
        max_constructor_retry_count=2,
        ray_actor_options={"num_cpus": fleet.replica_cpus, "num_gpus": fleet.replica_gpus},
        request_router_config=RequestRouterConfig(request_router_class="penstock.fleet.ray_router:NamedRouter"),
    )(EngineReplica)


def run_replicas(name: str, deployment: Any, options: Options) -> Any:
    """Start a deployment's replicas; returns Ray's handle.

    Running replicas of this name are replaced one by one if they have other options, and taken over if they have the
    same options. Replicas of other names are left alone.

    Raises:
        SetupError: the replicas cannot be started.
    """
    from ray import serve

    application, message = PREFIX + name, msgspec.msgpack.encode(options)
    # Without this version Ray would draw one for each call, and would so replace replicas that need no replacing.
    version = blake2b(message + __version__.encode(), digest_size=16).hexdigest()
    versioned = deployment.options(_internal=True, version=version)
    try:
        return serve.run(versioned.bind(message), name=application, route_prefix=None, blocking=False)
    except RuntimeError as error:
        status = serve.status().applications[application].deployments.get(DEPLOYMENT)
        reason = str(error) if status is None else status.message
        lines = [line for line in reason.splitlines() if line.strip()]
        raise SetupError(f"the replicas could not be started: {lines[-1] if lines else error}") from error


def end_replicas(name: str) -> None:
    """End the replicas of this name once they have finished their answers; returns when they have ended.

    Raises:
        SetupError: there are no replicas of this name.
    """
    from ray import serve

    present = [each.removeprefix(PREFIX) for each in serve.status().applications if each.startswith(PREFIX)]
    if name not in present:
        others = f"; there are those of {', '.join(sorted(present))}" if present else ""
        raise SetupError(f"there are no replicas of {name!r} in the cluster{others}")
    serve.delete(PREFIX + name, _blocking=False)  # blocking, it would give up after a minute; answers may take longer
    while PREFIX + name in serve.status().applications:
        time.sleep(0.2)


def _use_token(*, create: bool) -> None:
    """Have Ray demand and send the user's token, from a file that only the user can read; `create` makes it."""
    if any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    path = Path.home() / ".ray" / "auth_token"
    if create and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
    if path.exists():
        path.chmod(0o600)
        os.environ["RAY_AUTH_MODE"] = "token"
