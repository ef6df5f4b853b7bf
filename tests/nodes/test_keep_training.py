"""A training is started again on the hosts that are fit."""

import signal
from pathlib import Path

import pytest

from harness.domain.hostfile import Host
from harness.errors import ConfigError
from harness.nodes import keep_training
from harness.nodes.facts import Finding, Status
from harness.nodes.keep_training import LaunchCommand

TRAIN = ("./entry.sh", "train", "--batch-size", "8", "--save-every", "5")
WORDS = ("mpirun", "-np", "5", "--hostfile", "hosts.txt", *TRAIN)


def test_a_launch_on_fewer_hosts_has_their_slots_and_continues():
    command, fit = LaunchCommand.parse(WORDS), [Host("a", 1), Host("b", 2)]
    expected = ["mpirun", "-np", "3", "--hostfile", "fit.txt", *TRAIN, "--resume"]
    assert command.on(fit, [*fit, Host("c", 2)], Path("fit.txt")) == expected


@pytest.mark.parametrize(
    ("fit", "lost", "n_ranks"),
    [
        ([9], [], 5),
        ([9], [1], 5),
        ([None], [None], 5),  # mpirun counts its cores
        ([1, 1], [], 5),  # --oversubscribe
        ([1, 1], [1], 3),
    ],
)
def test_a_launch_has_the_ranks_that_share_the_slots_of_its_hosts(fit, lost, n_ranks):
    fit, lost = ([Host(f"{name}{k}", n) for k, n in enumerate(slots)]
                 for name, slots in (("fit", fit), ("lost", lost)))  # fmt: skip
    command = LaunchCommand.parse(WORDS)
    assert command.on(fit, [*fit, *lost], Path("fit.txt"))[2] == str(n_ranks)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "give the command"),
        (["torchrun", *WORDS[1:]], "give the command"),
        ([*WORDS[:5], "./entry.sh", "links"], "only a training"),
        ([*WORDS[:5], *TRAIN[:4]], "add --save-every"),
        ([*WORDS[:5], *TRAIN[:2], *TRAIN[4:]], "add --batch-size"),
        ([*WORDS[:3], *TRAIN], "add --hostfile"),
        (["mpirun", "-np", "all", *WORDS[3:]], "-np is 'all'"),
    ],
)
def test_a_command_that_no_launch_can_continue_is_refused(words, reason):
    with pytest.raises(ConfigError, match=reason):
        LaunchCommand.parse(words)


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """Keeps a training under a fake mpirun, whose launches run given lines of shell."""
    (tmp_path / "hosts.txt").write_text("a slots=1\nb slots=1\n")
    before = signal.getsignal(signal.SIGTERM)

    def run(launches, unfit):
        """The exit code and the command of each launch; `unfit` are hosts, check by check."""
        lines = [f"  {k}) {line} ;;" for k, line in enumerate(launches)]
        log = tmp_path / "launches"
        script = f'echo "$@" >> {log}\ncase $(($(wc -l < {log}) - 1)) in\n' + "\n".join(lines)
        mpirun = tmp_path / "mpirun"
        mpirun.write_text(f"#!/bin/bash\n{script}\nesac\n")
        mpirun.chmod(0o755)
        each = iter(unfit)

        def found(hosts, hostfile):
            lost = next(each)
            return {h.name: Finding(h.name, "port", Status.CRITICAL, "no answer")
                    for h in hosts if h.name in lost}  # fmt: skip

        monkeypatch.setattr(keep_training, "unfit", found)
        words = [str(mpirun), "-np", "2", "--hostfile", str(tmp_path / "hosts.txt"), *TRAIN]
        flags = ["--check-every", "1s", "--max-restarts", "3", "--wait", "1s"]
        code = keep_training.main([*flags, *words])
        return code, log.read_text().splitlines()

    yield run
    signal.signal(signal.SIGTERM, before)


def test_a_training_goes_on_without_a_lost_host_and_with_it_when_it_is_back(keep):
    until_ended = "trap 'exit 1' TERM; sleep 20 & wait"
    code, launches = keep(["exit 255", until_ended, "exit 0"], [["b"], ["b"], [], []])
    assert code == 0
    assert [line.split()[1] for line in launches] == ["2", "1", "2"]
    assert ["--resume" in line for line in launches] == [False, True, True]


def test_the_last_launch_is_not_ended_for_a_host_that_is_back(keep):
    code, launches = keep(["exit 1", "exit 1", "exit 1", "sleep 1.5; exit 0"], [["b"]] * 3)
    assert (code, len(launches)) == (0, 4)


@pytest.mark.parametrize(
    ("launches", "unfit", "code", "n_launches"),
    [
        (["exit 0"], [], 0, 1),
        (["exit 2"], [[]], 2, 1),  # refused by `train`, and no host is lost
        (["exit 2", "exit 0"], [["a"], ["a"]], 0, 2),
        (["exit 1"] * 4, [[]] * 4, 1, 4),
        (["exit 1"], [["a", "b"]] * 3, 1, 1),
    ],
)
def test_launches_end_with_success_a_refusal_or_the_last_restart(
    keep, launches, unfit, code, n_launches
):
    found, words = keep(launches, unfit)
    assert (found, len(words)) == (code, n_launches)
