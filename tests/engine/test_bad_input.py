"""Bad input to `init`, `prepare` and the loop raises one sentence with the fix on every rank; no rank hangs."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support.features import PAIR, THREE
from support.models import Perceptron, cross_entropy, vectors
from support.runs import in_runs
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.checkpoint import checkpoint

from mimatrix.core.errors import MiMatrixError, UserError
from mimatrix.engine.run import Run
from mimatrix.engine.zero import base

in_stages = pytest.mark.parametrize("stage", [0, 3])
Act = Callable[[Run], Any]


def errors_of(act: Act, split: dict[str, Any] = PAIR, **settings: Any) -> list[str]:
    """Return the error of each rank."""

    def on_rank(run: Run) -> str:
        try:
            act(run)
        except MiMatrixError as error:
            return str(error)
        return "nothing"

    more = {"unit_bytes": 300, **split, **settings}
    return in_runs(len(split["batch"]), on_rank, timeout_s=5, **more)


def all_raise(sentence: str, act: Act, split: dict[str, Any] = PAIR, **settings: Any) -> None:
    for error in errors_of(act, split, **settings):
        assert sentence in error
        assert "\n" not in error


def init_raises(sentence: str, ranks: int = 2, **settings: Any) -> None:
    with pytest.raises(UserError, match=sentence):
        in_runs(ranks, lambda run: None, timeout_s=5, **settings)


def prepared(run: Run, model: nn.Module | None = None, optimizer: Any = None, *more: Any) -> tuple[Any, ...]:
    model = model or Perceptron().double()
    trainable = [param for param in model.parameters() if param.requires_grad]
    result: Any = run.prepare(model, optimizer or torch.optim.SGD(trainable, 0.1), vectors(15), *more, shuffle=False)
    return tuple(result)


def loop(
    run: Run, back: Callable[..., Any] | None = None, model: nn.Module | None = None, optimizer: Any = None, *more: Any
) -> None:
    """Run a loop that calls `back` in place of `run.backward`."""
    model, optimizer, loader, *_ = prepared(run, model, optimizer, *more)
    for _ in run.epochs(1):
        for batch in loader:
            loss = cross_entropy(model, batch)
            back(loss) if back else run.backward(loss)
            optimizer.step()


def test_invalid_settings() -> None:
    init_raises(r"batch = \[3, 2\] sums to 5, but global_batch is 6; make them agree", batch=[3, 2], global_batch=6)
    init_raises(r"shares = \[0.5, 0.4\] sums to 0.9; shares must sum to 1", batch=4, shares=[0.5, 0.4])
    init_raises("shares has 3 numbers for 2 ranks; give one for each", batch=4, shares=[0.5, 0.25, 0.25])
    init_raises("stage is 4; use 0, 1, 2, 3", batch=4, stage=4)
    init_raises('unknown precision "bf17"; did you mean "bf16"', batch=4, precision="bf17")
    init_raises("max_grad_norm is 0; give a number above 0", batch=4, max_grad_norm=0)
    init_raises("max_grad_norm is True; give a number above 0", batch=4, max_grad_norm=True)
    init_raises("stage is True; use 0, 1, 2, 3", batch=4, stage=True)
    init_raises("unit_bytes is -1; give a number of bytes above 0", batch=4, unit_bytes=-1)
    init_raises(r"shares is 1.0; give a list with a number for each rank", batch=4, shares=1.0)
    init_raises(r"shares is \['a'\]; give a list with a number for each rank", batch=4, shares=["a"])
    init_raises("rebalance is 'x'; use True or False", global_batch=4, plan="online", rebalance="x")
    init_raises("leave out either plan or micro_batch", global_batch=4, plan="plan.json", micro_batch=1)
    init_raises("leave out either plan or shares", global_batch=4, plan="plan.json", shares=[0.5, 0.5])


def test_settings_that_differ_between_ranks() -> None:
    sentence = r"rank \d was given seed = \d and rank \d \d; give all ranks the same"
    init_raises(sentence, own=lambda rank: {"seed": rank}, batch=2)


@pytest.mark.parametrize("what", ["a dataset of", "a model of", "lr"])
def test_ranks_that_prepare_different_things(what: str) -> None:
    def act(run: Run) -> None:
        model: nn.Module = nn.Linear(6, 3 + run.rank if what == "a model of" else 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1 + run.rank if what == "lr" else 0.1)
        run.prepare(model, optimizer, vectors(15 + run.rank if what == "a dataset of" else 15))

    all_raise(what, act)


def test_a_model_without_trainable_parameters() -> None:
    def act(run: Run) -> None:
        model = nn.Linear(6, 3).requires_grad_(False)
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), vectors(15))

    all_raise("no trainable parameter; set requires_grad on some", act)


def test_a_model_with_lazy_parameters() -> None:
    def act(run: Run) -> None:
        model = nn.Sequential(nn.Linear(6, 3), nn.LazyLinear(3))
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), vectors(15))

    all_raise("1.weight has no shape yet; run the model once", act)


def test_a_dataset_smaller_than_the_batch() -> None:
    def act(run: Run) -> None:
        model = nn.Linear(6, 3)
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), vectors(4))

    all_raise("the dataset has 4 samples, fewer than global_batch = 5; use a smaller", act)


def test_a_loss_that_is_not_a_scalar() -> None:
    def act(run: Run) -> None:
        loop(run, lambda loss: run.backward(loss.expand(3)))

    all_raise("the loss has the shape [3]; give run.backward a scalar, such as loss.mean()", act)
    all_raise("the loss has the shape float", lambda run: loop(run, lambda loss: run.backward(float(loss.detach()))))  # type: ignore[arg-type]
    all_raise(
        "does not depend on any trainable parameter", lambda run: loop(run, lambda loss: run.backward(loss.detach()))
    )


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_backward_must_be_called_once_for_each_micro_batch(stage: int) -> None:
    def twice(run: Run) -> None:
        def back(loss: Any) -> None:
            run.backward(loss)
            run.backward(loss)

        loop(run, back)

    def extra_backward(run: Run) -> None:
        model: Any = Perceptron().double()

        def back(loss: Any) -> None:
            run.backward(loss)
            model.last.weight.sum().backward()

        loop(run, back, model)

    def never(run: Run) -> None:
        loop(run, lambda loss: None)

    def plainly(run: Run) -> None:
        loop(run, lambda loss: loss.backward())

    all_raise("run.backward was called twice for one micro-batch; add the losses", twice, stage=stage)
    all_raise("optimizer.step came before run.backward", never, stage=stage)
    all_raise("call run.backward(loss) instead of loss.backward()", plainly, stage=stage)
    # A rank that has more micro-batches is told at the first look at the weights.
    for error in errors_of(extra_backward, PAIR, stage=stage):
        assert "last.weight was read or changed" in error or "instead of loss.backward()" in error


def test_an_epoch_without_backward() -> None:
    def act(run: Run) -> None:
        model, _, loader = prepared(run)
        for _ in run.epochs(1):
            for batch in loader:
                cross_entropy(model, batch)

    all_raise("a second micro-batch was drawn before run.backward was called for the first", act)


def test_scheduler_step_before_optimizer_step() -> None:
    def early(run: Run) -> None:
        model = Perceptron().double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = StepLR(optimizer, 1)

        _, optimizer, loader, scheduler = prepared(run, model, optimizer, scheduler)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            scheduler.step()

    all_raise("scheduler.step came before optimizer.step", early, {"batch": [3, 2]})


@pytest.mark.parametrize("batches", [[5], [3, 2], [5, 0]])
def test_stepping_what_was_given_to_prepare(batches: list[int]) -> None:
    """It would step in every micro-batch."""

    def optimizer(run: Run) -> None:
        model = Perceptron().double()
        given = torch.optim.SGD(model.parameters(), 0.1)
        for batch in prepared(run, model, given)[2]:
            run.backward(cross_entropy(model, batch))
            given.step()

    def scheduler(run: Run) -> None:
        model = Perceptron().double()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        given = StepLR(sgd, 1)
        _, stepper, loader, _ = prepared(run, model, sgd, given)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            stepper.step()
            given.step()

    if 0 not in batches:  # a rank without data waits for the others, and reports that they left
        all_raise("called on the optimizer that was given to run.prepare", optimizer, {"batch": batches})
    all_raise("the scheduler that was given to run.prepare was stepped or loaded", scheduler, {"batch": batches})


class Lars(torch.optim.Optimizer):
    """An optimizer that uses the norms of whole tensors."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=float(group["lr"] * param.norm() / (param.grad.norm() + 1e-9)))


