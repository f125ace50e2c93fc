"""Remake the pictures of "How to read a schedule": ``python docs/make_pictures.py``.

Plans a small model on rank 0 of four ranks that are not there (torch's fake process group). The
screenshot needs a Chromium on PATH, or its path in CHROMIUM; without one it stays as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import compile_fsdp
from compile_fsdp.passes.costs import CostModel, DeviceCosts, LinkCosts

PICTURES = Path(__file__).resolve().parent / "pictures"
WIDTH = 256
VOCABULARY = 1024

# A device and a network of nowhere, on which a block computes about as long as it is gathered.
COSTS = CostModel(
    name="an example",
    device=DeviceCosts("example", (("float32", 4e11),), bandwidth=4e10, start=1e-6),
    in_node=LinkCosts(latency=2e-6, bandwidth=2e9),
    between_nodes=LinkCosts(latency=2e-6, bandwidth=2e9),
    ranks_per_node=4,
    start=1e-5,
)

# Puts the keyboard on the second gather, as a reader would.
POINT = """
<script>document.querySelectorAll('[data-lane="gather"] .span')[1].focus();</script>
</body>"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + down


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def explanation(mesh: DeviceMesh) -> compile_fsdp.Explanation:
    """The plan of the model on ``mesh``, its parameters gathered again for backward."""
    model = Model()
    for block in model.blocks:
        compile_fsdp.fully_shard(block, mesh)
    compile_fsdp.fully_shard(model, mesh)
    options = {"inner": "aot_eager", "cost_model": COSTS, "reshard_after_forward": True}
    compiled = torch.compile(model, backend="compile_fsdp", options=options)
    return compile_fsdp.explain(compiled, torch.zeros(4, 64, dtype=torch.int64))


def screenshot(shown: compile_fsdp.Explanation, path: Path) -> None:
    """The top of the page, as a browser shows it."""
    browsers = ("chromium-headless-shell", "chromium", "google-chrome")
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, browsers)), None)
    if browser is None:
        print(f"no browser: {path.name} stays as it is")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(shown.to_html().replace("</body>", POINT), encoding="utf-8")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1150,760"]
        command += [f"--user-data-dir={folder}/profile", f"--screenshot={path}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    """Write every picture."""
    PICTURES.mkdir(exist_ok=True)
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    one_axis = explanation(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    # The versions of torch do not matter here, and would change the pictures.
    one_axis = replace(one_axis, torch_version="2")
    (PICTURES / "forward.svg").write_text(one_axis.to_svg(0), encoding="utf-8")
    screenshot(one_axis, PICTURES / "page.png")
    two_axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    (PICTURES / "backward.svg").write_text(explanation(two_axes).to_svg(1), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
