"""Hugging Face models, small and random, as users shard them (case 38)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compile_fsdp import fully_shard
from tests.distributed import distributed
from tests.training import assert_close, cpu_mesh, drive, train

VOCABULARY = 64


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def gpt2() -> nn.Module:
    """Its head is tied to its embedding; dropout off, for one process and two draw other masks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=2,
            n_head=4,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )


def t5() -> nn.Module:
    """Two stacks of blocks, one embedding tied three times, biases that block 0 lends to others."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=4,
            d_ff=32,
            num_layers=2,
            num_decoder_layers=1,
            num_heads=4,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def mixtral() -> nn.Module:
    """A router decides which experts see a token; each rank has other tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            use_cache=False,
        )
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    if hasattr(model, "decoder"):
        return [*model.encoder.block, *model.decoder.block]
    return list(model.model.layers if hasattr(model, "model") else model.transformer.h)


def with_labels(model: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tokens: model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize(
    ("make", "driver"),
    [
        (llama, "eager"),
        (llama, "aot_eager"),  # `make demo` trains one like it with Inductor
        (gpt2, "eager"),
        (gpt2, "aot_eager"),
        (gpt2, "inductor"),
        (t5, "eager"),
        (t5, "aot_eager"),
        (mixtral, "eager"),
        (mixtral, "aot_eager"),
    ],
)
@distributed(2)
def test_three_adamw_steps_agree_with_one_process(
    make: Callable[[], nn.Module], driver: str
) -> None:
    model = make()
    batches = [[torch.randint(VOCABULARY, (4, 10))] for _ in range(3)]
    plain = copy.deepcopy(model)
    expected = train(plain, batches, call=with_labels(plain), distributed=False)

    mesh = cpu_mesh()
    for block in blocks_of(model):
        fully_shard(block, mesh)
    fully_shard(model, mesh)
    run = train(model, batches, call=with_labels(drive(model, driver)))
    assert_close(run, expected)
    assert not any(group.is_unsharded for group in model._fsdp_unit.context.groups())
