"""The command line that both examples have: RoseInfer's flags and ours."""

from __future__ import annotations

import argparse

from penstock import SamplingParams


def parse(description: str | None) -> argparse.Namespace:
    """Read the command line of an example; `--help` shows the description."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", "--checkpoint-path", default="smollm2-135m-instruct", help="what to load (default: %(default)s)")
    add("--tokenizer", "--tokenizer-name", default="", help="a directory with the tokenizer of a .pt file")
    add("--prompts", nargs="+", default=["hi, ", "hello,", "how"], help="texts to continue")
    add(
        "--max-tokens", "--max-new-tokens", type=int, default=100, help="most tokens to generate (default: %(default)s)"
    )
    add("--do-sample", action="store_true", help="draw at random; without it the most likely token is taken")
    add("--temperature", type=float, default=1.0, help="with --do-sample (default: %(default)s)")
    add("--top-k", type=int, default=0, help="0 takes all (default: %(default)s)")
    add("--top-p", type=float, default=1.0, help="1 takes all (default: %(default)s)")
    add("--seed", type=int, default=None, help="makes a random run repeatable")
    add(
        "--stop-on-eos", action=argparse.BooleanOptionalAction, default=True, help="end with the text, or go on past it"
    )
    add("--stream", action="store_true", help="print texts as they grow")
    add("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    add("--dtype", default="auto", help="auto, float32 or bfloat16 (default: %(default)s)")
    add("--bf16", dest="dtype", action="store_const", const="bfloat16", help="the same as --dtype bfloat16")
    add("--no-amp", dest="dtype", action="store_const", const="float32", help="the same as --dtype float32")
    return parser.parse_args()


def params_of(arguments: argparse.Namespace) -> SamplingParams:
    """Return the parameters that say how to sample, and when to stop."""
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature if arguments.do_sample else 0,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        ignore_eos=not arguments.stop_on_eos,
    )
