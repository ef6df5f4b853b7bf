"""Which builds of torch the harness works with, and on which GPUs their code runs."""

import re
from collections.abc import Iterable


def kernel_support(capability: tuple[int, int], arch_list: Iterable[str]) -> str:
    """Whether a build's code runs on a device: `binary`, `jit` (from PTX) or `none`.

    By the CUDA C++ Programming Guide, 5.8.1 and 5.8.2: machine code for sm_XY runs on X.Z with
    Z >= Y; PTX of compute_XY compiles for anything not older. Code for sm_XYa runs on X.Y alone,
    for sm_XYf on the same X from Y on.
    """
    has_ptx = False
    for arch in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match is None:
            continue
        built = (int(match[2]), int(match[3]))
        is_exact = match[4] == "a"
        fits = built == capability if is_exact else built <= capability
        if match[1] == "sm" and fits and built[0] == capability[0]:
            return "binary"
        has_ptx |= match[1] == "compute" and fits and not match[4]
    return "jit" if has_ptx else "none"


def where_built(capability: tuple[int, int]) -> str:
    """Where to find a torch with code for a device: builds for CUDA 13 have none before Turing."""
    return "docs/start.md#old-gpus" if capability < (7, 5) else "pytorch.org"


FIRST, END = (2, 9), (3, 0)


def torch_problem(version: str) -> str:
    """What is wrong with a release of torch; empty for one that works or is unknown."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or FIRST <= (int(found[1]), int(found[2])) < END:
        return ""
    first, end = (".".join(map(str, release)) for release in (FIRST, END))
    return f"torch {version} is none of {first} to {end}, whose graphs of models are understood"
