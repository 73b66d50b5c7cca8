"""Accelerate's NLP example with a small BERT: train with accumulation, evaluate with `gather_for_metrics`."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


class Pairs(Dataset[dict[str, torch.Tensor]]):
    """Random sentences, labelled by their first token."""

    def __init__(self, count: int, seed: int) -> None:
        self.tokens = torch.randint(1, 64, (count, 10), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index, 0] % 2}


def main(backend: str, folder: Path) -> None:
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)]
    )
    set_seed(3)
    train_loader = DataLoader(Pairs(48, seed=1), batch_size=4, shuffle=True)
    eval_loader = DataLoader(Pairs(13, seed=2), batch_size=4)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 12)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    history = []
    for _ in range(2):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            history.append(accelerator.gather(loss.detach().reshape(1)).tolist())
        model.eval()
        right, total = 0, 0
        for batch in eval_loader:
            with torch.no_grad():
                guesses = model(**batch).logits.argmax(dim=-1)
            guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
            right, total = right + int((guesses == labels).sum()), total + len(labels)
        history.append([right, total])
    summed = accelerator.reduce(torch.tensor([1.5]), "mean")
    accelerator.save_state(str(folder / "state"))
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), folder / "weights.pt")
        found = torch.distributed.get_backend()
        print(json.dumps({"backend": found, "history": history, "mean": summed.tolist()}))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
