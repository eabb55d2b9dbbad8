"""The program of a rank other than rank 0: `python -m penstock.rank_process DESCRIPTOR`; see `ranks.follower`.

Names concrete classes of several rooms, as `rank_loading` does.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
from typing import TYPE_CHECKING

from penstock.imports import lasting_imports

if TYPE_CHECKING:
    from penstock.ranks import GlooGroup, Share
    from penstock.ranks.messages import Load

__all__ = ["main"]


def main() -> None:
    """Carry out rank 0's orders, from the other end of a socket."""
    faulthandler.enable()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy brings OpenBLAS, which nothing here uses; read on import
    with lasting_imports():
        import penstock.loading  # noqa: F401 - `_load` imports from it when called
        from penstock.ranks import follow
        from penstock.ranks.messages import Order
        from penstock.remote import Connection
    connection: Connection[Order] = Connection(socket.socket(fileno=int(sys.argv[1])), Order)
    follow(connection, _load)


def _load(order: Load, group: GlooGroup) -> Share:
    from penstock.loading import find_model, place_model, resolve_choices

    files = find_model(order.config)
    return place_model(order.config, files, resolve_choices(order.config, files), lambda line: None, group)  # noqa: ARG005


if __name__ == "__main__":
    main()
