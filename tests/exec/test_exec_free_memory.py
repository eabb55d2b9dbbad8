"""What is free: on machines and in control groups that are only described, and here."""

from __future__ import annotations

import pytest
import torch

from penstock.exec.free_memory import free_memory

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def meminfo(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 90000000 kB\nMemAvailable:    8388608 kB\n")
    return file


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_groups_it_is_the_machines(meminfo, tmp_path):
    assert free_memory(CPU, meminfo, tmp_path / "none", tmp_path / "groups") == 8 * GIB


def test_a_group_of_version_2_leaves_its_limit_less_its_use(meminfo, tmp_path):
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text("0::/service/penstock\n")
    write(groups / "service", memory__max="max\n", memory__current=str(3 * GIB))
    assert free_memory(CPU, meminfo, own, groups) == 8 * GIB
    write(groups / "service" / "penstock", memory__max=str(2 * GIB), memory__current=str(GIB))
    assert free_memory(CPU, meminfo, own, groups) == GIB


def test_pages_of_files_are_free(meminfo, tmp_path):
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text("0::/\n")
    stat = f"anon {GIB // 2}\ninactive_file {GIB}\nactive_file 5\n"
    write(groups, memory__max=str(2 * GIB), memory__current=str(3 * GIB // 2), memory__stat=stat)
    assert free_memory(CPU, meminfo, own, groups) == 3 * GIB // 2


def test_a_limit_above_counts_too(meminfo, tmp_path):
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text("0::/pod/container\n")
    write(groups / "pod", memory__max=str(GIB), memory__current=str(GIB // 4))
    write(groups / "pod" / "container", memory__max=str(2 * GIB), memory__current="0")
    assert free_memory(CPU, meminfo, own, groups) == GIB * 3 // 4


def test_a_group_of_version_1(meminfo, tmp_path):
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text("5:cpu:/other\n4:memory:/a\n0::/\n")
    write(
        groups / "memory" / "a",
        memory__limit_in_bytes=str(GIB),
        memory__usage_in_bytes=str(GIB // 2),
        memory__stat=f"inactive_file 1\ntotal_inactive_file {GIB // 4}\n",
    )
    write(groups / "memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes=str(3 * GIB))
    assert free_memory(CPU, meminfo, own, groups) == GIB * 3 // 4


def test_a_container_that_is_told_its_hosts_path_finds_its_own_limit_at_the_root(meminfo, tmp_path):
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text("0::/system.slice/docker-1234.scope\n")
    write(groups, memory__max=str(GIB), memory__current="0")
    assert free_memory(CPU, meminfo, own, groups) == GIB


def test_more_than_the_limit_in_use_leaves_nothing(meminfo, tmp_path):
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text("0::/\n")
    write(groups, memory__max=str(GIB), memory__current=str(2 * GIB))
    assert free_memory(CPU, meminfo, own, groups) == 0


def test_of_a_cuda_device_it_is_the_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert free_memory(torch.device("cuda", 0)) == 123


def test_this_machine_has_some():
    assert 2**20 < free_memory(CPU) < 2**50
