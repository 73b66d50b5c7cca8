"""Mistakes on purpose, by real processes: each is one sentence with file and line, within seconds."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "mistakes.py"
SOON_S = 10.0
"""Seconds from the mistake to the end of all ranks; the machine may be busy with other tests."""
SENTENCES = {
    "plain_backward": r"gradients came outside run.backward; call run.backward\(loss\)",
    "no_step": r"drawn before optimizer.step was called for this one; call optimizer.step\(\)",
    "no_backward": r"drawn before run.backward was called for the first; call run.backward\(loss\) for each",
    "step_first": r"optimizer.step came before run.backward; call run.backward\(loss\) first",
    "two_backwards": r"run.backward was called twice for one micro-batch; add the losses",
    "clip_norm": r"clip_grad_norm_ was called before .* max_grad_norm=\.\.\.",
    "clip_value": r"clip_grad_value_ was called before .* max_grad_norm=\.\.\.",
    "grad_scaler": r'a GradScaler scales .* precision="fp16"',
    "own_accumulation": r"drawn before optimizer.step was called for this one",
    "reading_ahead": r"drawn before run.backward .* read_ahead=True",
    "zero_grad_first": r"zero_grad was called between run.backward and optimizer.step",
    "other_dataset": r"rank \d prepared a dataset of \d+ samples and rank \d a dataset of .*; prepare the same",
    "other_model": r"rank \d prepared a model of .* prepare the same on all ranks",
    "other_evaluation": r"rank \d evaluates .* 12 samples",
    "evaluate_on_rank_0": r"rank 0 called run.evaluate \(mistakes.py, line \d+\).* call run.evaluate on all ranks",
    "evaluate_on_rank_0_at_the_end": r"run.evaluate",
    "load_on_rank_0": r"run.load \(mistakes.py, line \d+\).* on all ranks",
    "save_on_rank_0": r"run.save",
    "break_on_rank_0": r"run.evaluate \(mistakes.py, line \d+\)",
    "evaluate_in_a_batch": r"run.evaluate was called inside a global batch; call it when `not run.in_batch`",
    "log_a_word": r"run.log\(note=",
    "log_a_vector": r"run.log\(v=.*\[3\]",
    "unknown_scheduler": r"a scheduler that the run does not know.* run.prepare_scheduler",
    "list_of_schedulers": r"the scheduler is a list; give one scheduler",
    "closure": r"optimizer.step takes no closure here",
    "given_optimizer": r"was given to run.prepare; call it on the one that run.prepare returned",
    "other_learning_rate": r"the optimizer's lr \(param group 0\) is",
    "sharded_stream": r"other samples from the stream.* stream_per_rank=True",
    "distributed_sampler": r"DistributedSampler",
    "strange_user_state": r"user_state.*model",
    "misspelt_setting": r'did you mean "num_workers"',
    "save_nowhere": r"/proc/nope",
    "save_nowhere_at_the_end": r"the checkpoint of step 4 is not saved: .*/proc/nope",
}
IN_STAGE_3 = {
    "state_dict_on_rank_0": r"run.full_state_dict \(mistakes.py, line \d+\).* on all ranks",
    "model_on_rank_0": r"rank 0 .*the model \(mistakes.py, line \d+\).* all ranks run the model",
    "averaged_model": r"run.ema",
}
RANK_0_ONLY = [name for name in SENTENCES if name.endswith(("on_rank_0", "at_the_end"))]
AMONG_RANKS = {
    *(name for name in SENTENCES if name.endswith("_on_rank_0") or name.startswith("other_")),
    *("evaluate_on_rank_0_at_the_end", "sharded_stream"),
}
"""Mistakes that one process cannot make."""
QUICK = {("clip_norm", 0, 2), ("evaluate_on_rank_0", 0, 2)}


def cases() -> list[object]:
    """Return all mistakes in stage 0, those that ranks make alone in every stage, and those of one process."""
    chosen = [(name, 0, 2) for name in SENTENCES] + [(name, 3, 2) for name in IN_STAGE_3]
    chosen += [(name, stage, 2) for name in RANK_0_ONLY for stage in (1, 2, 3)]
    chosen += [(name, 0, 1) for name in SENTENCES if name not in AMONG_RANKS]
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=() if case in QUICK else pytest.mark.long)
        for case in chosen
    ]


@pytest.mark.parametrize(("name", "stage", "ranks"), cases())
def test_a_mistake_is_one_sentence_with_file_and_line(tmp_path: Path, name: str, stage: int, ranks: int) -> None:
    command = [sys.executable, "-m", "mimatrix.cli.main", "run", "-n", str(ranks), str(SCRIPT), name, str(stage)]
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "began")], capture_output=True, text=True, timeout=60, check=False, env=settings
    )
    ended_s = time.time()
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert "Traceback" not in output, output
    sentence = {**SENTENCES, **IN_STAGE_3}[name]
    lines = [line for line in output.splitlines() if re.search(sentence, line)]
    assert lines, output
    blamed = [number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if line.endswith(f"# {name}")]
    if blamed:
        assert any(f"(mistakes.py, line {number})" in line for number in blamed for line in lines), output
    began_s = max(float(path.read_text()) for path in tmp_path.iterdir())
    assert ended_s - began_s < SOON_S
