import os, time, torch
from ridgeline.lab.measurement import law as L
from ridgeline.ops.recurrent import rwkv7 as R, _delta_chunks as D
t0 = time.time()
def say(*a): print(f"[{time.time()-t0:.1f}]", *a, flush=True)
torch.backends.cuda.matmul.allow_tf32 = False
old = L.Standard.allow
def allow(self, theirs, moved, nearby=()):
    old(self, theirs, moved, nearby)
    if self.shape[-1] == 64:
        self.own_row, self.moved_row = self._reduce(L._plane(theirs)).row, self._reduce(L._plane(moved)).row
L.Standard.allow = allow
op = R.OP
law = L.Law.of(op, "8x4096x32x64", "bfloat16", "cuda")
say("law made", torch.cuda.max_memory_allocated() >> 20, "MiB")
kept = {}
oldc = D._chunk_gradients
def cg(plan, call, rows, states, grads, begin, count):
    oldc(plan, call, rows, states, grads, begin, count)
    kept["u"] = states.solved
D._chunk_gradients = cg
impl = op.implementations["triton"]
outs, grads = law.run(impl)
torch.cuda.synchronize()
v = law.judge(outs, grads)
for n, f in v.findings().items(): say(n, f)
names = law.grad_names
B, T, H = 8, 4096, 32
for name, st, g in zip(names, law.grads, grads):
    err = st._reduce(L._plane(g)).row
    ratio = err / st.row
    base = torch.maximum(st.own_row, st.moved_row)
    cap = (base / st.norm.row).max()
    last = torch.arange(B * T * H, device="cuda").view(B, T, H)[:, -1].flatten()
    say(name, "rows above 1:", int((ratio > 1).sum()), "largest base/norm", cap.item(), "largest base", base.max().item())
    top = ratio.topk(8)
    for r, i in zip(top.values.tolist(), top.indices.tolist()):
        b, t, h = i // (T * H), i // H % T, i % H
        say(f"  ratio {r:.2f} b{b} t{t} h{h} norm {st.norm.row[i]:.3g} err {err[i]:.3g} allowed {st.row[i]:.3g} float32 {st.own_row[i]:.3g} moved {st.moved_row[i]:.3g}")
say("mean row norm", [f"{st.norm.row.mean().item():.3g}" for st in law.grads])
# the exact u of all tokens, float64
r, w, k, vv, a, b = [t.detach() for t in law.args]
S = torch.zeros(B, H, 64, 64, dtype=torch.float64, device="cuda"); us = []
for t in range(T):
    u = torch.einsum("bhk,bhkv->bhv", a[:, t].double(), S)
    if t >= T - 96: us.append(u)
    S = S * w[:, t].double().exp()[..., None] + b[:, t].double()[..., None] * u[..., None, :] + k[:, t].double()[..., None] * vv[:, t].double()[..., None, :]
u = torch.stack(us, 1)
do = law.incoming[0][:, -96:]
mine = kept["u"][:, -96:].double()
say("u: kernel's error over rounding's, last 32 rows", ((mine - u)[:, -32:].norm() / (u.bfloat16().double() - u)[:, -32:].norm()).item())
i = names.index("grad_b"); st, g = law.grads[i], grads[i]
c = (do.double() * u)[:, -1].sum(-1); size = (do.double() * u)[:, -1].norm(dim=-1)
cm = (do.double() * mine)[:, -1].sum(-1); cr = (do.double() * u.bfloat16().double())[:, -1].sum(-1)
q = r[:, -1].double()
found = (g[:, -1].double() * q).sum(-1) / (q * q).sum(-1)
err = st._reduce(L._plane(g)).row.view(B, T, H)[:, -1]; al = st.row.view(B, T, H)[:, -1]; mv = st.moved_row.view(B, T, H)[:, -1]; nr = st.norm.row.view(B, T, H)[:, -1]
qn = q.norm(dim=-1)
say("last rows: std of (c_kernel-c)/size", ((cm - c) / size).std().item(), "of rounding u alone", ((cr - c) / size).std().item(), "found in grad_b", ((found - c) / size).std().item(), "moved", (mv / qn / size).square().mean().sqrt().item())
order = (err / al).flatten().topk(8).indices.tolist()
for j in order:
    bb, h = j // H, j % H
    say(f"  b{bb} h{h} ratio {(err/al)[bb,h]:.2f} c {c[bb,h]:.3g} size {size[bb,h]:.3g} kernel's u {cm[bb,h]:.3g} rounded exact u {cr[bb,h]:.3g} found {found[bb,h]:.3g} moved {mv[bb,h]/qn[bb,h]:.2g} norm {nr[bb,h]:.3g}")
say("all last rows above 1:", int((err > al).sum()), "other rows above 1:", int((st._reduce(L._plane(g)).row > st.row).sum()) - int((err > al).sum()))
cut = slice(T - 96, T)
torch.save({"args": [t[:, cut].cpu() for t in (r, w, k, vv, a, b)], "do": do.cpu(), "u": u.cpu(), "mine": kept["u"][:, cut].cpu(),
  "grads": [x[:, cut].cpu() for x in grads], "moved_b": mv.cpu(), "allowed_b": al.cpu()}, os.environ["O"] + "/case.pt")
say("saved")
