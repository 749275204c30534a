"""Activation checkpointing from outside: same numbers, less memory kept."""

from __future__ import annotations

import pytest
import torch

from nanok3.config import K3Config
from nanok3.model.decoder import K3
from nanok3.train.recompute import compile_layers, recompute_activations


def saved_bytes(model: K3, ids: torch.Tensor) -> tuple[int, dict[str, torch.Tensor]]:
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(ids).logits.square().mean()
    loss.backward()
    return sum(sizes.values()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_same_gradients_fewer_bytes() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 512, (2, 64))
    plain = K3(K3Config.tiny())
    saving = K3(K3Config.tiny())
    saving.load_state_dict(plain.state_dict())
    recompute_activations(saving)
    kept, grads = saved_bytes(plain, ids)
    less, again = saved_bytes(saving, ids)
    assert less < kept / 2
    for name, grad in grads.items():
        torch.testing.assert_close(grad, again[name], msg=name)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_layers_give_the_same_numbers(unchecked) -> None:
    """torch.compile around the custom operators: same loss and gradients as without, in float32."""
    torch.manual_seed(0)
    ids = torch.randint(0, 512, (1, 64))
    plain = K3(K3Config.tiny().at_depth(2))
    compiled = K3(K3Config.tiny().at_depth(2))
    compiled.load_state_dict(plain.state_dict())
    compile_layers(compiled)
    for model in (plain, compiled):
        model(ids).logits.square().mean().backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), compiled.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6, msg=name)
