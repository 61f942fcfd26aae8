"""`op.get` while another thread imports the op, and from the op's own import."""

import threading
from pathlib import Path

import pytest

from ridgeline import op

SOURCE = """
from shared_events import go, made
from ridgeline import op
from ridgeline.op import Cost, Op

def half_made(x, *, impl=None):
    return x

OP = Op(half_made, reference=half_made, cases=[], cost=lambda x: (Cost(0, 0, 0), None))
inside = op.get("half_made")
made.set()
go.wait(10)
OP.eager("torch", "nothing", half_made, served=True)
"""


def test_no_thread_gets_a_half_made_op(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "half_made_module.py").write_text(SOURCE)
    (tmp_path / "shared_events.py").write_text("import threading\nmade, go = threading.Event(), threading.Event()\n")
    monkeypatch.syspath_prepend(tmp_path)
    from shared_events import go, made  # type: ignore[import-not-found]

    monkeypatch.setattr(op, "op_modules", lambda: {"half_made": "half_made_module"})
    found: list[list[str]] = []

    def ask() -> None:
        found.append(list(op.get("half_made").implementations))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    try:
        threads[0].start()
        assert made.wait(10)
        threads[1].start()
        threads[1].join(0.2)
        go.set()
        for thread in threads:
            thread.join()
        assert found == [["torch"]] * 2
    finally:
        op.LOADED.pop("half_made", None)
        op.COMPLETE.pop("half_made", None)
