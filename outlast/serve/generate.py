"""One prompt, one answer: the simplest way to see what a model has learned. The server is another's business."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from outlast.model.transformer import Packing, Transformer
from outlast.serve.trained import Trained


class Cache:
    """Keys and values of what was read so far, a pair a layer: it fills the model's `attend` seam."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        self,
        q_BSHK: Float[Tensor, "B S H K"],
        k_BSGK: Float[Tensor, "B S G K"],
        v_BSGK: Float[Tensor, "B S G K"],
        packing: Packing,
        layer: int,
    ) -> Float[Tensor, "B S H K"]:
        """Attend to everything kept and to the new tokens, which are several only at the first call."""
        q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
        first = layer not in self.kept
        if not first:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = (k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=first, enable_gqa=True).transpose(1, 2)


@torch.no_grad()
def tokens(
    model: Transformer, prompt: list[int], max_tokens: int, temperature: float, top_p: float, seed: int, eos: int
) -> Iterator[int]:
    """Continue a prompt, a token at a time, until the end token or `max_tokens`.

    Args:
        model: in evaluation mode; its `attend` seam is filled while this runs.
        prompt: token ids, at least one.
        max_tokens: most to make.
        temperature: 0 takes the likeliest each time.
        top_p: draw from the likeliest tokens that together have this probability.
        seed: of the draws.
        eos: the token that ends a text; not given out.
    """
    plain, generator, position, unread = model.seams, torch.Generator().manual_seed(seed), 0, prompt
    model.fill(attend=Cache().attend)
    try:
        for _ in range(max_tokens):
            places = torch.arange(position, position + len(unread))[None]
            packing = Packing.of(torch.zeros(1, dtype=torch.int64), places, ((len(unread),),))
            logits_V = model.logits(torch.tensor([unread]), packing)[0, -1]
            position += len(unread)
            unread = [_chosen(logits_V, temperature, top_p, generator)]
            if unread[0] == eos:
                return
            yield unread[0]
    finally:
        model.seams = plain


def _chosen(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    if temperature < 1e-6:  # dividing by less would overflow
        return int(logits_V.argmax())
    chances, order = torch.sort(torch.softmax(logits_V / temperature, dim=-1), descending=True)
    chances[chances.cumsum(-1) - chances >= top_p] = 0
    return int(order[torch.multinomial(chances, 1, generator=generator)])


def text(trained: Trained, prompt: str, max_tokens: int, temperature: float, top_p: float, seed: int) -> str:
    """Continue a text. An empty prompt begins a document, as after the end of another."""
    ids = [*trained.tokenizer.prefix, *map(int, trained.tokenizer.encode([prompt])[0])] or [trained.tokenizer.eos]
    made = list(tokens(trained.model, ids, max_tokens, temperature, top_p, seed, trained.tokenizer.eos))
    # Decoded with what it follows: some tokenisers spell a space only between tokens.
    return trained.tokenizer.decode([*ids, *made]).removeprefix(trained.tokenizer.decode(ids))
