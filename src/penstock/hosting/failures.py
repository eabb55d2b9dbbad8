"""Why a request does not get its model."""

from __future__ import annotations

from penstock.contract.errors import RefusalCause, Unavailable

__all__ = ["HostClosed", "ModelCannotLoad", "ModelIsComing", "NoRoomForModel"]

_SOON_SECONDS = 5
"""Retry time when a model is loading: most load within seconds."""
_LATER_SECONDS = 30
"""Retry time when an operator has to do something first."""


class ModelIsComing(Unavailable):
    """The model is not loaded yet, and the request has waited as long as it may; loading goes on."""

    def __init__(self, name: str) -> None:
        message = f"The model {name!r} is being loaded; ask again soon."
        super().__init__(message, retry_after=_SOON_SECONDS, cause=RefusalCause.LOADING)


class ModelCannotLoad(Unavailable):
    """The model cannot be loaded; the server's log and its list of models say why."""

    def __init__(self, name: str) -> None:
        message = f"The model {name!r} cannot be loaded now; the server's log says why."
        super().__init__(message, retry_after=_LATER_SECONDS, cause=RefusalCause.LOADING)


class NoRoomForModel(Unavailable):
    """Pinned models, or the limits alone, leave no room."""

    def __init__(self, name: str) -> None:
        message = f"There is no room for the model {name!r}: pinned models and this server's limits leave none."
        super().__init__(message, retry_after=_LATER_SECONDS, cause=RefusalCause.LOADING)


class HostClosed(Unavailable):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down.", retry_after=_SOON_SECONDS, cause=RefusalCause.DRAINING)
