
import sys
def patch(hopper, module, ahead=None):
    """start_gradients with what brings tiles nearer."""
    def start(grid, call, do, matrices, states, grads, packing):
        from ridgeline.ops.recurrent._scan import Rows
        TensorMap, _rows, WIDTH = hopper.TensorMap, hopper._rows, hopper.WIDTH
        import torch
        single = grads.q.dtype == torch.float32
        made = (grads.q, grads.k) if single else (_rows(grads.q, WIDTH, call), _rows(grads.k, WIDTH, call))
        inputs = [_rows(t, WIDTH, call) for t in (call.q, call.k, do, grads.v, states.solved)]
        squares = [TensorMap(t, (1, 1, 1, WIDTH, WIDTH), 128) for t in (states.before, states.later)]
        numbers = module.ChunkNumbers(
            matrices.decays, matrices.lengths, matrices.whole, grads.g, packing.ends, packing.sequences, packing.tokens,
            packing.heads, packing.chunks, packing.begin, call.v.shape[2] // call.k.shape[2], ahead or module.AHEAD,
            tuple(call.rows(t) for t in (states.solved, grads.v, do, call.q, call.k)), states.before, states.later)
        facts = {"NORMALIZE": call.normalize, "FLOAT": single, "num_warps": 4}
        hopper.launch(module.chunk_gradients, grid, numbers, module.ChunkMaps(*inputs, *squares, *made), call.scale, **facts)
    hopper.start_gradients = start
