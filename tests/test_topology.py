"""`ridgeline doctor --topology`: nvidia-smi's texts of three machines, in the form of NVIDIA's documentation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ridgeline import cli
from ridgeline.lab.analysis import topology, utilisation
from ridgeline.op import RidgelineError

FOLDER = Path(__file__).with_name("topology")
MACHINES = sorted(path.name for path in FOLDER.iterdir())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Lets `nvidia-smi` answer with the texts of a machine; its `refuse` holds fields that an old driver lacks."""

    def answers(name: str, refuse: tuple[str, ...] = ()) -> None:
        def ask(*arguments: str) -> tuple[bool, str]:
            if arguments[0].startswith("--query-gpu="):
                asked = arguments[0].partition("=")[2].split(",")
                for field in asked:
                    if field in refuse:
                        return False, f'Field "{field}" is not a valid field to query.\n\n'
                kept = [n for n, field in enumerate(topology.FIELDS) if {field, topology.OLD.get(field)} & {*asked}]
                lines = (FOLDER / name / "query.csv").read_text().splitlines()
                return True, "\n".join(", ".join(line.split(", ")[n] for n in kept) for line in lines)
            file = {"topo": "topo.txt", "nvlink": "nvlink.txt"}[arguments[0]]
            return True, (FOLDER / name / file).read_text()

        monkeypatch.setattr(topology, "ask", ask)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    return answers


def sentences(subject: str | None = None, amiss: bool | None = None) -> list[str]:
    said = topology.everything()["said"]
    return [s["text"] for s in said if subject in (None, s["about"]) and amiss in (None, s["amiss"])]


def test_eight_gpus_with_nvlink(machine) -> None:
    machine("dgx_h100")
    assert "All pairs of the 8 GPUs are joined by 18 NVLinks (NV18)." in sentences("links")
    assert "Its 18 NVLinks carry 478 GB/s in each direction." in sentences("GPU0")
    down = "Its 16 NVLinks carry 425 GB/s in each direction; 2 are down, so collectives are slower."
    assert down in sentences("GPU5", amiss=True)
    assert "Its nearest network card is NIC3, through one PCIe switch." in sentences("GPU3")
    (first, second) = sentences("CPUs")
    assert first.startswith("GPU0, GPU1, GPU2, GPU3 are next to NUMA node 0, CPUs 0-51,104-155: ")
    assert "numactl --cpunodebind=1 --membind=1" in second


def test_clocks_power_and_memory(machine) -> None:
    machine("dgx_h100")
    assert "The GPU idles, so its clocks are low on purpose." in sentences("GPU0")
    assert "PCIe generation 5 with 16 lanes moves at most 63 GB/s in each direction." in sentences("GPU0")
    assert "ECC is on, and has mended 0 bits since the driver started." in sentences("GPU0")
    assert sentences("GPU0", amiss=True) == []
    busy = sentences("GPU2", amiss=False)
    assert "The multiprocessors run at 1410 of at most 1980 MHz, its memory at 2619 of 2619 MHz." in busy
    assert "It draws 699 of at most 700 W, at 66 degrees Celsius." in busy
    assert any(text.startswith("The power limit holds the clocks down") for text in busy)
    wrong = sentences("GPU6", amiss=True)
    assert any("too hot, or its power supply fails" in text for text in wrong)
    assert "Hardware slows it down because it is too hot." in wrong
    assert any("2 errors that it could not mend since the driver started, and 5 ever" in text for text in wrong)


def test_one_gpu(machine) -> None:
    machine("one_h200")
    assert "There is one GPU, and it has no NVLink that is up." in sentences("links")
    assert any(text.startswith("Persistence is off") for text in sentences("GPU0", amiss=True))
    assert sentences("CPUs")[0].startswith("GPU0 is next to NUMA node 0, CPUs 0-15")


def test_two_consumer_cards(machine) -> None:
    machine("two_rtx4090")
    slow = "GPU0 and GPU1 are joined through the link between two CPU sockets, the slowest way (SYS)."
    assert slow in sentences("links", amiss=True)
    assert "Its PCIe link has 8 of 16 lanes, so copies from the host are slower: look at the slot." in sentences("GPU1")
    assert not any("lanes, so" in text for text in sentences("GPU0"))
    assert "The link rests at generation 1, and rises under load." in sentences("GPU0")
    assert any("power limit is 350 W instead of 450 W" in text for text in sentences("GPU1", amiss=True))
    assert "ECC is off: a flipped bit in memory goes unnoticed." in sentences("GPU0", amiss=True)
    assert not any("MIG" in text for text in sentences()), "what is not supported is left out"


