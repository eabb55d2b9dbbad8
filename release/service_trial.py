"""Shows that the service of docs/service.md works: run in a system that systemd has booted, as root.

Starts it, asks a question, kills the server to see that it is restarted, and ends it. Uses the standard library only
and imports nothing of this repository, because it is copied to where it runs. On an error, exit code 1 and the output.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request

SERVICE = "penstock"
PATIENCE = 300
"""Seconds that the service may take to restart."""


def main() -> None:
    """Run the steps, and print one line for each."""
    systemctl("start", SERVICE)  # returns once the service has said that it takes connections
    say(f"started: {shown('StatusText')}")
    say(f"user {user_of(shown('MainPID'))}, exposure {exposure()}")
    say(f"served: {answer()!r}")
    before = shown("MainPID")
    systemctl("kill", "--kill-whom=main", "--signal=KILL", SERVICE)
    await_restart(before)
    say(f"killed, and started anew by systemd: {answer()!r}")
    systemctl("stop", SERVICE)
    ended = {name: shown(name) for name in ("ActiveState", "Result", "ExecMainStatus")}
    if ended != {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}:
        fail(f"the service did not end in order: {ended}")
    say("stopped in order")


def say(line: str) -> None:
    """Print one line at once."""
    print(f"   {line}", flush=True)


def fail(reason: str) -> None:
    """End with a reason and what the service wrote."""
    journal = subprocess.run(["journalctl", "--no-pager", "-u", SERVICE, "-n", "60"], capture_output=True, text=True)
    sys.exit(f"{reason}\n{journal.stdout}")


def systemctl(*arguments: str) -> None:
    """Run a systemctl command that must succeed."""
    done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True)
    if done.returncode:
        fail(f"systemctl {' '.join(arguments)}: {done.stderr}")


def shown(name: str) -> str:
    """Return a property of the service."""
    done = subprocess.run(["systemctl", "show", SERVICE, "-P", name], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def user_of(process: str) -> str:
    """Return the id of the user that a process runs as."""
    done = subprocess.run(["stat", "-c", "%u", f"/proc/{process}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def exposure() -> str:
    """Return the exposure, out of 10, that `systemd-analyze security` ends with."""
    done = subprocess.run(["systemd-analyze", "security", "--no-pager", SERVICE], capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1].partition(": ")[2]


def answer() -> str:
    """Return a completion by the service."""
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    body["model"] = json.loads(ask("http://127.0.0.1:8000/v1/models"))["data"][0]["id"]
    text: str = json.loads(ask("http://127.0.0.1:8000/v1/completions", body))["choices"][0]["text"]
    return text


def ask(url: str, body: dict[str, object] | None = None) -> bytes:
    """Send a request and return the answer's body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return bytes(response.read())


def await_restart(before: str) -> None:
    """Return when another process serves."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if shown("ActiveState") == "active" and shown("MainPID") not in ("0", before):
            return
        time.sleep(0.5)
    fail("the service was not started anew")


if __name__ == "__main__":
    main()