@pytest.mark.parametrize(
    ("kind", "stage"), [(Lars, 1), (Lars, 3), (torch.optim.Adafactor, 2), (torch.optim.Muon, 3)], ids=str
)
def test_optimizers_that_need_whole_tensors(kind: Any, stage: int) -> None:
    def act(run: Run) -> None:
        model = nn.Linear(6, 3, bias=False).double()
        run.prepare(model, kind(model.parameters(), lr=1e-6), vectors(15))

    all_raise(f"use stage 0, where it gets whole tensors, or another optimizer (stage is {stage})", act, stage=stage)


@in_stages
def test_an_optimizer_that_needs_a_closure(stage: int) -> None:
    def act(run: Run) -> None:
        model = nn.Linear(6, 3)
        run.prepare(model, torch.optim.LBFGS(model.parameters()), vectors(15))

    all_raise("LBFGS runs the model several times in a step", act, stage=stage)


@in_stages
def test_collective_calls_inside_a_global_batch(stage: int) -> None:
    def save(run: Run, model: nn.Module) -> None:
        run.save("/nowhere")

    def evaluate(run: Run, model: nn.Module) -> None:
        run.evaluate(model, vectors(3), lambda model, batch: {"loss": cross_entropy(model, batch)})

    def state(run: Run, model: nn.Module) -> None:
        run.full_state_dict(model)

    for name, call in {"save": save, "evaluate": evaluate, "full_state_dict": state}.items():

        def act(run: Run, call: Callable[[Run, nn.Module], None] = call) -> None:
            model, _, loader = prepared(run)
            for batch in loader:
                run.backward(cross_entropy(model, batch))
                call(run, model)

        all_raise(f"run.{name} was called inside a global batch", act, stage=stage)


