"""Generation with a KV cache under TP and PP: batched, finished sequences leave the batch.

Which tokens come out depends on the weights, the prompts, the sample ids and `step`, not on tp, pp or batching.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nereus.core import NereusError
from nereus.trainer.decoder.cache import KVCache
from nereus.trainer.decoder.model import Decoder
from nereus.trainer.decoder.parallel import Outbox
from nereus.trainer.decoder.sampling import Sampling, choose, uniform


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    sample_ids: Sequence[int],
    sampling: Sampling,
    step: int,
    max_batch: int | None = None,
) -> list[list[int]]:
    """The response of every prompt, on every rank of the unit; at most `max_batch` sequences are held at a time."""
    if len(prompts) != len(sample_ids) or not all(prompts):
        raise NereusError(f"generate: {len(prompts)} prompts, {len(sample_ids)} sample ids; each prompt needs a token")
    size = max_batch or max(len(prompts), 1)
    responses: list[list[int]] = []
    with torch.inference_mode():
        for start in range(0, len(prompts), size):
            part = slice(start, start + size)
            responses += _Batch(decoder, prompts[part], sample_ids[part], sampling, step).run()
    return responses


class _Batch:
    """Sequences that started together. `alive` are the rows still in the cache, in its order."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        sample_ids: Sequence[int],
        sampling: Sampling,
        step: int,
    ) -> None:
        self._decoder = decoder
        self._sampling = sampling
        self._step = step
        self._prompts = prompts
        self._ids = np.asarray(sample_ids, dtype=np.int64)
        self._responses: list[list[int]] = [[] for _ in prompts]
        self._alive = list(range(len(prompts)))
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], device=decoder.device)
        self._cache = KVCache(decoder, self._lengths)
        self._following = Outbox(decoder.pp, decoder.pp_rank + 1)

    def run(self) -> list[list[int]]:
        """Prefill, then one token of every living sequence at a time."""
        hooks = self._decoder.hooks
        with hooks.computing("prefill"):
            tokens = self._take(self._prefill())
        hooks.pace()
        with hooks.computing("decode"):
            while self._alive:
                tokens = self._take(self._decode(tokens))
                hooks.pace()
        return self._responses

    def _prefill(self) -> torch.Tensor:
        decoder, width = self._decoder, max(map(len, self._prompts))
        tokens = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in self._prompts])
        x = self._input(tokens.to(decoder.device))
        x = decoder.blocks(x, *decoder.rotary.up_to(width), self._cache.prefill)
        rows = torch.arange(len(x), device=decoder.device)
        return self._next(x[rows, self._lengths - 1] if decoder.last else x)

    def _decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed the newest token of each living sequence; its successor comes back."""
        decoder, cache = self._decoder, self._cache
        cache.advance()
        rotary = decoder.rotary.at(cache.columns - 1 - cache.padding, cache.columns)
        x = decoder.blocks(self._input(tokens.unsqueeze(1)), *rotary, cache.decode)
        return self._next(x.squeeze(1) if decoder.last else x)

    def _take(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append the tokens; finished sequences leave. Returns the tokens of those that stay."""
        stops, most = self._sampling.stop_tokens, self._sampling.max_response_tokens
        staying = []
        for place, (row, token) in enumerate(zip(self._alive, tokens.tolist(), strict=True)):
            response = self._responses[row]
            response.append(token)
            if token not in stops and len(response) < most:
                staying.append(place)
        if len(staying) == len(self._alive):
            return tokens
        order = self._cache.keep(staying) if staying else []
        self._alive = [self._alive[place] for place in order]
        return tokens[order]

    def _input(self, tokens: torch.Tensor) -> torch.Tensor:
        decoder = self._decoder
        if decoder.first:
            return decoder.embed(tokens)
        x = torch.empty(*tokens.shape, decoder.spec.hidden, dtype=decoder.dtype, device=decoder.device)
        decoder.pp.recv(x, decoder.pp_rank - 1)
        return x

    def _next(self, x: torch.Tensor) -> torch.Tensor:
        """The next token of every living sequence, from the last pp rank's hidden states [n, hidden]."""
        decoder = self._decoder
        tokens = torch.empty(len(self._alive), dtype=torch.int64, device=decoder.device)
        if decoder.last:
            logits = self._gathered(decoder.logits(decoder.normed(x)))
            if logits is not None:
                position = np.int64(len(self._responses[self._alive[0]]))
                ids = self._ids[self._alive]
                u = uniform(self._sampling.seed, self._step, ids, np.full_like(ids, position))
                tokens = choose(logits, u, self._sampling)
            decoder.tp.broadcast(tokens, 0)
        else:
            self._following.send(x)
        decoder.pp.broadcast(tokens, decoder.pp.size - 1)
        self._following.flush()
        return tokens

    def _gathered(self, local: torch.Tensor) -> torch.Tensor | None:
        """The logits of the whole vocabulary in fp64 on tp rank 0, nothing elsewhere."""
        decoder = self._decoder
        if decoder.tp.rank:
            decoder.tp.wait(decoder.tp.isend(local.contiguous(), 0))
            return None
        parts = [local.to(torch.float64)]
        for rank in range(1, decoder.tp.size):
            part = torch.empty_like(local)
            decoder.tp.recv(part, rank)
            parts.append(part.to(torch.float64))
        # Only the last tokens of the vocabulary are padding.
        logits = torch.cat(parts, dim=1)[:, : decoder.spec.vocab] if len(parts) > 1 else parts[0]
        decoder.hooks.track("logits", logits)
        return logits
