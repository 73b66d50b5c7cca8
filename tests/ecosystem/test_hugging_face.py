"""Loops over Hugging Face models as people write them: N uneven ranks give what one process gives, to 1e-10."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.features import ALONE, PAIR, STAGES, STEPS, THREE, TrainingCase, check
from torch import nn
from torch.nn import functional

WORDS, LENGTH = 17, 6
IGNORED = -100
# Of the packages among themselves.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
SPLITS = {"alone": ALONE, "pair": PAIR, "three": THREE}


@pytest.fixture(autouse=True)
def installed() -> None:
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason=f"needs {package}: run `make ecosystem`")


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    """Return padded sentences of unlike length; their first token gives the label of the sentence."""
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(1, WORDS, (count, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (count,), generator=generator)
    masks = [torch.arange(LENGTH) < length for length in lengths]
    return [
        {
            "input_ids": row * mask,
            "attention_mask": mask.long(),
            "labels": row.where(mask, IGNORED),
            "label": row[0] % 3,
        }
        for row, mask in zip(tokens, masks, strict=True)
    ]


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    model: nn.Module = BertForSequenceClassification(config).double()
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=2, n_head=2, use_cache=False, **off)
    model: nn.Module = GPT2LMHeadModel(config).double()
    return model


def checkpointed_gpt2() -> nn.Module:
    model: Any = gpt2()
    model.gradient_checkpointing_enable()
    model.train()
    checked: nn.Module = model
    return checked


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if isinstance(norm, LlamaRMSNorm):  # which rounds to float32
                setattr(module, name, nn.RMSNorm(8, norm.variance_epsilon))
    return model.double()


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn", "c_proj"], lora_dropout=0.0, fan_in_fan_out=True)
    model: nn.Module = get_peft_model(gpt2(), config).double()
    return model


def classification_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["label"]
    ).loss
    return loss


def language_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean over tokens, in float64: the models' own loss rounds to float32."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], ignore_index=IGNORED)


def tokens(batch: dict[str, torch.Tensor]) -> float:
    return float((batch["labels"][:, 1:] != IGNORED).sum())


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    from transformers import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, 2, 2 * STEPS)


def language_case(model: Callable[[], nn.Module], **more: Any) -> TrainingCase:
    return TrainingCase(model, texts(STEPS * 5), language_loss, weight=tokens, **more)


CASES: dict[str, Callable[[], TrainingCase]] = {
    "bert": lambda: TrainingCase(bert, texts(STEPS * 5), classification_loss, scheduler=cosine, epochs=2),
    "gpt2": lambda: language_case(gpt2, max_grad_norm=0.5),
    "gpt2 with checkpointing": lambda: language_case(checkpointed_gpt2),
    "llama": lambda: language_case(llama, scheduler=cosine),
    "lora": lambda: language_case(lora, max_grad_norm=0.5),
}


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_hugging_face_loops_are_exact(name: str, split: str, stage: int) -> None:
    check(CASES[name](), stage, SPLITS[split])
