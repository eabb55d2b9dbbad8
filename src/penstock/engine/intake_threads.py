"""Resolves requests in worker threads, off the event loop, and notes which ones are aborted meanwhile.

Requests that may have to wait for a process have separate threads: a request with a grammar waits for the grammar's
verdict, a conversation for its rendering, a long prompt for its turn to be tokenised.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from penstock.contract.ports import Tokenized
from penstock.contract.request import ChatPrompt, EngineRequest, Prompt, TextPrompt, TokenPrompt
from penstock.engine.intake import GIANT_CHARS, Intake, ResolvedRequest
from penstock.thread_turns import go_last

__all__ = ["IntakeThreads"]


GUIDED_THREADS = 24
"""Threads for requests with grammars: more than may wait for verdicts, so that known grammars find a free one."""
CHAT_THREADS = 32
"""Threads for conversations: more than one API key's renderings may occupy."""
GIANT_THREADS = 64
"""Threads for long prompts: about as many as may wait and be tokenised at once; further ones wait for a thread."""


class IntakeThreads:
    """An `Intake` as event loops use it."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._guided = ThreadPoolExecutor(GUIDED_THREADS, thread_name_prefix="grammars")
        self._chats = ThreadPoolExecutor(CHAT_THREADS, thread_name_prefix="chats")
        self._giants = ThreadPoolExecutor(GIANT_THREADS, thread_name_prefix="giants", initializer=go_last)
        self._resolving: set[str] = set()  # ids of requests that are not resolved yet
        self._aborted_early: set[str] = set()  # ids among them that were aborted meanwhile

    async def resolve(self, request: EngineRequest) -> ResolvedRequest:
        """See `Intake.resolve`. Ask `take_abort` before the request is submitted."""
        self._resolving.add(request.id)
        try:
            threads = self._threads_for(request.prompt, guided=request.grammar is not None)
            return await asyncio.get_running_loop().run_in_executor(threads, self._intake.resolve, request)
        except BaseException:
            self._aborted_early.discard(request.id)
            raise
        finally:
            self._resolving.discard(request.id)

    def note_abort(self, request_id: str) -> bool:
        """Note that a request was aborted while it is resolved. False if it is not: it may be submitted already."""
        if request_id not in self._resolving:
            return False
        self._aborted_early.add(request_id)
        return True

    def take_abort(self, request_id: str) -> bool:
        """Whether the request was aborted while it was resolved; forgets it."""
        aborted = request_id in self._aborted_early
        self._aborted_early.discard(request_id)
        return aborted

    async def tokenize(self, prompt: Prompt, tenant: str = "") -> Tokenized:
        """See `EngineClient.tokenize`."""
        threads = self._threads_for(prompt)
        return await asyncio.get_running_loop().run_in_executor(threads, self._intake.tokenize, prompt, tenant)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """See `EngineClient.detokenize`."""
        return await asyncio.to_thread(self._intake.detokenize, token_ids)

    def close(self) -> None:
        """Take no more requests; does not wait for any."""
        for threads in (self._guided, self._chats, self._giants):
            threads.shutdown(wait=False, cancel_futures=True)

    def _threads_for(self, prompt: Prompt, *, guided: bool = False) -> ThreadPoolExecutor | None:
        if _chars(prompt) >= GIANT_CHARS:
            return self._giants
        if guided:
            return self._guided
        return self._chats if isinstance(prompt, ChatPrompt) else None


def _chars(prompt: Prompt) -> int:
    """Number of characters to tokenise, without those that a template adds."""
    match prompt:
        case TextPrompt(text):
            return len(text)
        case ChatPrompt():
            return prompt.num_chars
        case TokenPrompt():
            return 0
