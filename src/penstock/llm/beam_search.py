"""Beam search: finds the most likely continuations of a prompt by growing several of them in parallel.

Decides which continuations keep growing, which are complete and when the search ends. In each step the engine generates
one more token after each beam, with the top alternatives; the prefix cache makes the shared past cheap.
Does not call the engine: the code that drives a search answers its queries.

The rules are `transformers`' own (`num_beams`, `early_stopping=False`). All one-token extensions of the beams are
ranked by likelihood: extensions among the first `beam_width` that end are complete, and the first `beam_width` that do
not end keep growing. A complete continuation is scored by its summed log probability over its generated length to the
power of `length_penalty`. The search ends when `beam_width` are complete and the most likely growing one, scored as if
it ended now, is no better than the worst complete one; or when `max_tokens` are reached, where the first `beam_width`
extensions are complete in any case. Beam search goes back to Graves, "Sequence transduction with recurrent neural
networks" (2012); dividing by a length goes back to Wu et al., "Google's neural machine translation system" (2016),
section 7, where the denominator is another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.contract.errors import EngineFault, InvalidParameter
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.request import EngineRequest, Prompt, StopRules, TokenPrompt
from penstock.engine import Intake
from penstock.llm.outputs import Logprob, RequestOutput
from penstock.sampling import SamplingParams
from penstock.sampling.kinds import Flag, Integer, Kind, Number
from penstock.sampling.parameters.logprobs_mode import PROCESSED
from penstock.sampling.parameters.temperature import GREEDY

__all__ = ["BeamSearch", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"]

_KINDS: dict[str, Kind] = {
    "beam_width": Integer(1, DEFAULT_LIMITS.max_choices),
    "max_tokens": Integer(1, 2**31 - 1),
    "ignore_eos": Flag(),
    "temperature": Number(0.0, 2.0),
    "length_penalty": Number(-10.0, 10.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """The parameters of a beam search, under vLLM's names.

    Attributes:
        beam_width: how many continuations grow at once, and the most that are returned.
        max_tokens: the most tokens to generate.
        ignore_eos: let no continuation end before `max_tokens`.
        temperature: rank by the probabilities at this temperature; 0, like 1, takes the model's own.
        length_penalty: a sum of log probabilities is divided by the length to this power: 0 favours short
            continuations, 1 compares means, more favours long ones.

    Raises:
        InvalidParameter: a value has the wrong type or is out of range; names the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            object.__setattr__(self, name, kind.check(name, getattr(self, name)))


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A prompt with one complete continuation.

    Attributes:
        tokens: the prompt's tokens, then the generated ones; an end-of-sequence id is included.
        text: all of `tokens` as text, with special tokens written out.
        cum_logprob: sum of the generated tokens' log probabilities.
        score: the value by which continuations are ranked.
        logprobs: one `{token id: Logprob}` per generated token: the top tokens at its position.
        finish_reason: "stop" for an end-of-sequence id, "length" for `max_tokens`.
        stop_reason: that id; None for "length".
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    logprobs: list[dict[int, Logprob]]
    finish_reason: str
    stop_reason: int | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The result for one prompt: at most `beam_width` sequences, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class _Beam:
    """One continuation so far; `logprobs` has one entry per token."""

    tokens: tuple[int, ...] = ()
    total: float = 0.0
    logprobs: tuple[Mapping[int, Logprob], ...] = ()


