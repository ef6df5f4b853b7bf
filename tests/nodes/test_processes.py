import asyncio
import time

from waiting import is_alive, wait_until

from harness.nodes import processes


def test_a_command_past_its_time_is_killed_with_its_children_and_keeps_its_output():
    script = "echo before; sleep 60 & echo $!; wait"
    start_s = time.monotonic()
    done = asyncio.run(processes.run(["sh", "-c", script], timeout_s=0.5))
    assert time.monotonic() - start_s < 5
    before, pid = done.stdout.split()
    assert (done.returncode, before) == (None, "before")
    wait_until(lambda: not is_alive(pid), 5)


def test_a_polite_end_lets_the_child_clean_up(tmp_path):
    script = f"trap 'touch {tmp_path}/cleaned; exit' TERM; echo up; while :; do sleep 0.05; done"

    async def end():
        async with processes.start(["sh", "-c", script], grace_s=5) as child:
            await child.read_line()

    asyncio.run(end())
    assert (tmp_path / "cleaned").exists()


def test_a_flood_of_output_is_bounded():
    done = asyncio.run(processes.run(["head", "-c", str(20 * 2**20), "/dev/zero"], timeout_s=30))
    assert len(done.stdout) <= 9 * 2**20


def test_a_child_has_no_terminal_to_ask_a_password_on():
    done = asyncio.run(processes.run(["sh", "-c", "echo > /dev/tty"], timeout_s=5))
    assert done.returncode != 0
