"""Training on several GPUs: the strategies as ladders beside torch.distributed's own.

Modules are loaded at first use: `groups` (processes and meshes), `collectives`, `data`, `optimizer`, `fsdp`.
"""
