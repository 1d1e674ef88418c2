"""The two ways to compute log-probs that are compared: stock transformers, and a model under ``invariant``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rl_kernels.models.head import head_logp, inputs_of
from rl_kernels.models.invariance import invariant
from rl_kernels.models.logits import logit_options
from rl_kernels.models.sequences import sequence_logp


class Stock:
    """The model as it comes: log-softmax of its logits in FP32, as trainers without a fused head have it."""

    name = "stock"

    def __init__(self, model: Any, temperature: float) -> None:
        self._model, self._temperature = model, temperature

    @contextmanager
    def active(self) -> Iterator[None]:
        """Put the model into this way for a ``with`` block."""
        yield

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Yield a logits processor for one call of ``generate``, which records log-probs."""
        yield Recorder(self._temperature)

    def score(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the log-probs ``[B, T - 1]`` of all tokens but the first, FP32, in a training pass."""
        logits = self._model(**inputs, use_cache=False).logits
        rows = zip(logits[:, :-1], inputs["input_ids"][:, 1:], strict=True)
        # Row by row: the logits of a batch in FP32 may not fit.
        return torch.stack([_logps(row, ids, self._temperature) for row, ids in rows])


class Invariant(Stock):
    """The model under ``invariant``: ``linear_logp`` on hidden states, as in TRL's client and ``sequence_logp``."""

    name = "invariant"

    @contextmanager
    def active(self) -> Iterator[None]:  # noqa: D102
        with invariant(self._model):
            yield

    @contextmanager
    def recording(self) -> Iterator[Recorder]:  # noqa: D102
        with inputs_of(self._model.get_output_embeddings(), lambda hidden: hidden[:, -1].clone()) as rows:
            yield HiddenRecorder(self._temperature, self._model, rows)

    def score(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:  # noqa: D102
        logps = sequence_logp(self._model, **inputs, temperature=self._temperature)
        assert isinstance(logps, torch.Tensor)
        return logps


class Recorder:
    """A logits processor that divides by the temperature and records the log-prob of each sampled token."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._scores: torch.Tensor | None = None
        self._sampled: list[torch.Tensor] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[B, V]`` to sample from; ``ids[B, T]`` end with the token of the call before."""
        self._take(ids)
        self._scores = scores
        return scores / self._temperature

    def logps(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the log-probs ``[B, N]`` of the N tokens that were sampled, the last of ``ids[B, T]``."""
        self._take(ids)
        return torch.cat(self._sampled, 1)

    def _take(self, ids: torch.Tensor) -> None:
        if self._scores is not None:
            self._sampled.append(_logps(self._scores, ids[:, -1], self._temperature)[:, None])
            self._scores = None


class HiddenRecorder(Recorder):
    """Records the hidden state of each pass instead, and scores the tokens at the end."""

    def __init__(self, temperature: float, model: Any, rows: list[torch.Tensor]) -> None:
        super().__init__(temperature)
        self._model, self._rows = model, rows

    def logps(self, ids: torch.Tensor) -> torch.Tensor:  # noqa: D102
        hidden = torch.stack(self._rows, 1)
        options = {"temperature": self._temperature, **logit_options(self._model)}
        logps = head_logp(self._model.get_output_embeddings(), hidden, ids[:, -hidden.shape[1] :], **options)
        assert isinstance(logps, torch.Tensor)
        return logps

    def _take(self, ids: torch.Tensor) -> None:
        pass


def _logps(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probs ``[N]`` of tokens ``[N]`` under logits ``[N, V]``, in FP32."""
    return (logits.float() / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
