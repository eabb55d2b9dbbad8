"""One lasting `EngineClient` for a model that is loaded and unloaded.

A call that needs the engine loads the model first, and holds it until the call is done. A call that only looks (health,
measurements) loads nothing: while the model is not loaded, it is answered from the last values seen.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

from penstock.contract.adapter import AdapterFacts
from penstock.contract.engine_views import NO_PREFIXES, NO_STEPS, PrefixTree, RecentSteps, TenantShare
from penstock.contract.errors import InvalidParameter
from penstock.contract.events import Output
from penstock.contract.hosting import Models, ServedModel
from penstock.contract.measurements import Measurements
from penstock.contract.ports import EngineClient, Health, Tokenized
from penstock.contract.request import EngineRequest, Prompt

__all__ = ["NOT_LOADED", "NotLoaded", "RelayedClient", "RelayedWatch"]


class NotLoaded:
    """The `EngineViews` of a model that is not loaded: they show nothing."""

    async def recent_steps(self, after: int = -1, requests: frozenset[str] = frozenset()) -> RecentSteps:  # noqa: ARG002
        """No step is remembered."""
        return NO_STEPS

    async def cached_prefixes(self) -> PrefixTree:
        """Nothing is cached."""
        return NO_PREFIXES

    async def tenant_shares(self) -> tuple[TenantShare, ...]:
        """No tenant has a share."""
        return ()


NOT_LOADED = NotLoaded()


class RelayedClient:
    """See `EngineClient`. Methods that need the engine also raise the errors of `Models.use`.

    Args:
        models: the server's models.
        name: the main name of this model.
        first: this model, when it was first loaded.
    """

    def __init__(self, models: Models, name: str, first: ServedModel) -> None:
        self._models = models
        self._name = name
        self._health = first.client.health()
        self._measurements = first.client.measurements()
        self._adapters = first.client.adapters()

    @property
    def _client(self) -> EngineClient | None:
        present = self._models.present(self._name)
        return None if present is None else present.client

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Output, None]:
        """See `EngineClient.generate`."""
        async with self._models.use(self._name) as model, aclosing(model.client.generate(request)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        if (client := self._client) is not None:
            await client.abort(request_id)

    def check_queue(self, tenant: str) -> None:
        """See `EngineClient.check_queue`."""
        if (client := self._client) is not None:
            client.check_queue(tenant)

    def adapters(self) -> Mapping[str, AdapterFacts]:
        """See `EngineClient.adapters`; a model that is not loaded has the adapters with which it was unloaded."""
        if (client := self._client) is not None:
            self._adapters = client.adapters()
        return self._adapters

    async def load_adapter(self, name: str, path: str) -> AdapterFacts:
        """See `EngineClient.load_adapter`; the name must differ from all other models and adapters."""
        async with self._models.use(self._name) as model:
            if name in self._models.names:
                message = "lora_name is the name of another model or adapter of this server."
                raise InvalidParameter("lora_name", message, code="adapter_loaded")
            facts = await model.client.load_adapter(name, path)
            self._adapters = model.client.adapters()
            return facts

    async def unload_adapter(self, name: str) -> None:
        """See `EngineClient.unload_adapter`."""
        async with self._models.use(self._name) as model:
            await model.client.unload_adapter(name)
            self._adapters = model.client.adapters()

    def health(self) -> Health:
        """See `EngineClient.health`; a model that is not loaded counts as alive and idle."""
        if (client := self._client) is not None:
            self._health = client.health()
            return self._health
        return replace(self._health, alive=True, reason="", running=0, waiting=0)

    async def heartbeat(self) -> None:
        """See `EngineClient.heartbeat`."""
        if (client := self._client) is not None:
            await client.heartbeat()

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient.reset_prefix_cache`."""
        if (client := self._client) is not None:
            await client.reset_prefix_cache()

    async def start_profile(self) -> None:
        """See `EngineClient.start_profile`."""
        async with self._models.use(self._name) as model:
            await model.client.start_profile()

    async def stop_profile(self) -> tuple[str, ...]:
        """See `EngineClient.stop_profile`."""
        async with self._models.use(self._name) as model:
            return await model.client.stop_profile()

    async def tokenize(self, prompt: Prompt, tenant: str = "") -> Tokenized:
        """See `EngineClient.tokenize`."""
        async with self._models.use(self._name) as model:
            return await model.client.tokenize(prompt, tenant)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """See `EngineClient.detokenize`."""
        async with self._models.use(self._name) as model:
            return await model.client.detokenize(token_ids)

    def measurements(self) -> Measurements:
        """See `EngineClient.measurements`."""
        if (client := self._client) is not None:
            self._measurements = client.measurements()
            return self._measurements
        return replace(self._measurements, running=0, waiting=0)

    async def recent_steps(self, after: int = -1, requests: frozenset[str] = frozenset()) -> RecentSteps:
        """See `EngineViews.recent_steps`; a model that is not loaded remembers none."""
        return await (self._client or NOT_LOADED).recent_steps(after, requests)

    async def cached_prefixes(self) -> PrefixTree:
        """See `EngineViews.cached_prefixes`; a model that is not loaded has none."""
        return await (self._client or NOT_LOADED).cached_prefixes()

    async def tenant_shares(self) -> tuple[TenantShare, ...]:
        """See `EngineViews.tenant_shares`; a model that is not loaded has none."""
        return await (self._client or NOT_LOADED).tenant_shares()


class RelayedWatch:
    """See `StepWatch`; nothing is overdue while the model is not loaded."""

    def __init__(self, models: Models, name: str) -> None:
        self._models = models
        self._name = name

    def overdue(self) -> str:
        """See `StepWatch`."""
        present = self._models.present(self._name)
        return "" if present is None else present.watch.overdue()

    def lost(self) -> str:
        """See `StepWatch`. Never lost: a model that is lost is loaded again, so the process can serve."""
        return ""

    def began(self) -> float:
        """See `StepWatch`."""
        present = self._models.present(self._name)
        return float("inf") if present is None else present.watch.began()
