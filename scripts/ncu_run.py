import torch, ridgeline
dev = "cuda"
g = torch.Generator(dev).manual_seed(0)
n = lambda *s: torch.randn(s, device=dev, generator=g).bfloat16()
q, k, v, do = (n(8, 4096, 16, 128) for _ in range(4))
gate = torch.nn.functional.logsigmoid(n(8, 4096, 16, 128).float() + 2).bfloat16()
beta = (2 * n(8, 4096, 16).float().sigmoid()).bfloat16()
args = [t.requires_grad_() for t in (q, k, v, gate, beta)]
o = ridgeline.gated_delta_rule(*args, normalize=True, impl="triton")
torch.autograd.grad(o, args, do)
torch.cuda.synchronize()
