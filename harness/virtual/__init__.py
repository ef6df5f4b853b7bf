"""A virtual cluster on one machine: nodes with namespaces, shaped links, sshd and CPU quotas.

Command line: `python -m harness.virtual` (setup/virtual_cluster.sh). Needs only the standard
library, because it runs before anything is installed.
"""
