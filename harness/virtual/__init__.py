"""A cluster of real nodes on one machine: namespaces, shaped links, own sshd, CPU quotas.

`python -m harness.virtual` (setup/virtual_cluster.sh) is its command line. It runs before
anything is installed, so it needs the standard library alone.
"""
