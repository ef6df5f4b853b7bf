"""The settings that a run's header keeps."""

import platform

from harness.runtime.ranks.settings import read_settings


def test_variables_that_change_speed_are_kept_and_no_others():
    kept = {
        "NCCL_P2P_DISABLE": "1", "GLOO_SOCKET_IFNAME": "eth0", "OMPI_MCA_btl_tcp_links": "2",
        "NCCL_TOPOLOGY_HINT": "ring",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }  # fmt: skip
    left_out = {
        "OMPI_MCA_orte_precondition_transports": "a secret", "NCCL_DEBUG": "INFO", "HOME": "/root",
        "TORCH_LOGS": "dynamo",
        "CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "4", "MY_NCCL_TOKEN": "a secret",
        "TORCH_CPP_LOG_LEVEL": "ERROR", "OMPI_MCA_ess_base_vpid": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMPI_MCA_btl_tcp_if_exclude": "docker0",
    }  # fmt: skip
    found = read_settings({**kept, **left_out})
    assert found.pop("kernel") == platform.release()
    found.pop("GPU driver", None)
    assert found == kept


def test_a_value_is_one_short_line():
    found = read_settings({"NCCL_TOPO_FILE": "a\nb" + "c" * 1000})
    assert found["NCCL_TOPO_FILE"].startswith("a bccc")
    assert len(found["NCCL_TOPO_FILE"]) == 200
