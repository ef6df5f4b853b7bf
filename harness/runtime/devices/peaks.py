"""Published dense peaks of GPUs, by the name that the driver reports, and dtype.

Peaks are for tensor cores without sparsity that accumulate in fp32, as PyTorch does by default
(a GeForce's then have half the rate of accumulation in fp16); fp32 is without tensor cores. Each
group names its source. A device that is not listed has no MFU, and the tables say so.
"""

from __future__ import annotations

_DTYPES = ("fp32", "tf32", "bf16", "fp16")
_NONE = 0.0  # no hardware for this dtype

_A100 = (19.5, 156.0, 312.0, 312.0)
_H100_SXM = (66.9, 494.7, 989.4, 989.4)
_H100_NVL = (60.0, 417.5, 835.5, 835.5)
_V100_SXM = (15.7, _NONE, _NONE, 125.0)
_V100_PCIE = (14.0, _NONE, _NONE, 112.0)

# By source: TFLOP/s in the order of _DTYPES.
_PUBLISHED: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "NVIDIA's data sheets of Hopper and Blackwell": {
        "NVIDIA B200": (75.0, 1125.0, 2250.0, 2250.0),
        "NVIDIA H200": _H100_SXM,
        "NVIDIA H200 NVL": _H100_NVL,
        "NVIDIA GH200 480GB": _H100_SXM,
        "NVIDIA H100 80GB HBM3": _H100_SXM,
        "NVIDIA H100 NVL": _H100_NVL,
        "NVIDIA H100 PCIe": (51.2, 378.0, 756.0, 756.0),
    },
    "NVIDIA's data sheets of A and L series": {
        "NVIDIA A100-SXM4-40GB": _A100,
        "NVIDIA A100-SXM4-80GB": _A100,
        "NVIDIA A100-PCIE-40GB": _A100,
        "NVIDIA A100 80GB PCIe": _A100,
        "NVIDIA A40": (37.4, 74.8, 149.7, 149.7),
        "NVIDIA A30": (10.3, 82.0, 165.0, 165.0),
        "NVIDIA A10": (31.2, 62.5, 125.0, 125.0),
        "NVIDIA A10G": (31.5, 35.0, 70.0, 70.0),
        "NVIDIA A16": (4.5, 9.0, 17.9, 17.9),
        "NVIDIA A2": (4.5, 9.0, 18.0, 18.0),
        "NVIDIA L40S": (91.6, 183.0, 362.05, 362.05),
        "NVIDIA L40": (90.5, 90.5, 181.05, 181.05),
        "NVIDIA L4": (30.3, 60.0, 121.0, 121.0),
        "NVIDIA L20": (59.8, 59.8, 119.5, 119.5),
    },
    "NVIDIA's data sheets of P, V and T series": {
        "Tesla T4": (8.1, _NONE, _NONE, 65.0),
        "Tesla V100-SXM2-16GB": _V100_SXM,
        "Tesla V100-SXM2-32GB": _V100_SXM,
        "Tesla V100-PCIE-16GB": _V100_PCIE,
        "Tesla V100-PCIE-32GB": _V100_PCIE,
        "Tesla V100S-PCIE-32GB": (16.4, _NONE, _NONE, 130.0),
        "Tesla P100-SXM2-16GB": (10.6, _NONE, _NONE, 21.2),
        "Tesla P100-PCIE-16GB": (9.3, _NONE, _NONE, 18.7),
        "Tesla P100-PCIE-12GB": (9.3, _NONE, _NONE, 18.7),
        "Tesla P40": (11.8, _NONE, _NONE, _NONE),
        "Tesla P4": (5.5, _NONE, _NONE, _NONE),
    },
    "NVIDIA's data sheets of workstation boards": {
        "NVIDIA RTX 6000 Ada Generation": (91.1, 182.1, 364.2, 364.2),
        "NVIDIA RTX A6000": (38.7, 77.4, 154.8, 154.8),
        "NVIDIA RTX A5500": (34.1, 68.2, 136.4, 136.4),
        "NVIDIA RTX A5000": (27.8, 55.6, 111.1, 111.1),
        "NVIDIA RTX A4500": (23.7, 47.3, 94.6, 94.6),
        "NVIDIA RTX A4000": (19.2, 38.3, 76.7, 76.7),
        "NVIDIA RTX A2000": (8.0, 16.0, 31.9, 31.9),
        "NVIDIA RTX A2000 12GB": (8.0, 16.0, 31.9, 31.9),
        "Quadro RTX 6000": (16.3, _NONE, _NONE, 130.5),
        "Quadro RTX 8000": (16.3, _NONE, _NONE, 130.5),
        "NVIDIA TITAN RTX": (16.3, _NONE, _NONE, 130.5),
        "TITAN RTX": (16.3, _NONE, _NONE, 130.5),
    },
    "NVIDIA's white paper of RTX Blackwell; 2 x cores x boost for the 5060s, 5050": {
        "NVIDIA GeForce RTX 5090": (104.8, 104.8, 209.5, 209.5),
        "NVIDIA GeForce RTX 5080": (56.3, 56.3, 112.6, 112.6),
        "NVIDIA GeForce RTX 5070 Ti": (43.9, 43.9, 87.9, 87.9),
        "NVIDIA GeForce RTX 5070": (30.9, 30.9, 61.7, 61.7),
        "NVIDIA GeForce RTX 5060 Ti": (23.7, 23.7, 47.4, 47.4),
        "NVIDIA GeForce RTX 5060": (19.2, 19.2, 38.4, 38.4),
        "NVIDIA GeForce RTX 5050": (13.2, 13.2, 26.3, 26.3),
    },
    "NVIDIA's white paper of Ada, and its formula for the others: 2 x cores x boost": {
        "NVIDIA GeForce RTX 4090": (82.6, 82.6, 165.2, 165.2),
        "NVIDIA GeForce RTX 4080 SUPER": (52.2, 52.2, 104.4, 104.4),
        "NVIDIA GeForce RTX 4080": (48.7, 48.7, 97.5, 97.5),
        "NVIDIA GeForce RTX 4070 Ti SUPER": (44.1, 44.1, 88.2, 88.2),
        "NVIDIA GeForce RTX 4070 Ti": (40.1, 40.1, 80.2, 80.2),
        "NVIDIA GeForce RTX 4070 SUPER": (35.5, 35.5, 71.0, 71.0),
        "NVIDIA GeForce RTX 4070": (29.1, 29.1, 58.3, 58.3),
        "NVIDIA GeForce RTX 4060 Ti": (22.1, 22.1, 44.1, 44.1),
        "NVIDIA GeForce RTX 4060": (15.1, 15.1, 30.2, 30.2),
        "NVIDIA GeForce RTX 4090 D": (73.5, 73.5, 147.1, 147.1),
    },
    "NVIDIA's white paper of Ampere (GA102), and its formula for the others": {
        "NVIDIA GeForce RTX 3090 Ti": (40.0, 40.0, 80.0, 80.0),
        "NVIDIA GeForce RTX 3090": (35.6, 35.6, 71.0, 71.0),
        "NVIDIA GeForce RTX 3080 Ti": (34.1, 34.1, 68.2, 68.2),
        "NVIDIA GeForce RTX 3080": (29.8, 29.8, 59.5, 59.5),
        "NVIDIA GeForce RTX 3070 Ti": (21.7, 21.7, 43.5, 43.5),
        "NVIDIA GeForce RTX 3070": (20.3, 20.3, 40.6, 40.6),
        "NVIDIA GeForce RTX 3060 Ti": (16.2, 16.2, 32.4, 32.4),
        "NVIDIA GeForce RTX 3060": (12.7, 12.7, 25.5, 25.5),
        "NVIDIA GeForce RTX 3050": (9.1, 9.1, 18.2, 18.2),
    },
    "NVIDIA's white paper of Turing (TU102), and its formula for the others": {
        "NVIDIA GeForce RTX 2080 Ti": (13.4, _NONE, _NONE, 53.8),
        "NVIDIA GeForce RTX 2080 SUPER": (11.2, _NONE, _NONE, 44.6),
        "NVIDIA GeForce RTX 2080": (10.1, _NONE, _NONE, 40.3),
        "NVIDIA GeForce RTX 2070 SUPER": (9.1, _NONE, _NONE, 36.3),
        "NVIDIA GeForce RTX 2070": (7.5, _NONE, _NONE, 29.9),
        "NVIDIA GeForce RTX 2060 SUPER": (7.2, _NONE, _NONE, 28.7),
        "NVIDIA GeForce RTX 2060": (6.5, _NONE, _NONE, 25.8),
    },
    "2 x cores x rated boost clock; fp16 runs at 1/64 of the rate of fp32": {
        "NVIDIA TITAN Xp": (12.1, _NONE, _NONE, _NONE),
        "NVIDIA TITAN X (Pascal)": (11.0, _NONE, _NONE, _NONE),
        "NVIDIA GeForce GTX 1080 Ti": (11.3, _NONE, _NONE, _NONE),
        "NVIDIA GeForce GTX 1080": (8.9, _NONE, _NONE, _NONE),
        "NVIDIA GeForce GTX 1070 Ti": (8.2, _NONE, _NONE, _NONE),
        "NVIDIA GeForce GTX 1070": (6.5, _NONE, _NONE, _NONE),
        "NVIDIA GeForce GTX 1060 6GB": (4.4, _NONE, _NONE, _NONE),
        "NVIDIA GeForce GTX 1060 3GB": (3.9, _NONE, _NONE, _NONE),
        "NVIDIA GeForce GTX 1050 Ti": (2.1, _NONE, _NONE, _NONE),
        "NVIDIA GeForce GTX 1050": (1.9, _NONE, _NONE, _NONE),
    },
}


# Desktop and workstation boards: their rated boost clock is typical, not a limit. Cool ones run up
# to a quarter faster, so a rate above the published peak is no error.
_FREELY_CLOCKED = ("GeForce", "TITAN", "Quadro", "RTX")
_HIGHEST_CLOCK = 1.25


def highest_clock(device_kind: str) -> float:
    """Highest sustained clock of a device, relative to the clock of its published peak."""
    is_free = any(word in device_kind.split() for word in _FREELY_CLOCKED)
    return _HIGHEST_CLOCK if is_free else 1.0


def peak_flops_per_s(device_kind: str) -> dict[str, float]:
    """Dense FLOP/s by dtype (fp32, tf32, bf16, fp16); empty for an unknown device."""
    # Drivers before release 450 leave `NVIDIA` out of a name.
    names = (device_kind, f"NVIDIA {device_kind}")
    found = (peaks[name] for peaks in _PUBLISHED.values() for name in names if name in peaks)
    peaks = next(found, (0.0,) * len(_DTYPES))
    return {name: round(peak * 1e12, -6) for name, peak in zip(_DTYPES, peaks, strict=True) if peak}
