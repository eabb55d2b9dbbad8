"""`AsyncLLM`: the engine in a thread of its own, streaming to many callers on an event loop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.app import assemble, engine_config
from penstock.contract.config import DEFAULT_MODEL
from penstock.contract.errors import EngineFault
from penstock.contract.options import Front
from penstock.contract.ports import Health
from penstock.contract.request import EngineRequest, Prompt
from penstock.llm.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from penstock.llm.chat_request import ChatArguments, ChatRequest, applied, prompt_of, read_chat
from penstock.llm.embeddings import (
    EmbeddingRequestOutput,
    ScoringRequestOutput,
    check_pairs,
    embedding_spec,
    kept_tokens,
    scores,
)
from penstock.llm.outputs import Answer, RequestOutput
from penstock.llm.prompts import Conversation, PromptLike, as_prompt, as_prompts
from penstock.sampling import SamplingParams

__all__ = ["AsyncLLM"]


class AsyncLLM:
    """A model that streams to many callers at once; takes the arguments of `LLM`, and the limits of its queue.

    Example:
        >>> async with AsyncLLM() as llm:
        ...     async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
        ...         print(output.outputs[0].text)
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, cache_dir: Path | None = None, **options: Any) -> None:
        self._assembly = assemble(engine_config(Front.QUEUE, model=model, **options), cache_dir)
        self._client = self._assembly.start_client()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that give none: the model's own defaults, else those of `SamplingParams`."""
        return SamplingParams.from_fields(dict(self._assembly.card.sampling_defaults))

    def generate(
        self,
        prompt: PromptLike | Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        adapter: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream one request; each output is the request so far, and the last one is `finished`.

        `adapter` is the name of an adapter of the option `lora`. Leaving the loop early, or cancelling the task, aborts
        the request.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
            Overloaded: the queue is full.
            EngineFault: the engine failed to compute the request.
        """
        given = prompt if isinstance(prompt, Prompt) else as_prompt(prompt)
        return self._stream(given, sampling_params or self.get_default_sampling_params(), request_id, adapter)

    async def _stream(
        self, given: Prompt | ChatRequest, params: SamplingParams, request_id: str, adapter: str
    ) -> AsyncGenerator[RequestOutput, None]:
        request = EngineRequest(
            request_id or uuid.uuid4().hex,
            prompt_of(given),
            n=params.n,
            sampling=params.spec(),
            stop=params.stop_rules(),
            grammar=params.grammar(),
            best_of=params.best_of,
            thinking_token_budget=params.thinking_token_budget,
            adapter=adapter,
        )
        resolved = await asyncio.to_thread(self._assembly.intake.resolve, applied(given, request))
        answer = Answer(resolved, params.logprobs is not None)
        stream = self._client.stream(resolved)
        try:
            async for outputs in stream:
                for output in outputs:
                    answer.add(output)
                if answer.error:
                    raise EngineFault(answer.error)
                yield answer.output()
        finally:
            await stream.aclose()

    async def stream_text(
        self,
        prompt: PromptLike | Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        adapter: str = "",
    ) -> AsyncGenerator[str, None]:
        """Like `generate`, but yields only the new text of the first choice."""
        shown = 0
        async with aclosing(self.generate(prompt, sampling_params, request_id, adapter)) as stream:
            async for output in stream:
                text = output.outputs[0].text
                if len(text) > shown:
                    yield text[shown:]
                    shown = len(text)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        include_reasoning: bool | None = None,
        adapter: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Stream the answer to a conversation; otherwise like `generate`.

        Messages, tools and the other options are those of OpenAI's chat completions (docs/tools.md); None leaves an
        option out. An output separates reasoning and tool calls from the text, and has the answer as a message.

        Raises:
            RequestError: a message, option or parameter cannot be served.
        """
        options = ChatArguments(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            reasoning_effort=reasoning_effort,
            include_reasoning=include_reasoning,
        )
        request = read_chat(messages, options, self._assembly.card)
        return self._stream(request, sampling_params or self.get_default_sampling_params(), request_id, adapter)

    async def embed(
        self,
        prompt: PromptLike | Prompt,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        request_id: str = "",
        adapter: str = "",
    ) -> EmbeddingRequestOutput:
        """The vector of one prompt; arguments as for `LLM.embed`. Cancelling the task aborts the request.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
            Overloaded: the queue is full.
            EngineFault: the engine failed to compute the request, or it was aborted.
        """
        request = EngineRequest(
            request_id or uuid.uuid4().hex,
            prompt if isinstance(prompt, Prompt) else as_prompt(prompt),
            embedding=embedding_spec(pooling, normalize, dimensions, self._assembly.card.embedding),
            most_prompt_tokens=kept_tokens(truncate_prompt_tokens, self._assembly.card.max_model_len),
            adapter=adapter,
        )
        resolved = await asyncio.to_thread(self._assembly.intake.resolve, request)
        answer = Answer(resolved)
        async with aclosing(self._client.stream(resolved)) as stream:
            async for outputs in stream:
                for output in outputs:
                    answer.add(output)
        return answer.embedding()

    async def score(
        self,
        queries: PromptLike | Sequence[PromptLike],
        documents: PromptLike | Sequence[PromptLike],
        *,
        pooling: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts as `LLM.score` does, while other requests run. Cancelling the task aborts its requests.

        Raises:
            InvalidParameter: there is not exactly one query, and not one for each document.
            RequestError, Overloaded, EngineFault: as for `embed`.
        """
        ours, theirs = as_prompts(queries), as_prompts(documents)
        check_pairs(len(ours), len(theirs))
        tasks = [asyncio.create_task(self.embed(one, pooling=pooling, normalize=True)) for one in (*ours, *theirs)]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return scores(found[: len(ours)], found[len(ours) :])

    async def beam_search(self, prompt: PromptLike | Prompt, params: BeamSearchParams) -> BeamSearchOutput:
        """Search for the most likely continuations of a prompt as `LLM.beam_search` does, while other requests run.

        Cancelling the task aborts its requests.
        """
        given = prompt if isinstance(prompt, Prompt) else as_prompt(prompt)
        search = await asyncio.to_thread(BeamSearch, self._assembly.intake, given, params)
        while not search.done:
            queries = [asyncio.create_task(self._whole(query, search.query_params)) for query in search.queries()]
            try:
                search.advance(await asyncio.gather(*queries))
            finally:
                for query in queries:
                    query.cancel()
                await asyncio.gather(*queries, return_exceptions=True)
        return search.output()

    async def _whole(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        async with aclosing(self.generate(prompt, params)) as stream:
            outputs = [output async for output in stream]
        return outputs[-1]

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with finish reason `abort`. Unknown ids are not errors."""
        await self._client.abort(request_id)

    def health(self) -> Health:
        """The engine's state: whether it is alive or why not, requests running and waiting, free blocks."""
        return self._client.health()

    def close(self) -> None:
        """Stop the engine; live requests fail."""
        self._client.close()
        self._assembly.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)
