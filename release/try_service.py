"""Boots a system in which Penstock is installed, and tries the service of docs/service.md there.

The system lies in a folder and boots in a container (systemd-nspawn) with a network of its own, so the service's ports
cannot collide with others. service_trial.py says what is tried.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from try_install import entered, fails

__all__ = ["UNIT", "try_service"]

CHECK = Path(__file__).with_name("service_trial.py")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "service.md"
UNIT = re.compile(r"```ini\n(.*?)```", re.DOTALL)
"""Finds the unit in the page."""

TRIAL = """[Unit]
After=multi-user.target dbus.socket
SuccessAction=exit
FailureAction=exit
FailureActionExitStatus=1

[Service]
Type=oneshot
ExecStart=/opt/penstock/bin/python /srv/penstock/service_trial.py
StandardOutput=file:/srv/penstock/trial.log
StandardError=inherit

[Install]
WantedBy=default.target
"""


def try_service(root: Path) -> bool:
    """Whether the service works in a system with systemd and Penstock in /opt/penstock; prints what was seen."""
    unit = UNIT.search(PAGE.read_text(encoding="utf-8"))
    assert unit is not None, PAGE
    units = root / "etc" / "systemd" / "system"
    (units / "penstock.service").write_text(unit[1], encoding="utf-8")
    (units / "penstock-trial.service").write_text(TRIAL, encoding="utf-8")
    shutil.copy(CHECK, root / "srv" / "penstock")
    log = root / "srv" / "penstock" / "trial.log"
    log.unlink(missing_ok=True)
    # The booted system has no network to fetch a model from.
    pull = ["env", "PENSTOCK_CACHE=/var/cache/penstock", "/opt/penstock/bin/penstock", "pull"]
    if any(fails(entered(root, step)) for step in (pull, ["systemctl", "enable", "--quiet", "penstock-trial"])):
        return False
    boot = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network", "--boot"]
    done = subprocess.run([*boot, f"--directory={root}"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else done.stdout + done.stderr
    print(said, end="", flush=True)
    if done.returncode:
        print(f"   exit code {done.returncode}: the service in {root}", flush=True)
    return done.returncode == 0
