"""Listen, report the port, connect to all peers by name. Runs on the host; Python 3.6 suffices.

Lines on standard input and output, JSON each:
    out  {"port": P}
    in   {"name": OWN, "timeout_s": T, "peers": [[NAME, HOSTNAME, PORT, ADDRESS], ...]}
    out  {"peers": {NAME: {"rtt_s": R} | {"error": E}}}
    in   a line or the end of the file: the listener may end
"""

import json
import signal
import socket
import sys
import threading
import time

LIMIT_S = int(sys.argv[1])


class Identity:
    """This host's name in the hostfile, once the sender has sent it."""

    def __init__(self) -> None:
        self.name = ""
        self.is_known = threading.Event()


def serve(listener: socket.socket, identity: "Identity") -> None:
    """Answer every connection with this host's name in the hostfile."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(LIMIT_S)
        threading.Thread(target=answer, args=(connection, identity), daemon=True).start()


def answer(connection: socket.socket, identity: "Identity") -> None:
    try:
        with connection:
            identity.is_known.wait(LIMIT_S)
            while connection.recv(1):
                connection.sendall(identity.name.encode() + b"\n")
    except OSError:
        pass  # the peer reports it


def ask_both(
    name: str, hostname: str, port: int, address: str, timeout_s: float
) -> "dict[str, object]":
    """Connect to the peer by host name, then at the address that runs take, if that is another."""
    found = ask(hostname, port, name, timeout_s)
    if "error" in found or address in ("", found["address"]):
        return found
    direct = ask(address, port, name, timeout_s)
    return {"error": "interface", "detail": direct["detail"]} if "error" in direct else found


def ask(target: str, port: int, name: str, timeout_s: float) -> "dict[str, object]":
    """Connect to a name or address and verify that the peer of this name answers."""
    address = ""
    try:
        address = str(socket.getaddrinfo(target, port, type=socket.SOCK_STREAM)[0][4][0])
        with socket.create_connection((target, port), timeout=timeout_s) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            replies = connection.makefile("rb")
            rtts_s = []
            for _ in range(3):
                start_s = time.monotonic()
                connection.sendall(b"?")
                reply = replies.readline().decode().strip()
                rtts_s.append(time.monotonic() - start_s)
    except socket.gaierror as error:
        return {"error": "resolve", "detail": error.strerror}
    except socket.timeout:  # noqa: UP041  (its own type before Python 3.10)
        return {"error": "timeout", "detail": address}
    except OSError as error:
        return {"error": "refused", "detail": f"{address}: {error.strerror or error}"}
    if reply != name:
        return {"error": "impostor", "detail": f"{address} is {reply or 'silent'}"}
    return {"rtt_s": min(rtts_s), "address": address}


def listen() -> socket.socket:
    """Open a listener for IPv4, and for IPv6 if the host has it."""
    try:
        listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::", 0))
    except OSError:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("0.0.0.0", 0))
    listener.listen(512)
    return listener


def send(message: "dict[str, object]") -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    signal.alarm(LIMIT_S)
    identity = Identity()
    listener = listen()
    threading.Thread(target=serve, args=(listener, identity), daemon=True).start()
    send({"port": listener.getsockname()[1]})
    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    identity.name = order["name"]
    identity.is_known.set()
    results: dict[str, object] = {}

    def collect(name: str, hostname: str, port: int, address: str) -> None:
        results[name] = ask_both(name, hostname, port, address, order["timeout_s"])

    threads = [threading.Thread(target=collect, args=peer, daemon=True) for peer in order["peers"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    send({"peers": results})
    sys.stdin.readline()


if __name__ == "__main__":
    main()
