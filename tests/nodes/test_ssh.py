"""What ssh says, what the login shell reads, and how many processes check hosts."""

import asyncio
import shutil
import subprocess
import sys
import time

import pytest
from waiting import is_alive, wait_until

from harness.nodes import processes, ssh
from harness.nodes.ssh import Login

CHANGED = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
The fingerprint for the ED25519 key sent by the remote host is
SHA256:0123.
Add correct host key in /home/ada/.ssh/known_hosts to get rid of this message.
Offending ED25519 key in /home/ada/.ssh/known_hosts:3
Host key for n1 has changed and you have requested strict checking.
Host key verification failed.
"""
UNPROTECTED = """@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @
Permissions 0644 for '/home/ada/.ssh/id_rsa' are too open.
ada@n1: Permission denied (publickey,password).
"""


@pytest.mark.parametrize(
    ("stderr", "login"),
    [
        (CHANGED, Login.CHANGED_KEY),
        (
            "No ED25519 host key is known for n1 and you have requested strict checking.\n"
            "Host key verification failed.",
            Login.UNKNOWN_KEY,
        ),
        (UNPROTECTED, Login.KEY_FILE_OPEN),
        ("ada@n1: Permission denied (publickey,password).", Login.DENIED),
        ("Received disconnect: Too many authentication failures", Login.DENIED),
        ("ssh: connect to host n1 port 22: Connection refused", Login.REFUSED),
        ("ssh: connect to host n1 port 22: No route to host", Login.UNREACHABLE),
        ("ssh: connect to host n1 port 22: Connection timed out", Login.TIMED_OUT),
        ("Connection timed out during banner exchange", Login.TIMED_OUT),
        ("ssh: Could not resolve hostname n1: Name or service not known", Login.UNRESOLVED),
        ("kex_exchange_identification: Connection closed by remote host", Login.CLOSED),
        ("Connection reset by 10.0.0.2 port 22", Login.CLOSED),
        ("This account is currently not available.", Login.NO_SHELL),
        ("something new", Login.FAILED),
        ("", Login.FAILED),
    ],
)
def test_each_message_of_ssh_is_told_apart(stderr, login):
    assert ssh.explain(stderr) is login


def test_a_changed_key_is_removed_under_the_name_that_ssh_has_for_it():
    assert ssh.outdated_key(CHANGED) == "-R n1 -f /home/ada/.ssh/known_hosts"
    other = CHANGED.replace("for n1", "for [n1.lab]:2222").replace("/home/ada", "/my home")
    assert ssh.outdated_key(other) == "-R '[n1.lab]:2222' -f '/my home/.ssh/known_hosts'"
    assert ssh.outdated_key("Permission denied") == ""


CLOSED = "kex_exchange_identification: Connection closed by remote host"
UNPRIVILEGED = "ada@jump: Permission denied (publickey)."


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([UNPRIVILEGED, CLOSED], UNPRIVILEGED),
        (["channel 0: open failed: connect failed: Connection refused",
          "stdio forwarding failed", CLOSED],
         "channel 0: open failed: connect failed: Connection refused"),
        (["a banner", "something new"], "something new"),
    ],
)  # fmt: skip
def test_the_line_with_the_cause_is_shown(lines, cause):
    assert ssh.cause("\n".join(lines) + "\n") == cause


@pytest.mark.parametrize(
    ("proxy", "lines", "jump"),
    [
        ("jump", [UNPRIVILEGED, CLOSED], "jump"),
        ("ada@jump:2200", ["Host key verification failed.", CLOSED], "-p 2200 ada@jump"),
        ("jump", [UNPRIVILEGED], ""),  # of the host itself
        ("jump", ["stdio forwarding failed", CLOSED], ""),
        ("jump,second", [UNPRIVILEGED, CLOSED], ""),
        ("nc %h %p", [UNPRIVILEGED, CLOSED], ""),
        ("", [UNPRIVILEGED], ""),
    ],
)
def test_the_failed_login_of_a_jump_host_is_told_apart(proxy, lines, jump):
    assert ssh.failed_jump(proxy, "\n".join(lines)) == jump


def test_no_login_ever_asks_or_trusts():
    options = set(ssh.options(2.2))
    assert {"-oBatchMode=yes", "-oStrictHostKeyChecking=yes", "-oConnectTimeout=3"} <= options


SHELLS = [
    argv
    for argv in (["bash", "-c"], ["dash", "-c"], ["busybox", "sh", "-c"], ["tcsh", "-c"])
    if shutil.which(argv[0])
]
NASTY = "import sys\nprint(sys.argv[1:], sys.stdin.readline(), '! \"$HOME\" `id`')\n"


@pytest.mark.parametrize("shell", SHELLS, ids=lambda argv: argv[0])
def test_a_program_arrives_unchanged_through_any_login_shell(shell):
    arguments = ["a b", "$(touch /tmp/pwned)", "it's"]
    remote = ssh.python_command(
        NASTY, arguments, pythons=["/no/such/py thon", sys.executable], limit_s=5
    )
    done = subprocess.run([*shell, remote], input="hello\n", capture_output=True, text=True)
    assert done.stdout == f'{arguments!r} hello\n ! "$HOME" `id`\n'


def test_a_host_without_any_python_says_so():
    remote = ssh.python_command("print(1)", [], pythons=["/no/python"], limit_s=5)
    done = subprocess.run(["sh", "-c", remote], capture_output=True, text=True)
    assert done.returncode == 127
    assert "/no/python" in done.stderr


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
