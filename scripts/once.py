import torch, ridgeline
dice = torch.Generator("cuda").manual_seed(1)
def normal(*s): return torch.randn(s, device="cuda", generator=dice)
ls = [t.bfloat16().requires_grad_() for t in (normal(8, 4096, 64, 64), normal(8, 4096, 64), -normal(64).sigmoid() * 2, normal(8, 4096, 1, 128), normal(8, 4096, 1, 128))]
w = normal(8, 4096, 64, 64).bfloat16()
y = ridgeline.ssd(*ls, impl="triton_chunks")
torch.autograd.grad(y, ls, w)
torch.cuda.synchronize()