@pytest.mark.parametrize("name", MACHINES)
def test_sentences_are_sentences(name: str, machine) -> None:
    machine(name)
    for text in sentences():
        assert text[0].isupper(), text
        assert text.endswith("."), text
        assert "None" not in text, text
        assert "{" not in text, text


def test_an_old_driver(machine) -> None:
    """Fields that it does not know are asked by their old names, or left out."""
    machine("one_h200", refuse=("clocks_event_reasons.active", "mig.mode.current", "power.default_limit"))
    (gpu,) = topology.gpus()
    assert gpu["clocks_event_reasons.active"] == 1
    assert "mig.mode.current" not in gpu
    assert "The GPU idles, so its clocks are low on purpose." in sentences("GPU0")


def test_every_reason_has_a_sentence() -> None:
    gpu = {"index": 0, "clocks_event_reasons.active": 0x1FF}
    assert len(topology.about(gpu)) == len(topology.REASONS)
    assert [text for _, text, _ in topology.about({"index": 0, "clocks_event_reasons.active": 0})] == [
        "Nothing holds the clocks down."
    ]
    assert topology.about({"index": 0}) == []


def test_modes() -> None:
    said = topology.about({"index": 1, "mig.mode.current": "Enabled", "compute_mode": "Exclusive_Process"})
    assert [amiss for *_, amiss in said] == [True, True]


def test_texts_that_cannot_be_read() -> None:
    assert topology.parse_matrix("").gpus == []
    assert topology.parse_matrix("no table here\nGPU0 X\n").gpus == []
    assert topology.parse_links("GPU 0: x\n") == {}
    with pytest.raises(RidgelineError, match="answered 2 fields instead of 3"):
        topology.parse_query("1, 2\n", ["a", "b", "c"])
    with pytest.raises(RidgelineError, match="names no GPU"):
        topology.parse_query("\n", ["a"])
    assert topology.parse_query("[N/A], [Not Supported], 0x10, 1.5, 7, x y\n", list("abcdef")) == [
        {"a": None, "b": None, "c": 16, "d": 1.5, "e": 7, "f": "x y"}
    ]


def test_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(topology.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--topology"])
    assert "--topology reads nvidia-smi, which is not on this machine's PATH" in capsys.readouterr().err


def test_where_nvidia_smi_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not talk to the driver.'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(RidgelineError, match="nvidia-smi failed: NVIDIA-SMI has failed because"):
        topology.everything()
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(topology, "PATIENCE", 0.2)
    with pytest.raises(RidgelineError, match="did not answer within"):
        topology.everything()


def test_the_verb(machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine("dgx_h100")
    assert cli.main(["doctor", "--topology"]) == 0
    text = capsys.readouterr().out
    assert "GPU5 NVIDIA H100 80GB HBM3" in text
    assert "GPU2: any kernel ran in 100% of the last sample's time." in text
    assert cli.main(["doctor", "--topology", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["gpus"]) == 8
    assert told["utilisation"] == []
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--topology", "--device", "cpu"])
    assert "--device names 'cpu'" in capsys.readouterr().err


NCU = f'''==PROF== Disconnected
"ID","Kernel Name","{utilisation.WORKING}","{utilisation.OCCUPANCY}"
"","","%","%"
"0","spin_kernel(long)","0.75","1.56"
"1","elementwise","98.1","89.9"
"2","nvjet","1,00.0","12.5"
'''


def test_the_table_of_loads(capsys: pytest.CaptureFixture[str]) -> None:
    from ridgeline.lab.analysis.doctor import show_topology

    counted = utilisation.parse_counters(NCU)
    assert counted[0] == {"working": 0.0075, "occupancy": pytest.approx(0.0156)}
    assert len(counted) == 3
    row = {"load": "one thread", "rate": None, "unit": "", "utilization.gpu": "100", "clocks.sm": "1980"}
    show_topology({"said": [], "gpus": [], "utilisation": [row | counted[0]]})
    text = capsys.readouterr().out
    assert "one thread" in text
    assert "100%" in text
    assert "0.8%" in text
    show_topology({"said": [], "gpus": [], "utilisation": [row]})
    assert "need Nsight Compute" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    found = topology.everything()
    assert found["gpus"][0]["clocks.max.sm"]
    lazy, copy, product = utilisation.shown()
    assert int(lazy["utilization.gpu"]) > 90
    assert lazy["rate"] is None
    assert copy["rate"] > 1e11
    assert product["rate"] > 1e13
