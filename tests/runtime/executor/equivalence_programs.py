"""Models drawn at random, each a program that its name spells out:

    program/steps/exported linear 0, argmax 3, embed# 4, set_steps 3 5, linear@3 6

Values are numbered: 0 to 2 are the inputs (steps, integers, a mask), 3 is the first instruction's.
`embed#` freezes its parts, `linear@3` uses those of the instruction that made value 3. The output
is of the last value; `/steps` has targets for each step, and `/exported` a branch on a size, which
torch.fx cannot trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch
from equivalence_functions import N_STEPS, WIDTH
from equivalence_instructions import INSTRUCTIONS, N_VALUES, Instruction
from torch import Tensor, nn

from harness.runtime.models.task import InputSpec, Task

N_CLASSES = 6
PREFIX = "program"
_INPUTS = "sim"  # their kinds
_MOST = 10  # instructions


@dataclass(frozen=True)
class Line:
    """One instruction of a program.

    Attributes:
        parts: number of the value whose instruction has its parts.
    """

    name: str
    arguments: tuple[int, ...]
    parts: int
    is_frozen: bool

    @property
    def instruction(self) -> Instruction:
        return INSTRUCTIONS[self.name]

    def text(self, number: int) -> str:
        """The instruction that makes this value."""
        shared = f"@{self.parts}" if self.parts != number else ""
        frozen = "#" if self.is_frozen else ""
        return " ".join([f"{self.name}{frozen}{shared}", *map(str, self.arguments)])


def _line(text: str, number: int) -> Line:
    what, *arguments = text.split()
    what, _, parts = what.partition("@")
    name = what.rstrip("#")
    at = int(parts) if parts else number
    return Line(name, tuple(map(int, arguments)), at, name != what)


def lines_of(program: str) -> list[Line]:
    """The instructions of a program."""
    _, _, body = program.partition(" ")
    return [_line(text, k) for k, text in enumerate(body.split(", "), len(_INPUTS))]


def text_of(lines: list[Line], options: str) -> str:
    """The program of some instructions."""
    body = ", ".join(line.text(k) for k, line in enumerate(lines, len(_INPUTS)))
    return f"{PREFIX}{options} {body}"


def options_of(program: str) -> str:
    """What stands between the prefix and the instructions."""
    return program.partition(" ")[0].removeprefix(PREFIX)


class _Step(nn.Module):
    """The parts of an instruction."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        for name, part in line.instruction.parts().items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            elif isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            else:
                assert isinstance(part, Tensor)
                self.register_buffer(name, part)
        if line.is_frozen:
            self.requires_grad_(False)


