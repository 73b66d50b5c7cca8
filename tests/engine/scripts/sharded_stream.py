"""Trains on a stream that shards itself by rank and by loader process: `sharded_stream.py KIND FOLDER [PER_RANK]`.

KIND is plain, webdataset or datasets; its shards are made in FOLDER by the test. Each rank leaves the numbers of the
samples that it trained on in FOLDER/seen-RANK.json. With PER_RANK=until-3 it saves and ends after three steps; with
PER_RANK=rest it resumes from there.
"""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

import mimatrix

kind, folder, per_rank = sys.argv[1], Path(sys.argv[2]), len(sys.argv) > 3
part = sys.argv[3] if per_rank else ""
run = mimatrix.init(batch=[5, 3], micro_batch=2, stage=2, timeout_s=20, quiet=True)


class Plain(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info
        for shard in range(6)[run.rank :: run.world_size][info.id :: info.num_workers]:
            yield from range(10 * shard, 10 * shard + 10)


def dataset() -> Any:
    if kind == "plain":
        return Plain()
    if kind == "webdataset":
        webdataset = import_module("webdataset")
        shards = str(folder / "{000000..000005}.tar")
        stream = webdataset.WebDataset(shards, nodesplitter=webdataset.split_by_node, shardshuffle=False)
        return stream.decode().map(lambda sample: sample["json"]["number"])
    files = [str(file) for file in sorted(folder.glob("*.jsonl"))]
    stream = import_module("datasets").load_dataset("json", data_files=files, split="train", streaming=True)
    return import_module("datasets.distributed").split_dataset_by_node(stream, rank=run.rank, world_size=run.world_size)


def collate(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([sample["number"] if isinstance(sample, dict) else sample for sample in samples])


torch.manual_seed(0)
model = torch.nn.Linear(1, 1).double()
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
loading: dict[str, Any] = {"num_workers": 2, "collate_fn": collate}
model, optimizer, loader = run.prepare(model, optimizer, dataset(), **loading, stream_per_rank=per_rank or None)
if part == "rest":
    assert run.load(folder / "saved")
seen: list[int] = []
for _ in run.epochs(1):
    for batch in loader:
        seen += batch.tolist()
        run.backward(model(batch.double().unsqueeze(1)).mean())
        optimizer.step()
        optimizer.zero_grad()
        if part == "until-3" and run.step == 3:
            run.save(folder / "saved", wait=True)
            break
(folder / f"seen-{run.rank}.json").write_text(json.dumps(seen))
