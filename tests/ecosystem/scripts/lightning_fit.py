"""Lightning's DDP strategy: metrics synchronised over ranks in training and validation, best checkpoint kept."""

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):  # type: ignore[misc]
    """A small network with dropout off."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.seen: list[tuple[int, dict[str, float]]] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)
        right = (self.layers(batch[0]).argmax(-1) == batch[1]).float().mean()
        self.log_dict({"val_acc": right, "val_samples": float(len(batch[0]))}, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        figures = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.seen.append((self.trainer.global_step, figures))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def _loss(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self.layers(batch[0]), batch[1])


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(-1))


def main(backend: str, folder: Path) -> None:
    L.seed_everything(3)
    model = Classifier()
    best = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=1, filename="{epoch}-{val_loss:.4f}")
    trainer = L.Trainer(
        strategy=DDPStrategy(process_group_backend=backend),
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
    )
    trainer.fit(model, DataLoader(samples(48, 1), batch_size=8, shuffle=True), DataLoader(samples(14, 2), batch_size=4))
    validated = trainer.validate(model, DataLoader(samples(14, 2), batch_size=4), ckpt_path="best", verbose=False)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), folder / "weights.pt")
        told = {"backend": torch.distributed.get_backend(), "history": model.seen, "validated": validated}
        print(json.dumps(told | {"best": Path(best.best_model_path).name}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
