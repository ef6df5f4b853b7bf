"""What each rank of the trainer's test runs; importable by name."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from harness.domain.strategy import Strategy
from harness.errors import HarnessError
from harness.runtime.engines.optimizers import OuterOptions
from harness.trainer import NamedParameters, Trainer

BATCH, N_EPOCHS, MAX_NORM, EMA_DECAY = 6, 3, 0.5, 0.9


class Words(nn.Module):
    """A class for each word, and extra state; its input is a keyword, so that the harness wraps
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.inner, self.last = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, *, words: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.last(torch.relu(self.inner(self.table(words))))}

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(2)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert state == 2


def make_model(seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    return Words().double(), {"words": torch.arange(8).view(2, 4)}


def make_data() -> list[dict[str, torch.Tensor]]:
    """Fifteen samples, of which some words have no target."""
    drawn = torch.Generator().manual_seed(1)
    words = torch.randint(11, (15, 4), generator=drawn)
    labels = torch.randint(-2, 5, (15, 4), generator=drawn)
    labels[labels < 0] = -100
    return [{"words": w, "labels": y} for w, y in zip(words, labels, strict=True)]


def make_optimizer(named: NamedParameters) -> Optimizer:
    """Two groups with rates of their own."""
    table = [p for name, p in named if name.startswith("table.")]
    others = [p for name, p in named if not name.startswith("table.")]
    return torch.optim.AdamW(
        [{"params": table, "lr": 0.03}, {"params": others, "weight_decay": 0.1}],
        lr=0.01,
        amsgrad=True,
    )


def make_scheduler(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def count_right(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(-1) == labels).sum()


def sum_normalisers(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert labels.shape == logits.shape[:-1]
    labels.fill_(0)  # which the loss must not read
    return logits.logsumexp(-1).sum()


METRICS = {"accuracy": count_right, "normaliser": sum_normalisers}


def train_alone(strategy: Strategy) -> tuple[list[float], dict[str, Any]]:
    """The losses and norms of gradients, and the state, of a training by the only rank."""
    trainer = Trainer(
        *make_model(), strategy=strategy, optimizer=make_optimizer, max_grad_norm=MAX_NORM
    )
    scheduler, losses = make_scheduler(trainer.optimizer), []
    for epoch in range(N_EPOCHS):
        for batch in trainer.batches(make_data(), epoch=epoch):
            losses += [trainer.mean_loss(trainer.step(batch)), float(trainer.grad_norm)]
        scheduler.step()
    state = trainer.state_dict()
    trainer.close()
    return losses, state


def train_alone_on_a_gpu(_rank: int, _size: int, file: str, strategy: Strategy) -> None:
    """Save what ``train_alone`` finds over NCCL."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert torch.cuda.max_memory_allocated() == 0
    found = train_alone(strategy)
    assert torch.cuda.max_memory_allocated() > 0  # it trained there
    torch.save(found, file)
    dist.destroy_process_group()


def _refused(act: Callable[[], object]) -> str:
    try:
        act()
    except HarnessError as error:
        return str(error)
    return "not refused"


def train_and_change(rank: int, size: int, directory: str, before: str, after: Strategy) -> None:
    """Train two epochs by a strategy's file, then one by another strategy."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    data, losses = make_data(), []

    def make(strategy: Strategy | str, seed: int = 0, optimizer: Any = make_optimizer) -> Trainer:
        return Trainer(
            lambda: make_model(seed), strategy=strategy, optimizer=optimizer,
            max_grad_norm=MAX_NORM, ema_decay=EMA_DECAY,
        )  # fmt: skip

    def train(trainer: Trainer, epoch: int) -> None:
        for batch in trainer.batches(data, epoch=epoch):
            losses.extend([trainer.mean_loss(trainer.step(batch)), float(trainer.grad_norm)])

    # Rank 0 alone has the file.
    first = make(before if rank == 0 else "no file")
    scheduler = make_scheduler(first.optimizer)
    fewer = data[: len(data) - rank // 2]
    unequal_data = _refused(lambda: next(first.batches(fewer)))
    shuffled = data if rank != 1 else [*data[:7], data[8], data[7], *data[9:]]
    other_data = _refused(lambda: first.evaluate(shuffled))
    for epoch in range(2):
        train(first, epoch)
        scheduler.step()
    first.save(f"{directory}/saved")
    plain = first.state_dict(), first.optimizer_state_dict()
    refusals = {"wrong batch": _refused(lambda: first.step(torch.zeros(2)))}  # type: ignore[arg-type]
    refusals |= {"unequal data": unequal_data, "other data": other_data}
    log = logging.getLogger("harness.runtime.tracing.export")
    refusals["warns"] = str(log.isEnabledFor(logging.WARNING))
    wrong = [{"words": 1}] if rank == 1 else data
    refusals["wrong data"] = _refused(lambda: first.evaluate(wrong))
    first.close()

    second = make(after, seed=7)
    make_scheduler(second.optimizer)
    blocked = Path(directory, "saved", ".rank1")
    if rank == 1:
        blocked.touch()
    dist.barrier()
    refusals["unwritten"] = _refused(lambda: second.save(f"{directory}/saved"))
    # Another host's rank lacks a shard, while the others would wait for its weights.
    parts = Path(directory, "saved") if rank != 1 else Path(directory, "elsewhere")
    made = second.state_dict()
    refusals["missing"] = _refused(lambda: second.load(parts))
    is_kept = all(torch.equal(made[name], x) for name, x in second.state_dict().items())
    refusals["missing"] += f"; kept: {is_kept}"
    second.load(f"{directory}/saved")
    train(second, 2)
    evaluation = second.evaluate(data, metrics=METRICS)
    results = second.state_dict(), second.averaged_state_dict(), evaluation
    refusals["metric"] = _refused(lambda: second.evaluate(data, metrics={"all": lambda x, _: x}))
    refusals["loss"] = _refused(lambda: second.evaluate(data, metrics={"loss": count_right}))
    reordered = METRICS if rank != 1 else dict(reversed(METRICS.items()))
    refusals["unlike metrics"] = _refused(lambda: second.evaluate(data, metrics=reordered))
    listed: Any = [count_right]
    refusals["listed metrics"] = _refused(lambda: second.evaluate(data, metrics=listed))
    batch = next(second.batches(data))
    if rank == 1:
        blocked.unlink()
        Path(directory, "saved", "shard99.safetensors").touch()  # by 100 ranks
    dist.barrier()
    second.save(f"{directory}/saved")
    files = sorted(path.name for path in Path(directory, "saved").iterdir())
    second.close()
    refusals["closed"] = _refused(lambda: second.step(batch))

    third = Trainer(lambda: make_model(8), strategy=after, optimizer=make_optimizer)
    one_group = {**plain[1], "param_groups": plain[1]["param_groups"][:1]}
    refusals["other groups"] = _refused(lambda: third.load_state_dict(plain[0], one_group))
    refusals["no state"] = _refused(lambda: third.load_state_dict(plain[0], plain[0]))
    third.load_state_dict(*plain)
    is_equal = all(torch.equal(plain[0][name], x) for name, x in third.state_dict().items())
    loaded = is_equal, third.optimizer_state_dict()
    third.close()

    other = make(after, optimizer=torch.optim.RMSprop)
    refusals["another's batch"] = _refused(lambda: other.step(batch))
    refusals["other optimizer"] = _refused(lambda: other.load(f"{directory}/saved"))
    other.close()
    whole = make(after, optimizer=torch.optim.Adafactor)
    for batch in whole.batches(data[:BATCH]):
        whole.step(batch)
    refusals["factors"] = _refused(lambda: whole.save(f"{directory}/factors"))
    whole.close()
    refusals["unequal weights"] = _refused(lambda: make(after, seed=rank // 2))
    found = losses, results, refusals, files, plain, loaded
    torch.save(found, Path(directory, f"result{rank}"))
    dist.barrier()
    dist.destroy_process_group()


def train_averaged(rank: int, size: int, directory: str, strategy: Strategy) -> None:
    """Train two epochs by replicas that are averaged, and the second again from a state; save what
    each pair of trainings has found, and the evaluation of its state by the whole model."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    data, found = make_data(), []
    options = OuterOptions(sync_every=2, learning_rate=0.7, momentum=0.9)
    for is_second in (False, True):
        with Trainer(
            *make_model(seed=is_second), strategy=strategy, optimizer=make_optimizer,
            max_grad_norm=MAX_NORM, outer=options,
        ) as trainer:  # fmt: skip
            if is_second:
                trainer.load(f"{directory}/saved")
            for epoch in (1,) if is_second else (0, 1):
                for batch in trainer.batches(data, epoch=epoch):
                    trainer.step(batch)
                trainer.evaluate(data)
                if epoch == 0:
                    trainer.save(f"{directory}/saved")
            found.append((trainer.state_dict(), trainer.evaluate(data)["loss"]))
    torch.save((found, _refused(lambda: _leave_early(strategy))), f"{directory}/result{rank}")
    dist.destroy_process_group()


def _leave_early(strategy: Strategy) -> None:
    """Train one step on rank 1, and wait for it in a second one on the others."""
    with Trainer(
        *make_model(), strategy=strategy, optimizer=make_optimizer, timeout_s=2.0
    ) as trainer:
        for batch in trainer.batches(make_data()):
            trainer.step(batch)
            if dist.get_rank() == 1:
                break
