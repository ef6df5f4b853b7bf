"""Names of files in a run's directory that several programs write."""

HEADER_FILE = "run.json"
# Reserved space for the final header, in case the disk is full.
RESERVE_FILE = ".run.json.reserve"
HEARTBEAT_FILE = "heartbeat"
