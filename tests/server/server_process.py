"""A server in front of a scripted engine, in a process of its own: for signals, exit codes and limits of a process.

    python server_process.py PROBE_PORT DRAIN_SECONDS

Every answer is "a", then, once a byte comes on standard input, "b". The URL is the first line on standard output.
"""

from __future__ import annotations

import os
import sys
import threading

from scripted_engine import ScriptedEngine, Until, always, delta, finished, stop
from server_harness import CARD, LIMITS

from penstock.contract.server_config import ServerConfig
from penstock.server import configure_logging, create_app, log_request, run


def main() -> None:
    go = threading.Event()
    threading.Thread(target=lambda: (os.read(0, 1), go.set()), daemon=True).start()
    engine = ScriptedEngine(script=always(delta("a"), Until(go), delta("b"), stop(), finished()))
    configure_logging("text")
    app = create_app(engine, CARD, LIMITS, observers=[log_request])
    config = ServerConfig(port=0, probe_port=int(sys.argv[1]))
    run(app, config, lambda url: print(url, flush=True), drain_seconds=int(sys.argv[2]))
    if not sys.stdout.closed and engine.left:
        print("left", engine.left, file=sys.stderr)


if __name__ == "__main__":
    main()
