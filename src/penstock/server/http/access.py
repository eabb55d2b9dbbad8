"""Access control: API keys, Host names, and origins of web pages.

Decides what counts as a key, where keys come from, and that a server without keys listens on this machine only. Keys
are kept as SHA-256 digests; a given key is compared with every digest, in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.contract.errors import ConfigError
from penstock.contract.limits import DEFAULT_SERVER_LIMITS, ServerLimits
from penstock.contract.server_config import ServerConfig
from penstock.server.http.caller import Caller

__all__ = ["Access", "ApiKeys", "is_loopback", "open_access", "read_keys"]

ANY = "*"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
ADMIN, GATEWAY = "admin", "gateway"
SHARE, CONCURRENT = "share", "concurrent"
LEAST_SHARE, MOST_SHARE = 0.01, 100.0
MOST_CONCURRENT = 1_000_000
FORM = f"must be `KEY`, `admin KEY` or `gateway KEY`, and may end with `{SHARE}=NUMBER` and `{CONCURRENT}=NUMBER`"
ENVIRONMENT = (("PENSTOCK_API_KEY", ""), ("PENSTOCK_ADMIN_KEY", ADMIN), ("PENSTOCK_GATEWAY_KEY", GATEWAY))


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The accepted API keys, one `Caller` each."""

    callers: tuple[Caller, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.callers)

    def find(self, key: str) -> Caller | None:
        """The caller with this key; None if there is none. Takes the same time whichever key matches."""
        given = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        found: Caller | None = None
        for caller in self.callers:
            if hmac.compare_digest(caller.digest, given):
                found = caller
        return found


@dataclass(frozen=True, slots=True)
class Access:
    """The access rules of one server.

    Attributes:
        hosts: names allowed in the Host header, without port; empty allows any.
        probe_hosts: the same for the probe port.
        origins: origins of web pages that may call; `*` allows any.
        compat: whether unsupported fields are dropped and listed instead of refused.
        normalize_prompts: whether changing lines are taken out of the start of system prompts.
        request_seconds: time limit of a request; 0 for none.
    """

    keys: ApiKeys = ApiKeys()
    hosts: frozenset[str] = LOOPBACK_NAMES
    probe_hosts: frozenset[str] = LOOPBACK_NAMES
    origins: frozenset[str] = frozenset()
    compat: bool = False
    normalize_prompts: bool = False
    request_seconds: float = DEFAULT_SERVER_LIMITS.request_seconds
    limits: ServerLimits = field(default=DEFAULT_SERVER_LIMITS)


def open_access(config: ServerConfig, environ: Mapping[str, str]) -> Access:
    """Build the access rules from the operator's options and the environment.

    Raises:
        ConfigError: a key or the key file cannot be used, or other machines can reach the server and there is no key.
    """
    keys = read_keys(config.api_key_file, environ)
    if not keys and not is_loopback(config.host):
        raise ConfigError(
            "host",
            f"{config.host} can be reached from other machines, which needs an API key: give --api-key-file or set"
            " PENSTOCK_API_KEY",
        )
    asked = frozenset(_items(config.allowed_hosts))
    return Access(
        keys=keys,
        hosts=_hosts(config.host, asked),
        probe_hosts=_hosts(config.probe_host, asked if is_loopback(config.probe_host) else frozenset()),
        origins=frozenset(_items(config.cors_origins)),
        compat=config.compat,
        normalize_prompts=config.normalize_prompts,
        request_seconds=config.request_timeout,
    )


def _hosts(listening: str, asked: frozenset[str]) -> frozenset[str]:
    """The allowed Host names of a server on address `listening`: its own and the operator's `asked`; empty for any."""
    if ANY in asked or not (is_loopback(listening) or asked):
        return frozenset()
    return LOOPBACK_NAMES | asked | {listening.lower()}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on `host`; the only name that counts is localhost."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(path: str, environ: Mapping[str, str], limits: ServerLimits = DEFAULT_SERVER_LIMITS) -> ApiKeys:
    """Read the keys in a file ("" for no file) and in the environment.

    Raises:
        ConfigError: the file cannot be read, is open to every user or holds no key, or there are too many keys or a
            malformed one.
    """
    found = [_Key(environ[name], name, mark) for name, mark in ENVIRONMENT if environ.get(name)]
    if path:
        from_file = list(_file_keys(Path(path)))
        if not from_file:
            raise ConfigError("api_key_file", f"{path} holds no key")
        found += from_file
    if len(found) > limits.max_api_keys:
        raise ConfigError("api_key_file", f"{path} holds {len(found)} keys; at most {limits.max_api_keys} are taken")
    for key in found:
        _check_key(key.text, key.where, limits.min_api_key_chars)
    return ApiKeys(tuple(_caller(key) for key in found))


def _caller(key: _Key) -> Caller:
    digest = hashlib.sha256(key.text.encode()).digest()
    return Caller(digest, key.mark == ADMIN, key.share, key.concurrent, key.mark == GATEWAY)


@dataclass(frozen=True, slots=True)
class _Key:
    """A key, its options, where it was given, and its mark (admin or gateway); "" for no mark."""

    text: str
    where: str
    mark: str = ""
    share: float = 1.0
    concurrent: int = 0


def _file_keys(path: Path) -> Iterator[_Key]:
    """Yield the key of each line; blank lines and comments have none."""
    try:
        if os.name == "posix" and path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            raise ConfigError("api_key_file", f"{path} is open to every user of this machine; do: chmod 600 {path}")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_key_file", f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{path}, line {number}"
        options = _take_options(words, where)
        mark = words[0] if len(words) == 2 and words[0] in (ADMIN, GATEWAY) else ""
        if len(words) != 1 + bool(mark):
            raise ConfigError("api_key_file", f"{where}: {FORM}")
        share = _share(options[SHARE], where) if SHARE in options else 1.0
        concurrent = _concurrent(options[CONCURRENT], where) if CONCURRENT in options else 0
        yield _Key(words[-1], where, mark, share, concurrent)


def _take_options(words: list[str], where: str) -> dict[str, str]:
    """Take the options off the end of a line's words: name -> value."""
    options: dict[str, str] = {}
    while words and words[-1].startswith((f"{SHARE}=", f"{CONCURRENT}=")):
        name, _, value = words.pop().partition("=")
        if name in options:
            raise ConfigError("api_key_file", f"{where}: {name} is given twice")
        options[name] = value
    return options


def _share(value: str, where: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not LEAST_SHARE <= share <= MOST_SHARE:
        bounds = f"{LEAST_SHARE:g}..{MOST_SHARE:g}"
        raise ConfigError("api_key_file", f"{where}: {SHARE}={value} must be a number in {bounds}")
    return share


def _concurrent(value: str, where: str) -> int:
    few_digits = value.isascii() and value.isdecimal() and len(value) <= len(str(MOST_CONCURRENT))
    if not few_digits or not 1 <= int(value) <= MOST_CONCURRENT:
        message = f"{where}: {CONCURRENT}={value} must be a whole number in 1..{MOST_CONCURRENT}"
        raise ConfigError("api_key_file", message)
    return int(value)


def _check_key(key: str, where: str, min_chars: int) -> None:
    if len(key) < min_chars or not key.isascii() or not key.isprintable() or " " in key:
        message = f"{where}: a key has at least {min_chars} printable ASCII characters and no spaces"
        raise ConfigError("api_key_file", message)


def _items(text: str) -> list[str]:
    return [item.strip().lower() for item in text.split(",") if item.strip()]
