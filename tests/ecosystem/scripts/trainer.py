"""transformers.Trainer: fine-tune a small GPT-2 and evaluate it; the backend is the only argument."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in every process."""

    def __init__(self, count: int, seed: int) -> None:
        self.tokens = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def accuracy(prediction: Any) -> dict[str, float]:
    guesses = prediction.predictions.argmax(-1)[:, :-1]
    return {"accuracy": float((guesses == prediction.label_ids[:, 1:]).mean())}


def main(backend: str, folder: Path) -> None:
    args = TrainingArguments(
        output_dir=str(folder),
        ddp_backend=backend,
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    set_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Sentences(32, seed=1),
        eval_dataset=Sentences(13, seed=2),
        compute_metrics=accuracy,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        timed = ("runtime", "per_second", "flos")
        history = [
            {name: value for name, value in entry.items() if not name.endswith(timed)}
            for entry in trainer.state.log_history
        ]
        torch.save(model.state_dict(), folder / "weights.pt")
        checkpoints = sorted(path.name for path in folder.glob("checkpoint-*"))
        found = torch.distributed.get_backend()
        print(json.dumps({"backend": found, "history": history, "checkpoints": checkpoints}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
