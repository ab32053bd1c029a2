"""Three published distributions of sequence lengths, to draw from."""

import json
import random
from collections.abc import Callable
from pathlib import Path

# Percentiles 0 to 100 of context and generated tokens in two traces of Azure's services, CC-BY, of P. Patel et al.,
# "Splitwise: Efficient Generative LLM Inference Using Phase Splitting" (ISCA 2024):
# github.com/Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_code.csv and _conv.csv.
CODE, CONVERSATIONS = json.loads(Path(__file__).with_suffix(".json").read_text())

# Share in percent and mean tokens of each kind of example, from table 7 of "The Llama 3 Herd of Models" (2024). Within
# a kind lengths are drawn from an exponential distribution, of which the table says nothing.
LLAMA_3 = [(52.66, 974.0), (14.89, 753.3), (3.01, 520.5), (8.14, 297.8), (21.19, 661.6), (0.11, 38135.6)]


def _llama_3(draw: random.Random) -> int:
    ((_, mean),) = draw.choices(LLAMA_3, [share for share, _ in LLAMA_3])
    return 1 + int(draw.expovariate(1 / mean))


def _traced(percentiles: list[int]) -> Callable[[random.Random], int]:
    """Between two percentiles all lengths are as likely."""

    def length(draw: random.Random) -> int:
        place = draw.uniform(0, 99.999)
        low, high = percentiles[int(place)], percentiles[int(place) + 1]
        return round(low + (high - low) * (place % 1))

    return length


DISTRIBUTIONS = {"code": _traced(CODE), "conversations": _traced(CONVERSATIONS), "llama 3": _llama_3}
