"""A process beside each rank that watches over it, independent of torch, MPI and the GIL.

docs/design/failures.md says who notices what, and when. Standard library only.
"""

CHANNEL_VARIABLE = "HARNESS_AGENT_FD"