class BeamSearch:
    """The search for one prompt. Owned by the call that drives it.

    Until `done`, give `queries` to the engine with `query_params`, and its answers to `advance`.

    Raises:
        RequestError: the prompt cannot be served, or the beam is too wide for a model with this many end-of-sequence
            ids.
    """

    def __init__(self, intake: Intake, prompt: Prompt, params: BeamSearchParams) -> None:
        rules = StopRules(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
        sampling = SamplingParams(temperature=GREEDY).spec()
        [request] = intake.resolve(EngineRequest("beam-search", prompt, sampling=sampling, stop=rules)).sequences
        self._intake = intake
        self._params = params
        self._prompt = request.prompt
        self._ends = frozenset(request.stop.token_ids)
        self._max_tokens = request.stop.max_tokens
        self._running = [_Beam()]
        self._complete: list[tuple[float, _Beam]] = []  # best first
        self.query_params = self._query_params()

    @property
    def done(self) -> bool:
        """Whether the search has ended."""
        return not self._running

    def queries(self) -> list[TokenPrompt]:
        """The prompts to continue by one token, in the order that `advance` expects."""
        return [TokenPrompt((*self._prompt, *beam.tokens)) for beam in self._running]

    def advance(self, answers: Sequence[RequestOutput]) -> None:
        """Take the answers to `queries`, in their order.

        Raises:
            EngineFault: one of them failed.
        """
        grown = [new for beam, answer in zip(self._running, answers, strict=True) for new in self._grown(beam, answer)]
        grown.sort(key=lambda beam: -beam.total)  # a stable sort: ties stay in the order of their beams
        width = self._params.beam_width
        length = len(grown[0].tokens)
        last = length == self._max_tokens
        ended = [beam for beam in grown[:width] if last or beam.tokens[-1] in self._ends]
        complete = [*self._complete, *((self._score(beam), beam) for beam in ended)]
        self._complete = sorted(complete, key=lambda scored: -scored[0])[:width]
        running = [] if last else [beam for beam in grown if beam.tokens[-1] not in self._ends][:width]
        self._running = running if running and self._may_improve(running[0]) else []

    def output(self) -> BeamSearchOutput:
        """The sequences found so far."""
        return BeamSearchOutput([self._sequence(score, beam) for score, beam in self._complete])

    def _query_params(self) -> SamplingParams:
        # This many per beam always include `beam_width` that do not end, and every end among the first `beam_width`.
        alternatives = self._params.beam_width + len(self._ends)
        if alternatives > DEFAULT_LIMITS.max_logprobs:
            most = DEFAULT_LIMITS.max_logprobs - len(self._ends)
            message = f"may be at most {most} for this model, which has {len(self._ends)} end-of-sequence ids"
            raise InvalidParameter("beam_width", message)
        if self._params.temperature == GREEDY:
            return SamplingParams(temperature=GREEDY, max_tokens=1, ignore_eos=True, logprobs=alternatives)
        return SamplingParams(
            temperature=self._params.temperature,
            max_tokens=1,
            ignore_eos=True,
            logprobs=alternatives,
            logprobs_mode=PROCESSED,
            seed=0,  # a token is drawn, but not used
        )

    def _grown(self, beam: _Beam, answer: RequestOutput) -> list[_Beam]:
        """`beam` extended by each of the top tokens, most likely first."""
        if answer.error:
            raise EngineFault(answer.error)
        logprobs = answer.outputs[0].logprobs
        assert logprobs, "log probabilities were asked for, and one token is always generated"
        most = self.query_params.logprobs
        assert most is not None
        here = {token: found for token, found in logprobs[0].items() if found.rank <= most}
        tried = sorted(here.items(), key=lambda entry: entry[1].rank)
        return [
            _Beam((*beam.tokens, token), beam.total + found.logprob, (*beam.logprobs, here)) for token, found in tried
        ]

    def _score(self, beam: _Beam) -> float:
        score: float = beam.total / len(beam.tokens) ** self._params.length_penalty
        return score

    def _may_improve(self, best: _Beam) -> bool:
        return len(self._complete) < self._params.beam_width or self._score(best) > self._complete[-1][0]

    def _sequence(self, score: float, beam: _Beam) -> BeamSearchSequence:
        tokens = (*self._prompt, *beam.tokens)
        ended = beam.tokens[-1] in self._ends
        return BeamSearchSequence(
            tokens=list(tokens),
            text=self._intake.detokenize(tokens),
            cum_logprob=beam.total,
            score=score,
            logprobs=[dict(here) for here in beam.logprobs],
            finish_reason="stop" if ended else "length",
            stop_reason=beam.tokens[-1] if ended else None,
        )
