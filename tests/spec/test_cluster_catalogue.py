"""The catalogue of clusters, and users' own cluster files."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoshard.errors import InputError
from autoshard.spec.cluster import Algorithm, Chip, PlacementRule
from autoshard.spec.cluster_catalogue import (
    ALIASES,
    ChipDivision,
    NodeLink,
    NodeType,
    cluster_names,
    load_cluster,
    load_node_type,
)
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.record import decode, encode
from autoshard.units import GIB
from tests.guide.pages import fences

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_file_is_a_node_type_of_its_name_that_reads_back(tmp_path: Path, name: str):
    node_type = load_node_type(name)
    path = tmp_path / "own.json"
    path.write_text(json.dumps(encode(node_type)), encoding="utf-8")
    assert node_type.name == name and load_node_type(str(path)) == node_type
    for variant in node_type.variants:
        cluster = load_cluster(name, lnc=variant.lnc)
        chips = cluster.num_ranks / cluster.ranks_per_chip
        assert cluster.num_ranks * cluster.rank_memory_bytes == chips * cluster.chip.memory_bytes
        if node_type.max_nodes > 1:
            assert load_cluster(name, 2, lnc=variant.lnc).links[-1].domain in ("ultraserver", "cluster")


@pytest.mark.parametrize(("folder", "kind"), [("chips", Chip), ("links", NodeLink)])
def test_every_chip_and_link_of_the_catalogue_is_one(folder: str, kind: type):
    paths = sorted((ROOT / "autoshard" / "spec" / "clusters" / folder).glob("*.json"))
    named = [decode(kind, json.loads(path.read_text(encoding="utf-8")), where=path.name).name for path in paths]
    assert named and named == [path.stem for path in paths]


def test_the_cluster_file_and_the_card_of_the_docs_are_whole_and_work(tmp_path: Path):
    blocks = {
        fence.title: fence.text
        for page in ("my-cluster", "my-model")
        for fence in fences((ROOT / "docs" / "guides" / f"{page}.md").read_text(encoding="utf-8"))
    }
    (tmp_path / "lab.yaml").write_text(blocks["lab.yaml"], encoding="utf-8")
    (tmp_path / "mine-1b.json").write_text(blocks["mine-1b.json"], encoding="utf-8")
    assert load_cluster(str(tmp_path / "lab.yaml"), 3).num_ranks == 12
    bare = blocks["lab.yaml"].replace('"2026-10-02"', "2026-10-02")  # which YAML reads as a date
    (tmp_path / "bare.yaml").write_text(bare, encoding="utf-8")
    assert load_cluster(str(tmp_path / "bare.yaml")).price_date == "2026-10-02" and bare != blocks["lab.yaml"]
    data = yaml.safe_load(blocks["lab.yaml"])
    one = data["variants"][0]
    for kind, stated in (
        (NodeType, data), (Chip, data["chip"]), (ChipDivision, one), (PlacementRule, one["placements"][0]),
        (NodeLink, data["links"][0]), (Algorithm, data["algorithms"][0]),
    ):  # fmt: skip
        assert set(stated) == {field.name for field in fields(kind)}, kind
    assert load_model(tmp_path / "mine-1b.json").num_parameters == pytest.approx(1.1e9, rel=0.01)


def test_trainium_is_as_documented():
    """AWS: 16 chips of 190 (dense BF16) and 667 TFLOP/s; 32 and 96 GiB; 800 Gbit/s, 1.6 and 3.2 Tbit/s a node."""
    for name, lnc, ranks, memory, rank_flops, network in (
        ("trn1.32xlarge", None, 32, 16 * GIB, 190e12 / 2, 800e9),
        ("trn1n.32xlarge", None, 32, 16 * GIB, 190e12 / 2, 1600e9),
        ("trn2.48xlarge", 2, 64, 24 * GIB, 667e12 / 4, 3200e9),
        ("trn2.48xlarge", 1, 128, 12 * GIB, 667e12 / 8, 3200e9),
    ):
        cluster = load_cluster(name, lnc=lnc)
        ports = cluster.ranks_per_node / cluster.links[-1].ranks_per_port
        assert (cluster.ranks_per_node, cluster.rank_memory_bytes, cluster.engine) == (ranks, memory, "nxd")
        assert cluster.rank_matrix_flops_per_s("bf16") == rank_flops
        assert ports * cluster.links[-1].bandwidth_bytes_per_s * 8 == network
        assert cluster.chip.matrix_tile == 128


def test_a_trainium_alone_is_half_of_32_gib_a_core_and_has_no_network():
    alone, of_many = load_cluster("trn1.2xlarge"), load_cluster("trn1.32xlarge")
    assert (alone.num_ranks, alone.rank_memory_bytes, alone.chip) == (2, 16 * GIB, of_many.chip)
    assert alone.price_usd_per_node_hour == 1.34 and "EFA" in alone.sources["chips_per_node"]
    assert "trn1.2xlarge has no network that connects 2 nodes" in faults_of("trn1.2xlarge", 2)["nodes"]


def test_trainium_lays_some_tensor_parallel_groups_out_of_order():
    trn1, trn2 = load_cluster("trn1.32xlarge"), load_cluster("trn2.48xlarge")
    assert str(trn1.default_placement(4)).startswith("0-24:8/1-25:8/2-26:8")
    assert str(trn2.default_placement(32)) == "0-15/48-63/16-47"
    assert str(load_cluster("trn2.48xlarge", lnc=1).default_placement(64)) == "0-31/96-127/32-95"
    assert {str(trn2.default_placement(tp)) for tp in (4, 16, 64)} == {"0-63"}
    assert {str(trn1.default_placement(tp)) for tp in (1, 8, 32)} == {"0-31"}
    assert (trn1.kv_order, trn2.kv_order, load_cluster("h200").kv_order) == ("strided", "adjacent", "adjacent")


def test_blackwells_are_as_documented():
    """NVIDIA and AWS: 2,250 TFLOP/s of BF16, in racks of 18 nodes of 4 chips 2,500; 400 or 800 Gbit/s a chip."""
    for name, rates, memory_gib, nodes_in_a_rack, network in (
        ("b300", (2250e12, 4500e12), 267.69, 1, 800e9),
        ("p6-b300", (2250e12, 4500e12), 267.69, 1, 800e9),
        ("gb200", (2500e12, 5000e12), 184.31, 18, 400e9),
        ("p6e-gb200", (2500e12, 5000e12), 184.31, 18, 400e9),
        ("gb300", (2500e12, 5000e12), 276.50, 18, 800e9),
    ):
        cluster = load_cluster(name, 32)
        assert tuple(cluster.rank_matrix_flops_per_s(dtype) for dtype in ("bf16", "fp8")) == rates
        assert cluster.rank_memory_bytes / GIB == pytest.approx(memory_gib, abs=1e-6)
        assert (cluster.nodes_per_ultraserver, cluster.ranks_per_node) == (
            nodes_in_a_rack,
            8 if nodes_in_a_rack == 1 else 4,
        )
        near, far = cluster.links
        assert (near.bandwidth_bytes_per_s, far.bandwidth_bytes_per_s * 8) == (900e9, network)


def test_a_job_takes_equally_many_nodes_of_each_rack_and_groups_of_64_chips_stay_in_one():
    together = {nodes: load_cluster("gb200", nodes).nodes_together for nodes in (2, 16, 18, 20, 32, 36, 64, 250, 256)}
    assert together == {2: 18, 16: 16, 18: 18, 20: 10, 32: 16, 36: 18, 64: 16, 250: 10, 256: 16}
    assert load_cluster("gb200", 19).nodes_together == 18, "no equal share is at least half of a rack"
    assert [load_cluster("trn2u", nodes).nodes_together for nodes in (4, 6, 8, 16)] == [4, 3, 4, 4]
    cluster = load_cluster("gb200", 64)
    kinds = [cluster.link_of(ranks).kind for ranks in (range(64), range(64, 128), (63, 64), range(0, 256, 64))]
    assert kinds == ["switch", "switch", "network", "network"] and cluster.repeat_ranks == 64


def faults_of(*arguments: Any, **options: Any) -> dict[str, str]:
    with pytest.raises(InputError) as caught:
        load_cluster(*arguments, **options)
    return {fault.where: fault.message for fault in caught.value.faults}


def test_names_and_sizes_are_those_of_the_user_or_refused_with_what_there_is():
    assert load_cluster("ml.trn1.32xlarge", 2) == load_cluster("trn1.32xlarge", 2)
    assert [load_cluster("local", ranks=ranks).num_ranks for ranks in (1, 3, 64)] == [1, 3, 64]
    found = faults_of("trn1.32xlarge", 0, lnc=2, ranks=8)
    assert set(found) == {"nodes", "lnc", "ranks"}
    assert "no logical NeuronCore configuration" in found["lnc"]
    assert "always has 32" in found["ranks"]
    assert "Use 1 or 2" in faults_of("trn2.48xlarge", lnc=3)["lnc"]
    assert "Use at most 1" in faults_of("local", 2)["nodes"]
    assert set(faults_of("local", -1, lnc=1, ranks=65)) == {"nodes", "lnc", "ranks"}
    assert "1 to 64, not 0" in faults_of("local", ranks=0)["ranks"]
    assert "trn1.32xlarge" in faults_of("trn1.33xlarge")["cluster"]
    assert "Did you mean p5.48xlarge" in faults_of("ml.p5.48xlrge")["cluster"]


# -- a user's own file ----------------------------------------------------------------------------------


def own_file(tmp_path: Path, name: str = "mine.json", **changes: Any) -> Path:
    network: dict[str, Any] = {"name": "net", "kind": "network", "domain": "cluster", "chips_per_port": 2}
    network |= {"bandwidth_bytes_per_s": 1e10, "latency_s": 1e-5, "sources": {"default": "vendor"}}
    data: dict[str, Any] = {"name": "mine", "chip": "a100-80", "chips_per_node": 4, "engine": "torch"}
    data |= {"variants": [{"ranks_per_chip": 1}], "links": ["nvlink-3", network], "kernels": "te"}
    data |= {"sources": {"default": "our rack, measured 2026-05-01"}} | changes
    path = tmp_path / name
    path.write_text(json.dumps(data) if path.suffix == ".json" else yaml.safe_dump(data), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["mine.json", "mine.YML"])
def test_a_users_own_file_is_a_cluster_like_any_other(tmp_path: Path, name: str):
    path = own_file(tmp_path, name)
    if name == "mine.YML":  # a number with a bare exponent is one as well
        path.write_text(path.read_text(encoding="utf-8").replace("10000000000.0", "1e10"), encoding="utf-8")
    cluster = load_cluster(str(path), 3)
    assert (cluster.name, cluster.num_ranks, cluster.links[1].ranks_per_port) == ("mine", 12, 2)
    assert cluster.chip == load_cluster("a100-80").chip and cluster.links[1].bandwidth_bytes_per_s == 1e10


INNER = {"name": "n", "kind": "chip", "bandwidth_bytes_per_s": 1, "latency_s": 0, "sources": {"default": "s"}}
BAD_LINK = {"name": "net", "kind": "wire", "domain": "node", "bandwidth_bytes_per_s": "fast", "latency": 1}


def placed(placement: str) -> dict[str, Any]:
    rules = [{"name": "p", "tp": 2, "placement": placement, "source": "s"}]
    return {"variants": [{"ranks_per_chip": 1, "placements": rules}]}


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"variants": []}, {"variants": "at least one"}),
        ({"variants": [{"ranks_per_chip": 1}, {"ranks_per_chip": 2, "lnc": 1}]}, {"variants": "lnc of their own"}),
        ({"variants": [{"ranks_per_chip": 0}]}, {"variants[0].ranks_per_chip": "at least 1"}),
        ({"chips_per_node": 3}, {"links[1].chips_per_port": "evenly"}),
        ({"chips_per_node": 0}, {"chips_per_node": "at least 1"}),
        ({"links": []}, {"links": "innermost first"}),
        ({"kernels": "tea"}, {"kernels": "there is no table 'tea'. Did you mean te"}),
        ({"sources": {"chips_per_node": "seen"}}, {"sources": "no source for ranks_per_chip"}),
        (placed("0-7"), {"variants[0].placements[0].placement": "places 8 ranks, but a node has 4"}),
        (placed("0-1/1-2"), {"variants[0].placements[0].placement": "not a permutation"}),
        ({"links": [INNER | {"domain": "chip", "chips_per_port": 1}]}, {"links[0].chips_per_port": "left out"}),
        ({"links": [INNER | {"domain": "node"}]}, {"links[0].chips_per_port": "missing"}),
        (
            {"chips_per_node": 3, "max_chips_per_node": 2, "nodes_per_ultraserver": 2, "sources": {"name": "x"}},
            {"max_chips_per_node": "at least chips_per_node", "nodes_per_ultraserver": "", "sources": "",
             "links[1].chips_per_port": ""},
        ),
        (
            {"chip": "a100", "links": ["nvlink-9", BAD_LINK], "chips_per_node": 2.5, "colour": "red"},
            {"chip": "Did you mean a100-", "links[0]": "Did you mean nvlink-", "links[1].kind": "",
             "links[1].bandwidth_bytes_per_s": "", "links[1].latency": "", "links[1].latency_s": "missing",
             "links[1].chips_per_port": "missing", "links[1].sources": "missing", "chips_per_node": "", "colour": ""},
        ),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_every_fault_and_its_path(
    tmp_path: Path, changes: dict[str, Any], faults: dict[str, str]
):
    path = own_file(tmp_path, **changes)
    found = faults_of(str(path))
    assert set(found) == {f"{path}: {where}" for where in faults}
    assert all(words in found[f"{path}: {where}"] for where, words in faults.items())


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b"{", "not JSON: .* in column 2"),
        ("a.json", b'{"name": "a", "name": "b"}', "'name' appears twice"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        ("a.json", b"1" * 5000, "not usable JSON"),
        ("a.json", b"[]", "expected an object, found a list"),
        ("a.json", b"\xff\xfe", "UTF-8"),
        ("a.yaml", b"a: [", "not YAML"),
        ("a.yaml", b"a: 2026-13-45", "a: unknown key"),
        ("a.yaml", b"a: &loop {b: *loop}", "recursive node"),
        ("a.yaml", b"a: &loop [{b: *loop}]", "recursive node"),
        ("a.yaml", b"", "expected an object, found null"),
        ("a.json", None, "there is no such file"),
    ],
)
def test_files_that_are_no_data_are_refused(tmp_path: Path, name: str, content: bytes | None, says: str):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        load_cluster(str(path))
    assert str(path) in str(caught.value)


def override(folder: Path, **changes: Any) -> str:
    path = folder / "ours.yaml"
    stated = {"base": "p5en", "name": "ours", "source": "a bench", **changes}
    path.write_text(yaml.safe_dump({key: value for key, value in stated.items() if value is not ...}), encoding="utf-8")
    return str(path)


def test_a_file_with_a_base_states_what_differs_and_its_source(tmp_path: Path):
    links = {"cluster": {"bandwidth_bytes_per_s": 22e9}}
    changes = {"links": links, "chip": {"matrix_flops_per_s": {"bf16": 7e14}}, "price_usd_per_node_hour": 51}
    found, base = load_node_type(override(tmp_path, **changes)), load_node_type("p5en.48xlarge")
    assert (found.name, found.links[-1].bandwidth_bytes_per_s, found.price_usd_per_node_hour) == ("ours", 22e9, 51)
    assert found.price_date is None and found.sources["price_usd_per_node_hour"] == "a bench"
    assert found.links[-1].sources["bandwidth_bytes_per_s"] == "a bench" and found.links[:-1] == base.links[:-1]
    assert found.chip.matrix_flops_per_s == {**base.chip.matrix_flops_per_s, "bf16": 7e14}
    assert found.chip.sources == {**base.chip.sources, "matrix_flops_per_s.bf16": "a bench"}
    assert load_node_type(override(tmp_path, name=...)) == base
    page = (ROOT / "docs" / "guides" / "my-cluster.md").read_text(encoding="utf-8")
    text = next(fence.text for fence in fences(page) if fence.kind == "yml")
    (tmp_path / "docs.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "below.yaml").write_text("base: docs.yaml\nsource: me\nchips_per_node: 4\n", encoding="utf-8")
    assert load_node_type(str(tmp_path / "docs.yaml")).chip.memory_bytes == 150e9
    assert load_cluster(str(tmp_path / "below.yaml"), 2).num_ranks == 8


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"base": "p5n"}, "base", "'p5n' is not a cluster. Did you mean p5"),
        ({"base": "ours.yaml"}, "base", "the file is its own base"),
        ({"source": ...}, "source", "say where these numbers are from"),
        ({"links": {"rack": {}}}, "links.rack", "the base has no link of this domain. Known: cluster, node."),
        ({"links": {"node": {"latency_s": -1.0}}}, "links.node.latency_s", "must be at least 0"),
        (
            {"links": {"node": {"latency_s": 3.5}}},
            "links.node.latency_s",
            "3.5 seconds is too long for one hop. 3.5e-6",
        ),
        ({"links": {"cluster": {"bandwidth_bytes_per_s": 400}}}, "links.cluster.bandwidth_bytes_per_s", "400 bytes a"),
        ({"chip": {"memory_bytes": 141}}, "chip.memory_bytes", "141 bytes is too little. 141e9 is that many billions"),
        ({"chip": {"matrix_flops_per_s": {"bf16": 989}}}, "chip.matrix_flops_per_s.bf16", "989 operations a second is"),
        ({"host_memory_bytes": 2000}, "host_memory_bytes", "2000 bytes is too little"),
        ({"name": "two\nlines"}, "name", "must be one line of text"),
        ({"links": {"node": 3}}, "links.node", "expected an object"),
        ({"chip": {"memory": 3}}, "chip.memory", "unknown key"),
        ({"prices": 3}, "prices", "unknown key. Did you mean price"),
        ({"sources": 3}, "sources", "expected an object"),
    ],
)
def test_a_wrong_override_names_its_key(tmp_path: Path, changes: dict[str, Any], where: str, says: str):
    path = override(tmp_path, **changes)
    ((found, message),) = faults_of(path).items()
    assert found == f"{path}: {where}" and message.startswith(says)


def test_an_alias_is_the_cluster_it_stands_for():
    for alias, name in ALIASES.items():
        assert alias not in cluster_names() and load_cluster(alias) == load_cluster(name)
    assert re.search(r"Did you mean trn\d or trn\d", faults_of("trn")["cluster"])


def test_naming_a_cluster_loads_neither_numpy_nor_yaml():
    code = "import sys; from autoshard.spec.cluster_catalogue import load_cluster; "
    code += "load_cluster('trn2u.48xlarge'); print(sorted({'numpy', 'yaml', 'torch'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
