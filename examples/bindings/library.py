"""An op registered by `torch.library.Library`: schema, implementations by device, a fake one for tracing, autograd."""

import torch
from common import SCHEMA, backward, checked, reference, setup_context
from plain_triton import forward

LIBRARY = torch.library.Library("ridgeline_library", "DEF")
LIBRARY.define(SCHEMA, tags=torch.Tag.pt2_compliant_tag)
LIBRARY.impl("silu", forward, "CUDA")
LIBRARY.impl("silu", lambda x: reference(checked(x)), "CPU")
torch.library.register_fake("ridgeline_library::silu", torch.empty_like, lib=LIBRARY)
torch.library.register_autograd("ridgeline_library::silu", backward, setup_context=setup_context, lib=LIBRARY)

silu = torch.ops.ridgeline_library.silu.default
