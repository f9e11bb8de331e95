"""``autoshard list clusters --here``: the accelerators of a machine, as a file that --cluster takes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autoshard.runtime.here as here
from autoshard.cli import main
from autoshard.errors import InputError
from autoshard.runtime.here import Gpu, cluster_here
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster

H100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_bytes=85_000_000_000, capability=(9, 0))
L40S = Gpu(
    name="NVIDIA L40S", memory_bytes=47_000_000_000, capability=(8, 9), multiprocessors=142, clock_hz=2.52e9,
    memory_bytes_per_s=864e9,
)  # fmt: skip
SWITCHED = "\tGPU0\tGPU1\tCPU\nGPU0\t X \tNV18\t0\nGPU1\tNV18\t X \t0\n"
BY_PCIE = SWITCHED.replace("NV18", "PHB")

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    def be(gpus: list[Gpu] | None = None, product: str = "", **programs: str) -> None:
        monkeypatch.setattr(here, "_gpus", lambda: gpus or [])
        monkeypatch.setattr(here, "product", lambda: product)
        told = {"neuron-ls -j": programs.get("neuron", ""), "nvidia-smi topo -m": programs.get("topology", "")}
        monkeypatch.setattr(here, "said", lambda *words: told.get(" ".join(words), programs.get("pcie", "")))

    return be


def loaded(tmp_path: Path, nodes: int = 1) -> Cluster:
    (tmp_path / "here.json").write_text(json.dumps(cluster_here()), encoding="utf-8")
    return load_cluster(str(tmp_path / "here.json"), nodes)


def devices(kind: str, count: int, **changes: Any) -> str:
    one = {"instance_type": kind, "neuron_device": 0, "nc_count": 2, "memory_size": 2**35} | changes
    return json.dumps([one] * count)


def test_gpus_of_the_catalogue_are_its_chips_with_the_memory_that_was_read(machine: Machine, tmp_path: Path) -> None:
    machine([H100])
    alone, known = loaded(tmp_path), load_cluster("h100-80")
    assert (alone.name, alone.num_ranks, alone.chip.memory_bytes) == ("h100-80", 1, 85_000_000_000)
    assert alone.chip.matrix_flops_per_s == known.chip.matrix_flops_per_s and alone.links == known.links[:1]
    machine([H100] * 2, topology=SWITCHED)
    assert loaded(tmp_path).links == known.links[:1]


@pytest.mark.parametrize("name", ["GB200", "GB300"])
def test_a_tray_of_a_rack_is_a_node_of_it(machine: Machine, tmp_path: Path, name: str) -> None:
    rows = [f"GPU{row}\t" + "\t".join(" X " if row == other else "NV18" for other in range(4)) for row in range(4)]
    memory_bytes = 198_000_000_000
    machine([Gpu(name=f"NVIDIA {name}", memory_bytes=memory_bytes)] * 4, topology="\n".join(rows))
    rack, known = loaded(tmp_path, nodes=18), load_cluster(name.lower(), 18)
    assert (rack.num_ranks, rack.chip.memory_bytes, rack.links) == (72, memory_bytes, known.links[:1])
    with pytest.raises(InputError, match="connects 19 nodes"):
        loaded(tmp_path, nodes=19)


def test_without_nvlink_the_link_is_pci_express(machine: Machine, tmp_path: Path) -> None:
    machine([H100] * 2, topology=BY_PCIE, pcie="5, 16")
    found = loaded(tmp_path)
    assert (found.name, found.links[0].name) == ("h100-80-pcie", "pcie")
    assert found.links[0].bandwidth_bytes_per_s == pytest.approx(63e9, rel=0.01)


def test_other_gpus_are_derived_from_their_clocks(machine: Machine, tmp_path: Path) -> None:
    machine([L40S])
    found = loaded(tmp_path)
    assert (found.name, found.chip.memory_bandwidth_bytes_per_s) == ("nvidia-l40s", 864e9)
    assert found.rank_matrix_flops_per_s("bf16") == pytest.approx(362e12, rel=0.02)
    assert found.rank_matrix_flops_per_s("fp32") == pytest.approx(91.6e12, rel=0.01)
    machine([replace(L40S, name="NVIDIA GeForce RTX 4090", multiprocessors=128)])
    assert loaded(tmp_path).rank_matrix_flops_per_s("bf16") == pytest.approx(165.2e12, rel=0.01)


def test_an_instance_that_the_catalogue_knows_is_that_with_its_network(machine: Machine, tmp_path: Path) -> None:
    machine([H100] * 8, product="p5.48xlarge", topology=SWITCHED)
    assert loaded(tmp_path, nodes=4).num_ranks == 32
    machine(neuron=devices("trn1.32xlarge", 16))
    assert loaded(tmp_path, nodes=2) == replace(load_cluster("trn1.32xlarge", 2), sources=loaded(tmp_path, 2).sources)
    machine(neuron=devices("", 1), product="trn1.2xlarge")
    assert loaded(tmp_path).num_ranks == 2
    machine(neuron=devices("trn2.48xlarge", 16, logical_neuroncore_config=1))
    assert (loaded(tmp_path).lnc, loaded(tmp_path).num_ranks) == (1, 128)


def test_a_smaller_instance_has_the_chips_of_its_family(machine: Machine, tmp_path: Path) -> None:
    machine(neuron=devices("trn2.3xlarge", 1, logical_neuroncore_config=2))
    found = loaded(tmp_path)
    assert (found.name, found.lnc, found.num_ranks, len(found.links)) == ("trn2.3xlarge", 2, 4, 1)
    assert found.price_usd_per_node_hour is None and found.platform == "trn2"


def test_the_driver_and_torch_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA L40S", total_memory=47_000_000_000, major=8, minor=9, multi_processor_count=142,
        clock_rate=2_520_000, memory_clock_rate=9_001_000, memory_bus_width=384,
    )  # fmt: skip
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda at: properties)
    chip = cluster_here()["chip"]
    assert chip["memory_bandwidth_bytes_per_s"] == pytest.approx(864e9, rel=0.001)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(
        here, "said", lambda *words: "NVIDIA H200, 143771\n" if "--query-gpu=name,memory.total" in words else ""
    )
    assert cluster_here()["base"] == "h200"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "there is no accelerator here that PyTorch, nvidia-smi or neuron-ls shows"),
        ({"gpus": [H100, L40S]}, "GPUs of several kinds (NVIDIA H100 80GB HBM3, NVIDIA L40S)"),
        ({"gpus": [replace(L40S, clock_hz=None)]}, "L40S is not in the catalogue, and nothing here tells its clock"),
        ({"neuron": "[{"}, "there is no accelerator here"),
        ({"neuron": devices("inf2.xlarge", 1)}, "1 Neuron devices, of inf2.xlarge"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_one_sentence(
    given: Any, says: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(**given)
    assert main(["list", "clusters", "--here"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("autoshard: --here: ") and says in line


def test_the_command_prints_a_file_and_of_other_names_it_has_none(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine([H100])
    assert main(["list", "clusters", "--here"]) == 0
    (tmp_path / "here.json").write_text(capsys.readouterr().out, encoding="utf-8")
    plan = ["plan", "--model", "tiny-llama", "--cluster", str(tmp_path / "here.json")]
    assert main([*plan, "--fix", "tp=1,mbs=1", "--out", str(tmp_path / "plan.json")]) == 0
    assert main(["list", "models", "--here"]) == 2 and "type list clusters --here" in capsys.readouterr().err
