"""Packages a model by AOTInductor and holds it against the model: python -m gpu.packaged lowbit|torch FOLDER.

A process of its own, because a package that is wrong can end the process that loads it.
"""

import sys

import torch
from torch import nn

import lowbit

ROWS = (2, 3, 16, 17, 64, 130, 300)


def main(kind: str, folder: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256, bias=False)).half().cuda()
    if kind == "lowbit":
        net = lowbit.quantize_model(net, "uint3", group_size=64, method="rtn")
    net.requires_grad_(False)
    xs = [torch.randn(m, 256, device="cuda").half() for m in ROWS]
    program = torch.export.export(net, (xs[1],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/net.pt2")
    package = torch._inductor.aoti_load_package(path)
    for x in xs:
        torch.testing.assert_close(package(x), net(x), rtol=2e-3, atol=2e-3)
    print("the same")


if __name__ == "__main__":
    main(*sys.argv[1:])
