"""The agent: a process that watches over a rank, independent of torch, MPI and the GIL.

docs/design/failures.md lists the failures and who detects each. Standard library only.
"""

# Time for ranks to notice a peer's failure by themselves before they are ended.
GRACE_S = 3.0
CHANNEL_VARIABLE = "HARNESS_AGENT_FD"
CHECK = "run: bash setup/check_nodes.sh HOSTFILE"
SEE_OUTPUT = f"see its output, and {CHECK}"
