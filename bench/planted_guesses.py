"""Measures what a draft model saves when its guesses are right with a planted chance, beside what it should save.

    python bench/planted_guesses.py --rounds 3 --json bench/results/FILE.json

`make_random_checkpoint.py` writes two random models, a large one and a small one. The small one computes what a draft
model has to. Then its guess is replaced where the runner takes it: each token by the token that the large model will
draw or, with chance 1 - p, decided by a hash of its place, by a different token. So the cost is that of a draft model,
and the agreement is known.

First the time of steps with guesses of a fixed length is measured, for each length. With the chance p, a guess of
length k yields (1 - p^(k+1)) / (1 - p) tokens a step. `formula` divides this by the time of such steps and takes the
best length, as a multiple of the tokens a second without guesses. `measured` is the multiple that the scheduler
reaches, which knows neither p nor any times beforehand. Every token is compared with the run without guesses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from torch import Tensor

from make_random_checkpoint import configure, write_checkpoint
from penstock.bench.machine import load_average, provenance
from penstock.contract.config import EngineConfig
from penstock.contract.errors import EngineFault
from penstock.contract.events import Finished, Generated
from penstock.contract.plan import Admit, GuessWork, Row, RowResult, StepPlan
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import Scheduler
from penstock.draft_loading import drafter_of, load_guesser
from penstock.exec.draft_model import DraftModel
from penstock.exec.kv_store import KVStore
from penstock.exec.runner import TorchRunner
from penstock.loading import LoadedModel, find_model, load_model
from penstock.model_text import open_model_text
from penstock.sampling import SamplingParams

__all__ = ["PlantedGuesses", "expected", "main"]

LENGTHS = range(9)
VOCABULARY = 8192
LARGE = {"hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4}
SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
GREEDY = SamplingParams(temperature=0).spec()
PROMPT, WARM, NEW = 32, 64, 320


class PlantedGuesses:
    """A draft model whose guesses are replaced; see `exec.runner.RowGuesser`.

    Args:
        model: the draft model, which computes as usual.
        answers: by prompt, the tokens that will be drawn after it.
        right: the chance that a guessed token is right.
        vocab_size: wrong tokens lie below it.
    """

    reads_hidden = False
    reads_taps = 0

    def __init__(
        self, model: DraftModel, answers: Mapping[tuple[int, ...], Sequence[int]], right: float, vocab_size: int
    ) -> None:
        self.kv: KVStore = model.kv
        self._model, self._answers, self._right, self._vocab_size = model, answers, right, vocab_size
        self._live: dict[int, tuple[tuple[int, ...], int]] = {}  # by slot: its prompt, and how many tokens are drawn

    def admit(self, admit: Admit) -> None:
        """See `RowGuesser`."""
        self._live[admit.slot] = admit.tokens[: admit.prompt_tokens], len(admit.tokens) - admit.prompt_tokens
        self._model.admit(admit)

    def release(self, slot: int) -> None:
        """See `RowGuesser`."""
        self._model.release(slot)

    def advance(self, row: Row) -> None:
        """See `RowGuesser`."""
        self._model.advance(row)

    def reset(self) -> None:
        """See `RowGuesser`."""
        self._model.reset()

    def borrowed(self, block: int) -> AbstractContextManager[None]:
        """See `RowGuesser`."""
        return self._model.borrowed(block)

    def follow(
        self, rows: Sequence[Row], results: Sequence[RowResult], hidden: Mapping[int, Tensor]
    ) -> tuple[tuple[RowResult, ...], GuessWork]:
        """See `RowGuesser`."""
        said, work = self._model.follow(rows, results, hidden)
        return tuple(self._planted(result) for result in said), work

    def _planted(self, result: RowResult) -> RowResult:
        prompt, drawn = self._live[result.slot]
        drawn += len(result.tokens)
        self._live[result.slot] = prompt, drawn
        coming = self._answers.get(prompt, ())[drawn : drawn + len(result.guess)]
        places = enumerate(coming, start=drawn)
        return result._replace(guess=tuple(self._one(token, hash(prompt), at) for at, token in places))

    def _one(self, token: int, prompt: int, at: int) -> int:
        luck = Random(f"{prompt}/{at}").random()
        return token if luck < self._right else (token + 1) % self._vocab_size


def expected(right: float, seconds: Sequence[float]) -> tuple[float, int]:
    """The tokens a second of the best fixed length, as a multiple of the rate without guesses, and that length.

    Args:
        right: the chance that a guessed token is right if the guessed tokens before it are.
        seconds: seconds of a step with guesses of each length, from 0.
    """
    rates = [sum(right**power for power in range(length + 1)) / taken for length, taken in enumerate(seconds)]
    best = max(range(len(rates)), key=rates.__getitem__)
    return rates[best] / rates[0], best


class _Pair:
    """Both models, and runners for them."""

    def __init__(self, large: LoadedModel, small: LoadedModel, streams: int) -> None:
        self.large, self._small = large, small
        longest = PROMPT + NEW + 16
        self.config = SchedulerConfig(
            num_blocks=streams * (longest // 16 + 2),
            max_num_seqs=streams,
            max_num_batched_tokens=512,
            max_model_len=longest,
            prefix_caching=False,
            draft_context=small.shape.max_positions,
        )

    def drafter(self) -> DraftModel:
        config = self.config
        sizes = config.num_blocks, config.block_size, config.max_num_seqs, config.max_model_len
        return drafter_of(self._small, self.large, *sizes)

    def runner(self, drafter: PlantedGuesses | DraftModel | None) -> TorchRunner:
        kv = self.large.kv_store(self.config.num_blocks, self.config.block_size)
        runner = self.large.runner(kv, self.config.max_num_seqs, self.config.max_model_len, drafter=drafter)
        runner.warm_up()
        return runner


def step_seconds(pair: _Pair, streams: int, repeats: int) -> list[float]:
    """The median time of a step with guesses of each length, all of them wrong: it draws one token a stream."""
    runner, blocks = pair.runner(pair.drafter()), -(-pair.config.max_model_len // pair.config.block_size)
    found, step = [], 0
    admits = tuple(
        Admit(n, f"s{n}", (n + 3,) * PROMPT, tuple(range(n * blocks, (n + 1) * blocks)), 0, GREEDY, 0)
        for n in range(streams)
    )
    rows = tuple(Row(n, 0, PROMPT, (), True, follow=PROMPT + 1, guesses=1) for n in range(streams))
    results = {result.slot: result.tokens for result in runner.run(StepPlan(step, (), admits, rows)).rows}
    length = PROMPT + 1
    for count in LENGTHS:
        times = []
        for _ in range(repeats):
            step += 1
            # No stream draws its last token plus one, so the first draft is wrong and a step yields one token.
            drafts = {slot: ((tokens[-1].id + 1) % VOCABULARY,) * count for slot, tokens in results.items()}
            rows = tuple(
                Row(n, length - 1, 1 + count, (), True, drafts[n], follow=count + 2 if count else 0, guesses=count)
                for n in range(streams)
            )
            result = runner.run(StepPlan(step, (), (), rows))
            results = {of.slot: of.tokens for of in result.rows}
            if any(len(tokens) != 1 for tokens in results.values()):
                raise EngineFault("a draft that was meant to be wrong was right: take another seed")
            length += 1
            times.append(result.seconds)
        found.append(statistics.median(times[1:]))
    return found


def rate(pair: _Pair, prompts: Sequence[tuple[int, ...]], drafter: PlantedGuesses | None) -> tuple[float, list[Any]]:
    """Tokens a second until the first answer ends, after a round that is not measured; and all answers."""
    config = pair.config if drafter is not None else replace(pair.config, draft_context=0)
    scheduler, runner = Scheduler(config), pair.runner(drafter)
    for tokens in (WARM, NEW):
        answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        for number, prompt in enumerate(prompts):
            scheduler.submit(SequenceRequest(str(number), prompt, sampling=GREEDY, stop=StopRules(max_tokens=tokens)))
        seconds, drawn, ended = 0.0, 0, False
        while scheduler.has_work:
            plan = scheduler.plan()
            result = runner.run(plan)
            if not ended and all(answers.values()):
                seconds, drawn = seconds + result.seconds, drawn + result.num_tokens
            for event in scheduler.commit(plan, result):
                if isinstance(event, Generated):
                    answers[event.seq_id].append(event.token)
                ended = ended or isinstance(event, Finished)
    return drawn / seconds, list(answers.values())


def measure(pair: _Pair, streams: int, chances: Sequence[float], rounds: int) -> list[dict[str, Any]]:
    """A row for each chance: what was measured, in turns with runs without guesses, and what was expected.

    Raises:
        EngineFault: guesses changed an answer.
    """
    luck = Random(streams)
    prompts = [tuple(luck.randrange(VOCABULARY) for _ in range(PROMPT)) for _ in range(streams)]
    _, answers = rate(pair, prompts, None)
    planted = dict(zip(prompts, answers, strict=True))
    rows = []
    for right in chances:
        ratios, costs = [], []
        for _ in range(rounds):
            costs.append(step_seconds(pair, streams, 9))
            plain, again = rate(pair, prompts, None)
            drafter = PlantedGuesses(pair.drafter(), planted, right, VOCABULARY)
            guessed, other = rate(pair, prompts, drafter)
            if not again == other == answers:
                raise EngineFault("guesses changed an answer; please report this")
            ratios.append(guessed / plain)
        seconds = [statistics.median(column) for column in zip(*costs, strict=True)]
        formula, length = expected(right, seconds)
        measured = statistics.median(ratios)
        rows.append(
            {
                "streams": streams,
                "right": right,
                "formula": formula,
                "best_length": length,
                "measured": measured,
                "measured_by_formula": measured / formula,
                "every_run": ratios,
                "step_seconds": seconds,
            }
        )
        print(
            f"{streams} streams, {right:.2f} right: {measured:.2f} times, {formula:.2f} by the formula with {length}"
            f" tokens a guess, {measured / formula:.3f} of it",
            flush=True,
        )
    return rows


def main() -> None:
    """Write the models, measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--right", type=float, nargs="+", default=[0.0, 0.5, 0.7, 0.8, 0.9])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    head = provenance()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("large", "small")]
        for path, sizes in zip(paths, (LARGE, SMALL), strict=True):
            inner = {"intermediate_size": 3 * sizes["hidden_size"], "vocab_size": VOCABULARY}
            write_checkpoint(path, configure("llama", {**sizes, **inner, "max_position_embeddings": 2048}))
        config = EngineConfig(model=str(paths[0]), draft_model=str(paths[1]))
        large = load_model(config, find_model(config), print)
        files = find_model(replace(config, model=config.draft_model))
        _, small = load_guesser(config, files, open_model_text(config, large.files.text), large, print)
        assert small is not None
        for streams in options.streams:
            rows += measure(_Pair(large, small, streams), streams, options.right, options.rounds)
    record = head | {"kind": "planted-guesses", "large": LARGE, "small": SMALL, "rows": rows}
    if options.json is not None:
        text = json.dumps(record | {"load_average_after": load_average()}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
