"""#058 openclip_contrastive_loss: the sigmoid loss of image and text pairs, against the texts of all ranks.

Axes      B pairs on a rank, D features, W ranks
In        image_features, text_features [B, D], rows of length 1, differ per rank; logit_scale and logit_bias, numbers, equal on
          every rank; group (None: all ranks)
Out       0-dim tensor in the dtype of the features, differs per rank
Maths     L = logit_scale * image_features t^T + logit_bias for the texts t of every rank; the sum of -log sigmoid(y L) over all
          own images and all texts, divided by B, where y = 1 for an image's own text and -1 elsewhere
Wire      every rank needs the B*D text features of every other rank
Needs     any W
Not here  softmax (CLIP) loss, gradients, the mean over ranks, rounding between the steps
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from problems.base import Cost, Draw, Problem, Size
from problems.collectives import gathered


def make_inputs(draw: Draw, size: Size) -> tuple[Any, ...]:
    """Texts near their images, and whole ranks near common directions, by unequal shares: every remote block is seen."""
    shape = size["B"], size["D"]
    image, text = (torch.randn(shape, generator=draw.own(name)) for name in ("image", "text"))
    if draw.profile == "upstream":
        image, text = (F.normalize(x.to(draw.dtype), dim=-1) for x in (image, text))
        return image, text, 10.0, -10.0, None
    common = torch.randn(3, size["D"], generator=draw.shared("common"))
    share = torch.rand(2, 3, generator=draw.own("share")).mul_(2).sub_(0.5)
    image, text = image + share[0] @ common, 0.5 * text + 0.5 * image + share[1] @ common
    scale, bias = torch.rand(2, generator=draw.shared("scale")).double().tolist()
    image, text = (F.normalize(x, dim=-1).to(draw.dtype) for x in (image, text))
    return image, text, 5 * 6**scale, 2 * bias - 2, None


def reference(
    image_features: torch.Tensor,
    text_features: torch.Tensor,
    logit_scale: float,
    logit_bias: float = 0.0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Loss of this rank's images, 0-dim; logits and sums in float32."""
    wide = torch.promote_types(image_features.dtype, torch.float32)
    image, text = image_features.to(wide), text_features.to(wide)
    texts = gathered(text_features, group).to(wide)
    logits = (image * logit_scale) @ texts.T + logit_bias
    own = (image * text).sum(-1) * logit_scale + logit_bias
    loss = F.softplus(logits).sum() - own.sum()
    return (loss / len(image)).to(image_features.dtype)


def exact(inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Term by term with signs, one block of texts after another, in float64."""
    scale, bias = inputs[0][2:4]
    losses = []
    for rank, (image, *_) in enumerate(inputs):
        total = torch.zeros((), dtype=torch.float64, device=image.device)
        for other, text in enumerate(args[1] for args in inputs):
            logits = torch.einsum("id,jd->ij", image.double(), text.double()) * scale + bias
            if other != rank:
                total -= F.logsigmoid(-logits).sum()
                continue
            sign = 2 * torch.eye(len(image), dtype=torch.float64, device=image.device) - 1
            total -= F.logsigmoid(sign * logits).sum()
        losses.append(total / len(image))
    return losses


def cost(size: Size, world_size: int, itemsize: int) -> Cost:
    """Texts of all other ranks come in; logits need not be stored."""
    count = size["B"] * size["D"]
    return Cost(
        wire_bytes=(world_size - 1) * count * itemsize,
        memory_bytes=(world_size + 1) * count * itemsize,
        flops=2 * count * size["B"] * world_size,
    )


PROBLEM = Problem(
    number=58,
    slug="openclip_contrastive_loss",
    version=1,
    title="Sigmoid contrastive loss of local images against the texts of all ranks.",
    family="loss",
    parallelism="DP",
    collectives=("all_gather_into_tensor",),
    origin="open_clip SigLIP loss",
    split="train",
    sizes={
        "tiny": Size("tiny", {"B": 7, "D": 19}),
        "default": Size("default", {"B": 192, "D": 256}),
        "odd": Size("odd", {"B": 191, "D": 257}),
        # 16 MiB of texts per rank in bf16; 2 GiB of logits where they are stored.
        "large": Size("large", {"B": 8192, "D": 1024}),
        "upstream": Size("upstream", {"B": 256, "D": 1024}),
    },
    make_inputs=make_inputs,
    reference=reference,
    exact=exact,
    cost=cost,
)
