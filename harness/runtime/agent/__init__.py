"""The agent: a process that watches over a rank, independent of torch, MPI and the GIL.

docs/design/failures.md lists the failures and who detects each. Standard library only.
"""

CHANNEL_VARIABLE = "HARNESS_AGENT_FD"
