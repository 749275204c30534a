"""Taking back tokens that were read on trial: the KDA memory is rebuilt from what is kept of each (report 5.4).

A draft is verified in one pass over w tokens, of which the first n turn out right. The latents of the others are cut
off; but S has no ends, it is one matrix that all w have changed. Keeping S after every token would take w times

    H K V + 3 (W - 1) H K        numbers a layer, 6.3 MB in K3

so the memory of before stays, and of each token is kept what moves it on. Two kinds of record do:

    what was written      k, e^g and u = b (v - S^T k), with the convolutions' inputs      6 H K
    what was projected    those inputs, the gate's low-rank input, the logits of b         3 H K + K + H

The first is the native step's (kernels/cpu/decode_kda.h): its replay is S <- Diag(e^g) S + k u^T and no more, and bit
for bit the state after reading the n tokens one by one. The second is smaller, is what the report keeps, and does the
convolutions, gates and products again; it serves every device. Its rows are those of `KDAState.tape`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.model.cache import KDAState, LatentCache, ModelState, Projected
from nanok3.model.kda import KDA


def replay_reference(
    S: Float[Tensor, "H K V"], k: Float[Tensor, "T H K"], decay: Float[Tensor, "T H K"], u: Float[Tensor, "T H V"]
) -> Float[Tensor, "H K V"]:
    """The state after T tokens whose writes are known. decay: e^g."""
    for t in range(len(k)):
        S = decay[t].unsqueeze(-1) * S + torch.einsum("hk,hv->hkv", k[t], u[t])
    return S


def rows_of(tape: list[Projected], start: int, end: int) -> Projected:
    """Tokens [start, end) of those on a tape."""

    def cut(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=1)[:, start:end]

    q, k, v = (cut([piece.inputs[i] for piece in tape]) for i in range(3))
    return Projected((q, k, v), cut([piece.gate for piece in tape]), cut([piece.beta for piece in tape]))


@torch.no_grad()
def replay(layer: KDA, state: KDAState, tape: list[Projected], start: int, end: int) -> None:
    """Move a layer's state on by tokens [start, end) of a tape."""
    if end > start:
        layer.remember(rows_of(tape, start, end), None, state)


class Trial:
    """A `ModelState` around a call that may be taken back in part.

    trial = Trial(model.model.layers, state)        from here on the state is recorded
    logits = model(ids, state=state).logits
    trial.keep(n)                                   the state has read the first n of the ids
    """

    def __init__(self, layers: nn.ModuleList, state: ModelState) -> None:
        self.layers, self.state, self._tokens = layers, state, state.tokens
        self._before = [layer.mark() for layer in state.layers]
        self._tapes: list[list[Projected] | None] = []
        for layer in state.layers:
            tape: list[Projected] | None = [] if isinstance(layer, KDAState) else None
            if isinstance(layer, KDAState):
                layer.tape = tape
            self._tapes.append(tape)

    def keep(self, tokens: int) -> None:
        """Take back all but the first `tokens`."""
        for module, layer, tape, back in zip(self.layers, self.state.layers, self._tapes, self._before):
            if isinstance(layer, LatentCache):
                layer.tokens = self._tokens + tokens
                continue
            back()
            layer.tape = None
            assert tape is not None and isinstance(module.self_attn, KDA)
            replay(module.self_attn, layer, tape, 0, tokens)
        self.state.tokens = self._tokens + tokens


def record_bytes(cfg: K3Config, projected: bool = False) -> tuple[int, int]:
    """(a token's record, a whole state) of one KDA layer, in float32."""
    inner = cfg.kda_num_heads * cfg.kda_head_dim
    record = 3 * inner + cfg.kda_head_dim + cfg.kda_num_heads if projected else 6 * inner
    return 4 * record, 4 * inner * (cfg.kda_head_dim + 3 * (cfg.short_conv_kernel_size - 1))
