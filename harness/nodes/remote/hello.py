"""Gather every rank's host name over MPI; rank 0 prints them. Started by mpirun on the hosts."""

import json
import os
import signal
import sys

signal.alarm(int(sys.argv[1]))

from mpi4py import MPI  # noqa: E402  (importing it starts MPI, which may hang)

world = MPI.COMM_WORLD
names = world.gather(os.uname().nodename)
if names is not None:
    print("@harness:hello " + json.dumps({"size": world.size, "names": names}), flush=True)
