"""Continuous batching, watched step by step: requests join and leave while others decode.

Starts with the given prompts, adds "Hello, world!" after two steps.

    python examples/online.py --prompts "hi, " "hello," "how" --max-tokens 100 --temperature 0.8 --top-p 0.95
"""

from __future__ import annotations

import argparse

from penstock import LLM, RequestOutput, SamplingParams

LATE_PROMPT = "Hello, world!"
LATE_STEP = 2


def main() -> None:
    """Run the example."""
    arguments = parse()
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        ignore_eos=arguments.ignore_eos,
    )
    with LLM(arguments.model, device=arguments.device, dtype=arguments.dtype, max_num_seqs=4) as llm:
        for output in run(llm, arguments.prompts, params, stream=arguments.stream):
            print(f"### request {output.request_id}\n{output.prompt}{output.outputs[0].text}\n")


def run(llm: LLM, prompts: list[str], params: SamplingParams, *, stream: bool) -> list[RequestOutput]:
    """Step until everything is finished; the requests in the order in which they were added."""
    ids = [llm.add_request(prompt, params) for prompt in prompts]
    finished: dict[str, RequestOutput] = {}
    steps = 0
    while llm.has_unfinished_requests():
        for output in llm.step():
            if stream:
                print(f"step {steps}, request {output.request_id}: {output.outputs[0].text!r}")
            if output.finished:
                finished[output.request_id] = output
        steps += 1
        if steps == LATE_STEP:
            ids.append(llm.add_request(LATE_PROMPT, params))
    return [finished[request_id] for request_id in ids]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what to load (default: %(default)s)")
    parser.add_argument("--prompts", nargs="+", default=["hi, ", "hello,", "how"], help="texts to continue")
    parser.add_argument("--max-tokens", type=int, default=100, help="most tokens to generate (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="0 takes all (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 takes all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="makes a random run repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of the text")
    parser.add_argument("--stream", action="store_true", help="print every request as it grows")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
