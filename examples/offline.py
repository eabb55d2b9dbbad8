"""Many prompts at once: the library answers them in shared batches.

python examples/offline.py --prompts "hi, " "hello," "how" --max-new-tokens 100 --temperature 0.8 --do-sample
"""

from __future__ import annotations

import argparse

from penstock import LLM, SamplingParams


def main() -> None:
    """Run the example."""
    arguments = parse()
    options = {name: getattr(arguments, name) for name in ("tokenizer", "device", "dtype")}
    with LLM(arguments.model, **options) as llm:
        if arguments.stream:
            show_as_they_come(llm, arguments.prompts, params_of(arguments))
            return
        for number, output in enumerate(llm.generate(arguments.prompts, params_of(arguments))):
            print(f"### request {number}\n{output.prompt}{output.outputs[0].text}\n")


def show_as_they_come(llm: LLM, prompts: list[str], params: SamplingParams) -> None:
    """Print each text piece by piece; while one is printed, all are computed."""
    ids = [llm.add_request(prompt, params) for prompt in prompts]
    for number, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        print(f"### request {number}\n{prompt}", end="")
        for piece in llm.stream_text(request_id):
            print(piece, end="", flush=True)
        print("\n")


def parse() -> argparse.Namespace:
    """Read the command line; RoseInfer's flags and ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    add("--stream", action="store_true", help="print each text as it grows")
    add("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    add("--dtype", default="auto", help="auto, float32 or bfloat16 (default: %(default)s)")
    add("--bf16", dest="dtype", action="store_const", const="bfloat16", help="the same as --dtype bfloat16")
    add("--no-amp", dest="dtype", action="store_const", const="float32", help="the same as --dtype float32")
    return parser.parse_args()


def params_of(arguments: argparse.Namespace) -> SamplingParams:
    """How to sample, and when to stop."""
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature if arguments.do_sample else 0,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        ignore_eos=not arguments.stop_on_eos,
    )


if __name__ == "__main__":
    main()
