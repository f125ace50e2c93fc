"""What devices and links can do, from public sources. Data only; `costs` calculates with it.

Rates are peaks as published, dense (no structured sparsity); `CostModel` says what share of them
is reached. Bandwidths of links count one direction.

    device   source
    a100     NVIDIA A100 Tensor Core GPU datasheet (2021), SXM, 80 GB
    h100     NVIDIA H100 Tensor Core GPU datasheet (2023), SXM; rates there are with sparsity
    h200     NVIDIA H200 Tensor Core GPU datasheet (2024), SXM
    b200     NVIDIA Blackwell architecture brief (2024), HGX B200 at 1000 W
    mi300x   AMD Instinct MI300X data sheet (2023)
    cpu      not published anywhere: one core of a server with AVX2, an assumption

    link     source
    nvlink*  the same datasheets: NVLink 3, 4, 5 carry 600, 900, 1800 GB/s, both directions together
    if       AMD CDNA 3 white paper (2023): 7 links of 128 GB/s, both directions together
    ib*      NVIDIA ConnectX-6, -7 and -8 datasheets: 200, 400 and 800 Gbit/s, one port for a GPU
    gloo     not published: processes of one machine over its loopback, an assumption

Latencies of a hop of a ring: NCCL's own tuning table (`src/graph/tuning.cc`, protocol "simple"),
3.4 us over NVLink, 14 us over the network, on top of 8.4 us for a collective.
"""

from __future__ import annotations

GIB = 1 << 30
T = 1e12
G = 1e9
US = 1e-6

# Name: (FLOP/s by dtype, memory bandwidth in bytes/s, memory in bytes, seconds to start a kernel).
# A dtype that is not listed computes at the rate of "float32". TF32 is off by default in torch.
DEVICES: dict[str, tuple[dict[str, float], float, int | None, float]] = {
    "a100": (
        {"bfloat16": 312 * T, "float16": 312 * T, "float32": 19.5 * T, "float64": 19.5 * T},
        2.039e12,
        80 * GIB,
        3 * US,
    ),
    "h100": (
        {"bfloat16": 989.5 * T, "float16": 989.5 * T, "float32": 67 * T, "float64": 67 * T},
        3.35e12,
        80 * GIB,
        3 * US,
    ),
    "h200": (
        {"bfloat16": 989.5 * T, "float16": 989.5 * T, "float32": 67 * T, "float64": 67 * T},
        4.8e12,
        141 * GIB,
        3 * US,
    ),
    "b200": (
        {"bfloat16": 2250 * T, "float16": 2250 * T, "float32": 80 * T, "float64": 40 * T},
        8.0e12,
        180 * GIB,
        3 * US,
    ),
    "mi300x": (
        {"bfloat16": 1307.4 * T, "float16": 1307.4 * T, "float32": 163.4 * T},
        5.3e12,
        192 * GIB,
        3 * US,
    ),
    "cpu": ({"float32": 0.05 * T, "float64": 0.025 * T, "bfloat16": 0.01 * T}, 10e9, None, 5 * US),
}

# Name: (seconds for a hop, bytes/s in one direction).
LINKS: dict[str, tuple[float, float]] = {
    "nvlink3": (3.4 * US, 300 * G),
    "nvlink4": (3.4 * US, 450 * G),
    "nvlink5": (3.4 * US, 900 * G),
    "if": (3.4 * US, 448 * G),
    "ib200": (14 * US, 25 * G),
    "ib400": (14 * US, 50 * G),
    "ib800": (14 * US, 100 * G),
    "gloo": (40 * US, 1.5 * G),
}

# The link inside of a node that a device comes with, and the network that a cluster of it has
# unless a user says otherwise.
USUAL_LINKS: dict[str, tuple[str, str]] = {
    "a100": ("nvlink3", "ib200"),
    "h100": ("nvlink4", "ib400"),
    "h200": ("nvlink4", "ib400"),
    "b200": ("nvlink5", "ib800"),
    "mi300x": ("if", "ib400"),
    "cpu": ("gloo", "gloo"),
}

# Seconds that a collective takes beside its hops and bytes.
COLLECTIVE_START = {"gloo": 60 * US}
USUAL_COLLECTIVE_START = 8.4 * US

# Packed gradients that the runtime holds: on a device it waits for the oldest of two, and on CPU
# the lane finishes one before the next takes memory.
REDUCTIONS = {"cpu": 1}
USUAL_REDUCTIONS = 2