@in_stages
def test_leaving_the_loop_inside_a_global_batch(stage: int) -> None:
    def act(run: Run) -> None:
        model, _, loader = prepared(run)
        for _ in run.epochs(2):
            for batch in loader:
                run.backward(cross_entropy(model, batch))
                break

    all_raise("was left inside a global batch; leave it after optimizer.step", act, stage=stage)


@in_stages
def test_collective_calls_while_a_rank_has_no_data(stage: int) -> None:
    def act(run: Run) -> None:
        model, optimizer, loader = prepared(run)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
            if not run.in_batch:
                run.evaluate(model, vectors(3), lambda model, batch: {"loss": cross_entropy(model, batch)})

    sentence = "rank 1 has no data in this batch and does not come to run.evaluate; call it after the loop"
    all_raise(sentence, act, THREE, stage=stage)


def test_reduce_lr_on_plateau_on_a_rank_without_data() -> None:
    def act(run: Run) -> None:
        model = Perceptron().double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = ReduceLROnPlateau(optimizer)
        model, optimizer, loader, scheduler = prepared(run, model, optimizer, scheduler)
        for batch in loader:
            loss = cross_entropy(model, batch)
            run.backward(loss)
            optimizer.step()
            scheduler.step(float(loss.detach()))

    all_raise("ReduceLROnPlateau steps by a metric, which a rank without data does not have", act, THREE)


def test_learning_rates_that_differ_between_ranks() -> None:
    def act(run: Run) -> None:
        model, optimizer, loader = prepared(run)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.param_groups[0]["lr"] = 0.1 + run.rank * (run.step == 1)
            optimizer.step()

    all_raise(
        "the optimizer's lr (param group 0) is 0.1 on rank 0 and 1.1 on rank 1; set it from what is the same", act
    )


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.one(torch.tanh(self.one(x))))
        return y


class Elsewhere(Twice):
    """Uses a parameter outside the module that has it, after that has run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.one(x)) * self.one.bias[:3]
        return y


class Before(Twice):
    """Uses a parameter outside its module, where autograd does not keep it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.one(x)) + (x * self.one.bias)[:, :3]
        return y


def test_models_that_zero3_cannot_run() -> None:
    def trains(kind: Callable[[], Any]) -> Act:
        def act(run: Run) -> None:
            loop(run, None, kind().double())

        return act

    def compiled() -> Any:
        part: Any = torch.compile(nn.Linear(6, 3), backend="eager")
        return nn.Sequential(part)

    all_raise("one.weight runs twice in one pass, and stage 3 gathers its parameters once", trains(Twice), stage=3)
    all_raise("one.bias is used outside its module", trains(Elsewhere), stage=3, unit_bytes=64)
    all_raise("one.bias is used outside its module", trains(Before), stage=3, unit_bytes=64)
    all_raise("which torch.compile does not see; use stage 2", trains(compiled), stage=3)


def test_extra_forward_passes_in_zero3() -> None:
    def act(run: Run) -> None:
        model, _, loader = prepared(run)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            with torch.no_grad():
                cross_entropy(model, batch)

    def measures(run: Run) -> None:
        model, *_ = prepared(run)
        run.evaluate(
            model, vectors(9), lambda model, batch: {"loss": cross_entropy(model, batch) + cross_entropy(model, batch)}
        )

    all_raise("runs after run.backward inside a global batch, where other ranks do not", act, stage=3)
    all_raise("the metric function ran the model 2 times for a batch", measures, stage=3)