class Program(nn.Module):
    """The model of a program."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._lines = lines_of(program)
        self._is_exported = "/exported" in options_of(program)
        gives_row = self._lines[-1].instruction.gives == "r"
        self._has_mean = not gives_row and "/steps" not in options_of(program)
        self.steps = nn.ModuleDict()
        for number, line in enumerate(self._lines, len(_INPUTS)):
            if line.parts == number:
                self.steps[f"of{number}"] = _Step(line)
        self.start, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, N_CLASSES)

    def forward(self, x: Tensor, indices: Tensor, mask: Tensor) -> Tensor:
        if self._is_exported and x.shape[0] == 0:
            x = 2 * x
        values = [self.start(x), indices, mask]
        for line in self._lines:
            parts: Any = self.steps[f"of{line.parts}"]
            values.append(line.instruction.run(parts, *(values[k] for k in line.arguments)))
        last = values[-1].mean(1) if self._has_mean else values[-1]
        found: Tensor = self.head(last)
        return found


def program_task(program: str) -> Task:
    """The task of a program; its weights are as PyTorch draws them."""
    steps, integers = (N_STEPS, WIDTH), (N_STEPS,)
    return Task(
        model=Program(program),
        inputs=(
            InputSpec(name="x", shape=steps),
            InputSpec(name="indices", shape=integers, dtype=torch.int64, n_values=N_VALUES),
            InputSpec(name="mask", shape=steps, dtype=torch.bool, n_values=2),
        ),
        n_classes=N_CLASSES,
        target_shape=integers if "/steps" in options_of(program) else (),
    )


def _kinds(lines: list[Line]) -> str:
    return _INPUTS + "".join(line.instruction.gives for line in lines)


def _draw_arguments(rng: Random, takes: str, kinds: str) -> tuple[int, ...] | None:
    """Values of these kinds, recent ones more often; None if there is none of one kind."""
    found = []
    for kind in takes:
        known = [k for k, one in enumerate(kinds) if one == kind]
        if not known:
            return None
        found.append(known[-1] if rng.random() < 0.5 else rng.choice(known))
    return tuple(found)


def _draw_line(rng: Random, lines: list[Line]) -> Line | None:
    kinds, number = _kinds(lines), len(_INPUTS) + len(lines)
    shared = [k for k, line in enumerate(lines, len(_INPUTS)) if line.instruction.parts()]
    if shared and rng.random() < 0.1:
        at = rng.choice(shared)
        first = lines[at - len(_INPUTS)]
        name, at, is_frozen = first.name, first.parts, first.is_frozen
    else:
        name, at, is_frozen = rng.choice(list(INSTRUCTIONS)), number, rng.random() < 0.08
    arguments = _draw_arguments(rng, INSTRUCTIONS[name].takes, kinds)
    return None if arguments is None else Line(name, arguments, at, is_frozen)


def _joined(lines: list[Line]) -> list[Line]:
    """Instructions that add up the values of steps, rows and pictures that nobody reads."""
    lines = list(lines)

    def add(name: str, *arguments: int) -> int:
        number = len(_INPUTS) + len(lines)
        lines.append(Line(name, arguments, number, is_frozen=False))
        return number

    read = {k for line in lines for k in line.arguments}
    unread = [(k, kind) for k, kind in enumerate(_kinds(lines)) if k not in read]
    total = 0
    for k, kind in unread:
        if kind == "p":
            total = add("add", total, add("steps", k))
        elif kind == "r":
            total = add("broadcast", total, k)
        elif kind == "s" and k:
            total = add("add", total, k)
    add("tanh", total)
    return lines


def _is_trained(program: str) -> bool:
    """Whether plain PyTorch trains it, by one sample too."""
    torch.manual_seed(0)
    model = program_task(program).model.double()
    x, indices = torch.randn(3, N_STEPS, WIDTH).double(), torch.randint(8, (3, N_STEPS))
    inputs = x, indices, torch.rand(3, N_STEPS, WIDTH) > 0.5
    try:
        for n in (3, 1):
            model(*(each[:n] for each in inputs)).square().mean().backward()
    except (RuntimeError, ValueError):  # of autograd, for values that were changed in place
        return False
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return bool(gradients) and all(g.isfinite().all() and g.abs().max() < 1e3 for g in gradients)


@cache
def draw_program(seed: str) -> str:
    """A program that PyTorch can train, by its seed alone."""
    rng = Random(f"program {seed}")
    while True:
        lines: list[Line] = []
        n = rng.randint(3, _MOST)
        while len(lines) < n:
            line = _draw_line(rng, lines)
            if line is not None:
                lines.append(line)
        options = "/steps" * (rng.random() < 0.3) + "/exported" * (rng.random() < 0.3)
        program = text_of(_joined(lines), options)
        state = torch.get_rng_state()
        is_trained = _is_trained(program)
        torch.set_rng_state(state)
        if is_trained:
            return program


def is_program(model: str) -> bool:
    """Whether the name of a model is a program."""
    return model.startswith(PREFIX)


def is_normed(program: str) -> bool:
    """Whether statistics are those of a microbatch."""
    return any(line.name in ("batch_norm", "picture_norm") for line in lines_of(program))


def is_dropping(program: str) -> bool:
    """Whether it draws masks."""
    return any(line.name == "dropout" for line in lines_of(program))
