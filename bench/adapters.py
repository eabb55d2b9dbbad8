"""Measures what LoRA adapters cost: eight random ones, interleaved in one batch, against the same requests without.

    python bench/adapters.py --rounds 3 --json bench/results/FILE.json

One engine answers the same requests with adapters and without, in turns; a step without adapters runs the same program
as in an engine that takes none. Afterwards each request is repeated alone, and the answer must have the same tokens and
log probabilities to the bit. On a machine that is also doing other work, use `--threads 1`: then the processor time of
the one thread is measured too, and the share by that time is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock import LLM, SamplingParams
from penstock.bench.machine import load_average, provenance
from penstock.contract.config import DEFAULT_MODEL, EngineConfig
from penstock.loading import find_model, plan_model, resolve_choices
from penstock.nn.adapters import sites_of
from penstock.weights.safetensors_writer import OutTensors, write_safetensors

__all__ = ["main", "write_adapters"]

RANKS = (4, 8, 16, 32)
COUNT = 8


def write_adapters(folder: Path, config: EngineConfig, ranks: Sequence[int]) -> dict[str, str]:
    """Write `COUNT` random adapters for all linear modules of a model, of these ranks in turn; their paths by name."""
    files = find_model(config)
    program = plan_model(config, files, resolve_choices(config, files)).program
    written = {}
    for index in range(COUNT):
        generator, rank = torch.Generator().manual_seed(index), ranks[index % len(ranks)]
        tensors, names = {}, set()
        for linear in sites_of(program):
            for module in linear.modules:
                name = f"base_model.model.{module.name}"
                names.add(module.name.rpartition(".")[2])
                down = torch.randn(rank, linear.weight.inputs, generator=generator) * linear.weight.inputs**-0.5
                up = torch.randn(module.outputs, rank, generator=generator) * 0.05 * rank**-0.5
                tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = down, up
        directory = folder / f"adapter-{index}"
        directory.mkdir()
        sizes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_safetensors(directory / "adapter_model.safetensors", [OutTensors(sizes, lambda made=tensors: made)])
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(names)}
        (directory / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        written[directory.name] = str(directory)
    return written


def _requests(count: int, tokens: int) -> tuple[list[str], list[SamplingParams]]:
    prompts = [f"Number {index}: once upon a time, there was" for index in range(count)]
    return prompts, [SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)] * count


def _answers(llm: LLM, prompts: list[str], params: list[SamplingParams], names: list[str]) -> list[Any]:
    made = [answer.outputs[0] for answer in llm.generate(prompts, params, adapter=names, use_tqdm=False)]
    return [
        [(token, of[token].logprob) for token, of in zip(each.token_ids, each.logprobs or (), strict=True)]
        for each in made
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    options = {"dtype": asked.dtype, "quantization": asked.quantization, "max_num_seqs": asked.max_num_seqs}
    config = EngineConfig(model=asked.model, **options)
    prompts, params = _requests(asked.requests, asked.tokens)
    before = load_average()
    rates: dict[str, list[float]] = {"none": [], "adapters": []}
    given: dict[str, list[float]] = {"none": [], "adapters": []}
    with tempfile.TemporaryDirectory() as folder:
        paths = write_adapters(Path(folder), config, asked.ranks)
        names = [list(paths)[index % COUNT] for index in range(asked.requests)]
        shared = {**options, "threads": asked.threads, "max_lora_rank": max(asked.ranks)}
        shared |= {"speculate": False, "prefix_caching": False}
        with LLM(asked.model, lora=paths, **shared) as llm:
            together: list[Any] = []
            for _ in range(asked.rounds):
                for kind, of_kind in (("none", [""] * asked.requests), ("adapters", names)):
                    began, own = time.perf_counter(), time.thread_time()
                    together = _answers(llm, prompts, params, of_kind)
                    given[kind].append(time.thread_time() - own)
                    rates[kind].append(asked.requests * asked.tokens / (time.perf_counter() - began))
            differ = sum(
                _answers(llm, [prompt], [one], [name]) != [answer]
                for prompt, one, name, answer in zip(prompts, params, names, together, strict=True)
            )
    medians = {kind: statistics.median(each) for kind, each in rates.items()}
    share = medians["adapters"] / medians["none"]
    print(f"without adapters {medians['none']:.0f} tokens/s, with {COUNT} of ranks {asked.ranks}: ", end="")
    print(f"{medians['adapters']:.0f} tokens/s, {share:.0%}; {differ} of {asked.requests} answers differ from alone")
    if asked.threads == 1:
        of_thread = statistics.median(given["none"]) / statistics.median(given["adapters"])
        print(f"of the thread's own time: {of_thread:.0%}")
    if asked.json:
        what = {name: value for name, value in vars(asked).items() if name != "json"}
        record = {"what": what, "rates": rates, "thread_seconds": given, "share": share, "differ": differ}
        record |= {"machine": provenance(), "load": before}
        asked.json.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