def test_state_dicts_of_sharded_models_and_optimizers() -> None:
    def model_of(run: Run) -> None:
        prepared(run)[0].state_dict()

    def into_model(run: Run) -> None:
        prepared(run)[0].load_state_dict(Perceptron().double().state_dict())

    def into_optimizer(run: Run) -> None:
        optimizer = prepared(run)[1]
        optimizer.load_state_dict({"state": {}, "param_groups": []})

    all_raise("use run.full_state_dict(model) or run.save()", model_of, stage=3)
    all_raise(
        "the model cannot be copied; copy it before run.prepare", lambda run: copy.deepcopy(prepared(run)[0]), stage=3
    )
    all_raise("load weights before run.prepare", into_model, stage=3)
    all_raise("use run.save() and run.load()", lambda run: prepared(run)[1].state_dict(), stage=1)
    all_raise("load it before run.prepare, or use run.load()", into_optimizer, stage=1)


class Tied(nn.Module):
    """Checkpointed parts that share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        y: torch.Tensor = self.last(x)
        return y


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_that_arrive_twice_in_one_backward(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "can_overlap", lambda group, units: True)
    all_raise("got a gradient twice in one backward pass", lambda run: loop(run, None, Tied().double()), stage=stage)


@pytest.mark.parametrize("stage", [0, 2])
def test_sparse_gradients(stage: int) -> None:
    def act(run: Run) -> None:
        model = nn.EmbeddingBag(9, 3, sparse=True)
        data = [(torch.tensor([number % 9]), number % 3) for number in range(15)]
        _, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
        for batch in loader:
            run.backward(cross_entropy(model, batch))

    all_raise("weight has a sparse gradient, which is not summed over ranks; use sparse=False", act, stage=stage)


def test_changes_to_model_and_optimizer_after_prepare() -> None:
    def thaw(run: Run) -> None:
        model, _, loader = prepared(run)
        model.frozen.requires_grad_(True)
        next(iter(loader))

    def add(run: Run) -> None:
        model = Perceptron().double()
        _, optimizer, loader = prepared(run, model, torch.optim.SGD(model.first.parameters(), 0.1))
        optimizer.add_param_group({"params": list(model.last.parameters())})
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()

    all_raise("frozen.weight became trainable after run.prepare", thaw)
    all_raise("a param group was added after run.prepare", add)
    all_raise("run.prepare was called twice", lambda run: (prepared(run), prepared(run)))
    all_raise("nothing is prepared yet", lambda run: run.backward(torch.ones(())))


def test_a_model_that_is_cast_after_prepare() -> None:
    def act(run: Run) -> None:
        model = nn.Linear(6, 3).double()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, optimizer, loader = run.prepare(model, optimizer, vectors(10))
        model.float().double()
        next(iter(loader))

    all_raise("weight was moved or cast after run.prepare", act, stage=1)


def test_a_random_split_that_differs_between_ranks() -> None:
    def act(run: Run, *, evaluates: bool) -> None:
        own = torch.Generator().manual_seed(run.rank)
        part, _ = torch.utils.data.random_split(vectors(20), [10, 10], generator=own)  # type: ignore[arg-type, var-annotated]
        model = nn.Linear(6, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer, vectors(10) if evaluates else part)
        run.evaluate(model, part, lambda model, batch: {"loss": cross_entropy(model, batch)})

    all_raise("prepared a dataset of 10 samples (rows ", lambda run: act(run, evaluates=False))
    all_raise("evaluates a dataset of 10 samples (rows ", lambda run: act(run, evaluates=True))


def test_an_optimizer_that_was_made_after_prepare() -> None:
    def act(run: Run) -> None:
        model = nn.Linear(6, 3).double()
        _, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors(10))
        other = torch.optim.SGD(model.parameters(), lr=0.0)
        for inputs, targets in loader:
            run.backward(nn.functional.cross_entropy(model(inputs), targets))
            other.step()

    all_raise("than the one that run.prepare returned", act, stage=0)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("num_worker", 'did you mean "num_workers"?'),
        ("collate", 'did you mean "collate_fn"?'),
        ("shufle", 'did you mean "shuffle"?'),
    ],
)
def test_unknown_loading_settings_name_the_nearest(setting: str, says: str) -> None:
    def act(run: Run) -> None:
        model = nn.Linear(6, 3).double()
        more: Any = {setting: 1}
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors(10), **more)

    all_raise(says, act, stage=0)


def test_prepare_arguments_in_the_wrong_order() -> None:
    def act(run: Run) -> None:
        model: Any = nn.Linear(6, 3).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(optimizer, model, vectors(10))

    all_raise("give them in this order", act, stage=0)
