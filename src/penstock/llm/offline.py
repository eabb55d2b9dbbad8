"""`LLM`: batches of prompts, or the engine stepped by hand. One file, because every verb is a method of one class.

Runs in the caller's thread; nothing happens between calls. One owner: not thread-safe. What a verb needs besides the
engine is in the neighbouring files.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from penstock.app import Assembly, assemble, engine_config
from penstock.contract.config import DEFAULT_MODEL
from penstock.contract.errors import EngineFault, InvalidParameter
from penstock.contract.model import ModelCard, StepCost, StepRow
from penstock.contract.options import Front
from penstock.contract.request import EngineRequest, Prompt
from penstock.engine import StepOutputs, interrupts_held
from penstock.llm.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from penstock.llm.chat_request import ChatArguments, ChatRequest, applied, prompt_of, read_chats
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
from penstock.llm.request_book import RequestBook
from penstock.sampling import SamplingParams

__all__ = ["LLM"]


class LLM:
    """A model that generates for many prompts at once.

    Args:
        model: a catalogue name, a Hugging Face directory, a `.gguf` file, or `org/name`. A catalogue model that is not
            on disk yet is fetched.
        cache_dir: where fetched models are kept; None for the user's cache directory.
        options: options of `penstock.contract.config.EngineConfig`, by name; one that would have no effect is refused.

    Raises:
        SetupError: the model or an option cannot be used; the message names the file or the option.

    Example:
        >>> with LLM() as llm:
        ...     [answer] = llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=32))
        ...     print(answer.outputs[0].text)
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, cache_dir: Path | None = None, **options: Any) -> None:
        self._assembly: Assembly = assemble(engine_config(Front.NONE, model=model, **options), cache_dir)
        self._engine = self._assembly.engine
        self._answers: dict[str, Answer] = {}
        self._missed: dict[str, RequestOutput] = {}
        self._ids = itertools.count()
        self._book = RequestBook()
        self._calls: deque[Callable[[], None]] = deque()

    @property
    def scheduler(self) -> Any:
        """The scheduler, to inspect between steps."""
        return self._engine.scheduler

    @property
    def card(self) -> ModelCard:
        """The model's name and sizes."""
        return self._assembly.card

    @property
    def report(self) -> tuple[str, ...]:
        """The lines of the start report: model, device, memory."""
        return self._assembly.report

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that give none: the model's own defaults, else those of `SamplingParams`."""
        return SamplingParams.from_fields(dict(self.card.sampling_defaults))

    def cost(self, rows: Sequence[StepRow]) -> StepCost:
        """The cost of a step with these rows: the bytes that it reads, and its operations by kind."""
        return self._assembly.cost(rows)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str] = "",
        use_tqdm: bool = True,
        certify: bool = False,
    ) -> list[RequestOutput]:
        """Continue each prompt; results are in the order of the prompts.

        Args:
            prompts: a text, a list of texts, token ids, or a list of lists of token ids.
            sampling_params: one for all prompts, or one per prompt; None for `get_default_sampling_params()`.
            adapter: name of an adapter of the option `lora`, one for all prompts or one per prompt; "" for none.
            use_tqdm: show a progress bar.
            certify: give each output its `certificate`, which `penstock verify --certificate` checks.

        Raises:
            RequestError: a prompt or parameter cannot be served; no prompt was started.
        """
        return self._run(as_prompts(prompts), sampling_params, use_tqdm, adapter, certify)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        include_reasoning: bool | None = None,
        adapter: str | Sequence[str] = "",
        use_tqdm: bool = True,
        certify: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template; otherwise like `generate`.

        Messages, tools and the other options are those of OpenAI's chat completions (docs/tools.md); None leaves an
        option out. An output separates reasoning and tool calls from the text, and has the answer as a message.

        Raises:
            RequestError: a message, option or parameter cannot be served; no conversation was started.
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
        return self._run(read_chats(messages, options, self.card), sampling_params, use_tqdm, adapter, certify)

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        adapter: str | Sequence[str] = "",
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Turn each prompt into a vector: the model's hidden states, pooled. Results are in the order of the prompts.

        Args:
            prompts: as for `generate`.
            pooling: `mean` of all positions, or only the `last` or the first one (`cls`); None for what the model's
                files say (sentence-transformers' `modules.json`), else `mean`.
            normalize: scale each vector to length 1; None for what the model's files say, else True.
            dimensions: keep only this many leading values, and scale them again; None keeps all.
            truncate_prompt_tokens: keep only this many tokens of each prompt: the special tokens that the tokenizer
                adds to a text, and the text's first tokens. -1 keeps as many as fit the context; None refuses a prompt
                that is too long.
            adapter: as for `generate`.
            use_tqdm: show a progress bar.

        Raises:
            RequestError: a prompt or parameter cannot be served; no prompt was started.
            EngineFault: the engine failed to compute a prompt.
        """
        spec = embedding_spec(pooling, normalize, dimensions, self.card.embedding)
        most = kept_tokens(truncate_prompt_tokens, self.card.max_model_len)
        asked = as_prompts(prompts)
        requests = [
            EngineRequest(str(next(self._ids)), one, embedding=spec, most_prompt_tokens=most, adapter=name)
            for one, name in zip(asked, _adapters_of(adapter, len(asked)), strict=True)
        ]
        order = self._queue_all((request, False) for request in requests)
        return [answer.embedding() for answer in self._finish_all(order, "Embedding", use_tqdm)]

    def score(
        self,
        queries: PromptLike | Sequence[PromptLike],
        documents: PromptLike | Sequence[PromptLike],
        *,
        pooling: str | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts by the cosine of their embeddings: one query with every document, or pair by pair.

        Raises:
            InvalidParameter: there is not exactly one query, and not one for each document.
            RequestError: as for `embed`.
        """
        ours, theirs = as_prompts(queries), as_prompts(documents)
        check_pairs(len(ours), len(theirs))
        spec = embedding_spec(pooling, True, None, self.card.embedding)
        order = self._queue_all(
            (EngineRequest(str(next(self._ids)), one, embedding=spec), False) for one in (*ours, *theirs)
        )
        found = [answer.embedding() for answer in self._finish_all(order, "Scoring", use_tqdm)]
        return scores(found[: len(ours)], found[len(ours) :])

    def beam_search(
        self, prompts: PromptLike | Sequence[PromptLike], params: BeamSearchParams, *, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """Search for the most likely continuations of each prompt; see `penstock.llm.beam_search`.

        All beams of all prompts run as one batch. Slow without the prefix cache, which is on by default.

        Raises:
            RequestError: a prompt or parameter cannot be served.
            EngineFault: the engine failed to compute a prompt.
        """
        searches = [BeamSearch(self._assembly.intake, prompt, params) for prompt in as_prompts(prompts)]
        with tqdm(total=len(searches), desc="Searching", unit="prompt", disable=not use_tqdm) as bar:
            while growing := [search for search in searches if not search.done]:
                self._grow(growing)
                bar.update(sum(search.done for search in growing))
        return [search.output() for search in searches]

    def add_request(
        self,
        prompt: PromptLike | Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        on_text: Callable[[str], None] | None = None,
        adapter: str = "",
        certify: bool = False,
    ) -> str:
        """Queue one request and return its id; it joins the batch at the next `step`.

        Args:
            prompt: as for `generate`.
            sampling_params: None for `get_default_sampling_params()`.
            on_text: called with each piece of the first choice's text, at the end of the step that generated it.
            adapter: name of an adapter of the option `lora`; "" for none.
            certify: as for `generate`.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
        """
        given = prompt if isinstance(prompt, Prompt) else as_prompt(prompt)
        params = sampling_params or self.get_default_sampling_params()
        [request_id] = self._queue_all([(self._request(given, params, adapter, certify), params.logprobs is not None)])
        self._book.add(self._answers[request_id], on_text)
        return request_id

    def is_finished(self, request_id: str) -> bool:
        """Whether a request of `add_request` has ended.

        Raises:
            InvalidParameter: there is no such request, or `pop_output` took it; the last 1,024 that ended are kept.
        """
        return self._book.find(request_id).finished

    def get_output(self, request_id: str) -> RequestOutput:
        """The output of a request of `add_request` so far, finished or not; raises like `is_finished`."""
        return self._book.find(request_id).output()

    def pop_output(self, request_id: str) -> RequestOutput:
        """Like `get_output`, but forgets a finished answer, and `step` does not return it any more."""
        output = self.get_output(request_id)
        if output.finished:
            self._book.drop(request_id)
            self._missed.pop(request_id, None)
        return output

    def stream_text(self, request_id: str) -> Iterator[str]:
        """Yield the first choice's text piece by piece, from its beginning; steps the engine until the request ends.

        Other requests go on meanwhile; the next `step` returns their outputs. Leaving the loop early does not end the
        request; `abort_request` does.

        Raises:
            InvalidParameter: as for `is_finished`.
            EngineFault: the engine failed to compute the request.
        """
        answer, seen = self._book.find(request_id), 0
        while True:
            pieces = answer.pieces[seen:]
            seen += len(pieces)
            if text := "".join(pieces):
                yield text
            elif answer.finished:
                break
            else:
                self._advance(())
        self._missed.pop(request_id, None)
        if answer.error:
            raise EngineFault(answer.error)

    def step(self) -> list[RequestOutput]:
        """Compute one step; return the requests that progressed, as far as they got; a finished one for the last time.

        That includes requests of `add_request` that progressed during a `generate`.
        """
        if self._engine.has_work:
            self._advance(())
        moved, self._missed = self._missed, {}
        return list(moved.values())

    def has_unfinished_requests(self) -> bool:
        """Whether a `step` would compute or return anything; the next one returns progress made during a `generate`."""
        return self._engine.has_work or bool(self._missed)

    def abort_request(self, request_id: str) -> list[RequestOutput]:
        """End a request now; unknown and finished ids are not errors."""
        with interrupts_held():
            ended = [answer.output() for answer in self._fold(self._engine.abort(request_id))]
            for output in ended:  # its earlier state must not be returned after its end
                self._missed.pop(output.request_id, None)
        self._tell()
        return ended

    def close(self) -> None:
        """Drop every request and free the model's memory."""
        self._abort_all(list(self._answers))
        self._assembly.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _grow(self, searches: Sequence[BeamSearch]) -> None:
        """Advance every search by one step, all of them in one batch."""
        queries = [(query, search.query_params) for search in searches for query in search.queries()]
        answers = iter(self._run([query for query, _ in queries], [params for _, params in queries], use_tqdm=False))
        for search in searches:
            search.advance([next(answers) for _ in search.queries()])

    def _run(
        self,
        asked: Sequence[Prompt | ChatRequest],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        adapter: str | Sequence[str] = "",
        certify: bool = False,
    ) -> list[RequestOutput]:
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_for_each(given, len(asked))
        names = _adapters_of(adapter, len(asked))
        order = self._queue_all(
            (self._request(*each, certify), each[1].logprobs is not None)
            for each in zip(asked, params, names, strict=True)
        )
        return [answer.output() for answer in self._finish_all(order, "Generating", use_tqdm)]

    def _finish_all(self, order: Mapping[str, None], doing: str, use_tqdm: bool) -> list[Answer]:
        """Step until each of these requests has its answer; return the answers in order."""
        finished: dict[str, Answer] = {}
        try:
            with tqdm(total=len(order), desc=doing, unit="prompt", disable=not use_tqdm) as bar:
                while len(finished) < len(order):
                    for answer in self._advance(order):
                        if answer.finished:
                            finished[answer.id] = answer
                            bar.update()
        except BaseException:  # above all Ctrl-C: nothing would read what the requests still generate
            self._abort_all(order)
            raise
        return [finished[request_id] for request_id in order]

    def _advance(self, order: Container[str]) -> list[Answer]:
        """Compute one step; return the answers in `order` that progressed. Other output waits for the next `step`."""
        with interrupts_held():  # keep the step's output before an interrupt reaches the caller
            moved = self._fold(self._engine.step())
            self._missed |= {answer.id: answer.output() for answer in moved if answer.id not in order}
        self._tell()
        return [answer for answer in moved if answer.id in order]

    def _queue_all(self, requests: Iterable[tuple[EngineRequest, bool]]) -> dict[str, None]:
        """Queue all (request, wants log probabilities) pairs or none; return the ids in order."""
        order: dict[str, None] = {}
        try:
            for request, wants_logprobs in requests:
                order[request.id] = None
                self._queue(request, wants_logprobs)
        except BaseException:
            self._abort_all(order)
            raise
        return order

    def _abort_all(self, request_ids: Iterable[str]) -> None:
        with interrupts_held():  # a second Ctrl-C must find all of them ended
            for request_id in request_ids:
                self._fold(self._engine.abort(request_id))

    def _request(
        self, given: Prompt | ChatRequest, params: SamplingParams, adapter: str = "", certify: bool = False
    ) -> EngineRequest:
        request = EngineRequest(
            str(next(self._ids)),
            prompt_of(given),
            n=params.n,
            sampling=params.spec(),
            stop=params.stop_rules(),
            grammar=params.grammar(),
            best_of=params.best_of,
            thinking_token_budget=params.thinking_token_budget,
            adapter=adapter,
            certified=certify,
        )
        return applied(given, request)

    def _queue(self, request: EngineRequest, wants_logprobs: bool) -> None:
        resolved = self._assembly.intake.resolve(request)
        with interrupts_held():
            self._engine.submit(resolved)
            self._answers[request.id] = Answer(resolved, wants_logprobs)

    def _tell(self) -> None:
        """Make all listener calls that are due; then raise the first error that they raised, if any."""
        failure: BaseException | None = None
        while self._calls:
            try:
                self._calls.popleft()()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _fold(self, outputs: StepOutputs) -> list[Answer]:
        """Add outputs to their answers; return the answers that progressed, and stop keeping the finished ones."""
        moved: dict[str, Answer] = {}
        for request_id, output in outputs:
            moved[request_id] = self._answers[request_id]
            moved[request_id].add(output)
        self._calls.extend(self._book.moved(moved.values()))
        for request_id, answer in moved.items():
            if answer.finished:
                del self._answers[request_id]
        return list(moved.values())


def _adapters_of(given: str | Sequence[str], count: int) -> Sequence[str]:
    if isinstance(given, str):
        return [given] * count
    if len(given) != count:
        raise InvalidParameter("adapter", f"has {len(given)} entries for {count} prompts")
    return given


def _one_for_each(given: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    if isinstance(given, SamplingParams):
        return [given] * count
    if len(given) != count:
        raise InvalidParameter("sampling_params", f"has {len(given)} entries for {count} prompts")
    return given
